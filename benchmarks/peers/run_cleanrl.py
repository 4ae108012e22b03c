"""Reimplementation of CleanRL's ppo_atari_lstm: nn.LSTM step by step, minibatches of whole rows."""

from __future__ import annotations

import argparse
import importlib
import math

import gymnasium
import numpy as np
import torch
from harness import Environments, parser, run
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

GAMMA, LAMBDA, CLIP = 0.99, 0.95, 0.2


def orthogonal(layer: nn.Linear, gain: float) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Encoder, LSTM, and two heads."""

    def __init__(self, observations: int, actions: int, continuous: bool, size: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(orthogonal(nn.Linear(observations, size), math.sqrt(2)), nn.Tanh())
        self.lstm = nn.LSTM(size, size)
        for name, parameter in self.lstm.named_parameters():
            if "bias" in name:
                nn.init.zeros_(parameter)
            else:
                nn.init.orthogonal_(parameter)
        self.actor, self.critic = orthogonal(nn.Linear(size, actions), 0.01), orthogonal(nn.Linear(size, 1), 1.0)
        self.log_std = nn.Parameter(torch.zeros(actions)) if continuous else None

    def memory(self, x: Tensor, state: tuple[Tensor, Tensor], done: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        rows = state[0].shape[1]
        features = []
        for x_t, done_t in zip(self.encoder(x).unflatten(0, (-1, rows)), done.view(-1, rows), strict=True):
            keep = (1.0 - done_t).view(1, -1, 1)
            y, state = self.lstm(x_t.unsqueeze(0), (keep * state[0], keep * state[1]))
            features.append(y)
        return torch.cat(features).flatten(0, 1), state

    def distribution(self, features: Tensor) -> Categorical | Normal:
        out = self.actor(features)
        return Categorical(logits=out) if self.log_std is None else Normal(out, self.log_std.exp().expand_as(out))


def summed(values: Tensor) -> Tensor:
    return values.sum(-1) if values.ndim > 1 else values


class CleanRL:
    """Collects batches of shape ``[T, N]`` and learns from minibatches of whole rows."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(options.threads)
        torch.manual_seed(options.seed)
        self.options, self.environments = options, Environments(options)
        rows, steps, size = options.num_envs, options.rollout_steps, options.hidden_size
        if rows % options.minibatches:
            raise SystemExit(f"minibatches are whole rows: {options.minibatches} don't divide {rows} environments")
        self.envs = gymnasium.vector.SyncVectorEnv(
            [self.environments.make] * rows, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP
        )
        seen, space = self.envs.single_observation_space.shape, self.envs.single_action_space
        continuous = isinstance(space, gymnasium.spaces.Box)
        self.bounds = (space.low, space.high) if isinstance(space, gymnasium.spaces.Box) else None
        shape = space.shape if continuous else ()
        self.device = torch.device(options.device)
        self.agent = Agent(seen[0], shape[0] if continuous else int(space.n), continuous, size).to(self.device)
        if options.accelerate:
            importlib.import_module("recurl").accelerate(self.agent)
        self.optimizer = torch.optim.Adam(self.agent.parameters(), lr=options.learning_rate, eps=1e-5)
        self.obs = self.zeros(steps, rows, *seen)
        self.actions = self.zeros(steps, rows, *shape, dtype=torch.float32 if continuous else torch.int64)
        self.log_probs, self.rewards, self.dones, self.values = (self.zeros(steps, rows) for _ in range(4))
        self.next_obs = torch.as_tensor(self.envs.reset(seed=options.seed)[0], device=self.device)
        self.next_done = self.zeros(rows)
        self.state = (self.zeros(1, rows, size), self.zeros(1, rows, size))
        self.parameters = sum(parameter.numel() for parameter in self.agent.parameters())
        self.versions = {"torch": torch.__version__}
        self.finished = self.environments.finished

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def collect(self) -> int:
        self.first_state = self.state
        for t in range(len(self.obs)):
            self.obs[t], self.dones[t] = self.next_obs, self.next_done
            with torch.no_grad():
                features, self.state = self.agent.memory(self.next_obs, self.state, self.next_done)
                distribution = self.agent.distribution(features)
                action = distribution.sample()
                self.values[t] = self.agent.critic(features).flatten()
            self.actions[t], self.log_probs[t] = action, summed(distribution.log_prob(action))
            played = action.cpu().numpy()
            played = played if self.bounds is None else np.clip(played, *self.bounds)
            observation, reward, terminated, truncated, _ = self.envs.step(played)
            self.rewards[t] = torch.as_tensor(reward, dtype=torch.float32, device=self.device)
            self.next_obs = torch.as_tensor(observation, device=self.device)
            self.next_done = torch.as_tensor(terminated | truncated, dtype=torch.float32, device=self.device)
        return self.dones.numel()

    def advantages(self) -> Tensor:
        with torch.no_grad():
            features, _ = self.agent.memory(self.next_obs, self.state, self.next_done)
            value, done = self.agent.critic(features).flatten(), self.next_done
        advantages, last = torch.zeros_like(self.rewards), torch.zeros_like(done)
        for t in reversed(range(len(self.rewards))):
            delta = self.rewards[t] + GAMMA * value * (1.0 - done) - self.values[t]
            advantages[t] = last = delta + GAMMA * LAMBDA * (1.0 - done) * last
            value, done = self.values[t], self.dones[t]
        return advantages

    def learn(self) -> None:
        advantages = self.advantages()
        data = (self.obs, self.actions, self.log_probs, self.dones, advantages, advantages + self.values)
        obs, actions, log_probs, dones, advantages, returns = (value.flatten(0, 1) for value in data)
        rows = self.options.num_envs
        tokens, order = np.arange(len(dones)).reshape(-1, rows), np.arange(rows)
        for _ in range(self.options.epochs):
            np.random.shuffle(order)  # noqa: NPY002 - as in CleanRL
            for part in np.split(order, self.options.minibatches):
                at = tokens[:, part].ravel()
                state = (self.first_state[0][:, part], self.first_state[1][:, part])
                features, _ = self.agent.memory(obs[at], state, dones[at])
                distribution = self.agent.distribution(features)
                ratio = (summed(distribution.log_prob(actions[at])) - log_probs[at]).exp()
                advantage = (advantages[at] - advantages[at].mean()) / (advantages[at].std() + 1e-8)
                gain = torch.min(advantage * ratio, advantage * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
                error = (self.agent.critic(features).flatten() - returns[at]).square().mean()
                entropy = summed(distribution.entropy()).mean()
                self.optimizer.zero_grad()
                (-gain + 0.5 * 0.5 * error - 0.0 * entropy).backward()
                nn.utils.clip_grad_norm_(self.agent.parameters(), 0.5)
                self.optimizer.step()


if __name__ == "__main__":
    run(parser().parse_args(), CleanRL)

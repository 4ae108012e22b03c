"""CleanRL: class ``Agent`` of its ``ppo_atari_lstm.py``, and the loop of that script."""

from __future__ import annotations

import ast
import hashlib
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv
from torch import nn
from torch.distributions.categorical import Categorical

from recurl.conformance.adapter import NotOffered, Outputs, Play, Setup
from recurl.conformance.script import FEATURES, Script

VARIABLE = "CLEANRL_PPO_ATARI_LSTM"
CLIP = 0.1


class CleanRL:
    """CleanRL.

    Raises:
        FileNotFoundError: the environment variable ``CLEANRL_PPO_ATARI_LSTM`` isn't the path of ``ppo_atari_lstm.py``.
    """

    gamma, lmbda = 0.99, 0.95
    documented: Mapping[str, str] = {}

    def __init__(self) -> None:
        path = Path(os.environ.get(VARIABLE, ""))
        if not path.is_file():
            raise FileNotFoundError(f"{VARIABLE} must be the path of CleanRL's ppo_atari_lstm.py, got '{path}'.")
        text = path.read_bytes()
        self.agent = agent_class(text)
        self.versions = {
            "ppo_atari_lstm.py": hashlib.sha1(b"blob %d\0" % len(text) + text).hexdigest()[:8],  # as Git names it
            "torch": torch.__version__,
            "gymnasium": gymnasium.__version__,
        }

    def make(self, setup: Setup) -> CleanRLAgent:
        """Create an agent."""
        return CleanRLAgent(setup, self.agent, self.gamma, self.lmbda)


class CleanRLAgent:
    """``Agent`` with an encoder of three numbers instead of images; its LSTM has 128 units.

    Args:
        setup: how it collects and learns.
        agent: the class.
        gamma: discount.
        lmbda: parameter of generalized advantage estimation.
    """

    def __init__(self, setup: Setup, agent: type[Any], gamma: float, lmbda: float) -> None:
        rows = setup.script.num_envs
        if rows % setup.minibatches:
            raise NotOffered("the number of minibatches must divide the number of environments")
        np.random.seed(setup.seed)  # noqa: NPY002 - as the script does, which shuffles with it
        torch.manual_seed(setup.seed)
        self.setup, self.gamma, self.lmbda = setup, gamma, lmbda
        self.envs = environments(setup.script)
        self.agent = agent(self.envs)
        linear = nn.Linear(FEATURES, self.agent.lstm.input_size)
        linear.weight.data *= 255  # the agent divides by it
        self.agent.network = nn.Sequential(linear, nn.ReLU())
        nn.init.orthogonal_(self.agent.actor.weight)  # the script's gain of 0.01 hides the memory in the probabilities
        self.optimizer = torch.optim.Adam(self.agent.parameters(), lr=setup.learning_rate, eps=1e-5)
        empty = torch.zeros(self.agent.lstm.num_layers, rows, self.agent.lstm.hidden_size)
        self.state = (empty, empty)
        self.observation, self.done = self.envs.reset(seed=setup.seed)[0], np.zeros(rows)

    def collect(self) -> Outputs:
        """Collect a rollout ``[T, N]`` and estimate its advantages."""
        self.first = self.state
        steps: list[list[Any]] = []
        for _ in range(self.setup.steps):
            x, done = torch.Tensor(self.observation), torch.Tensor(self.done)
            with torch.no_grad():
                action, log_prob, _, value, self.state = self.agent.get_action_and_value(x, self.state, done)
            self.observation, reward, terminated, truncated, _ = self.envs.step(action.numpy())
            self.done = np.logical_or(terminated, truncated)
            steps.append([x, done, action, log_prob, value.flatten(), torch.Tensor(reward)])
        self.rollout = [torch.stack(entry) for entry in zip(*steps, strict=True)]
        x, _, action, log_prob, value, _ = self.rollout
        self.advantages = self._estimated()
        return Outputs(x, action, log_prob, value, self.advantages)

    @torch.no_grad()
    def _estimated(self) -> torch.Tensor:
        _, dones, _, _, values, rewards = self.rollout
        done = torch.Tensor(self.done)
        following = self.agent.get_value(torch.Tensor(self.observation), self.state, done).flatten()
        advantage, found = torch.zeros_like(following), torch.zeros_like(values)
        for step in reversed(range(self.setup.steps)):
            error = rewards[step] + self.gamma * following * (1 - done) - values[step]
            found[step] = advantage = error + self.gamma * self.lmbda * (1 - done) * advantage
            following, done = values[step], dones[step]
        return found

    def learn(self) -> list[Outputs]:
        """Update on minibatches of environments."""
        order = np.arange(self.setup.script.num_envs)
        found: list[Outputs] = []
        for _ in range(self.setup.epochs):
            np.random.shuffle(order)  # noqa: NPY002 - as the script does
            found += [self._update(torch.as_tensor(rows)) for rows in np.split(order, self.setup.minibatches)]
        return found

    def _update(self, rows: torch.Tensor) -> Outputs:
        x, done, action, old_log_prob, old_value, _ = (entry[:, rows].flatten(0, 1) for entry in self.rollout)
        advantage = self.advantages[:, rows].flatten()
        target = advantage + old_value
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        state = tuple(part[:, rows] for part in self.first)
        _, log_prob, entropy, value, _ = self.agent.get_action_and_value(x, state, done, action)
        value, ratio = value.view(-1), (log_prob - old_log_prob).exp()
        policy_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
        clipped = old_value + (value - old_value).clamp(-CLIP, CLIP)
        value_loss = torch.max((value - target) ** 2, (clipped - target) ** 2).mean() / 2
        self.optimizer.zero_grad()
        (policy_loss - 0.01 * entropy.mean() + 0.5 * value_loss).backward()
        nn.utils.clip_grad_norm_(self.agent.parameters(), 0.5)
        self.optimizer.step()
        return Outputs(x, action, log_prob.detach(), value.detach())

    def play(self, script: Script, steps: int) -> Outputs:
        """Raise an error."""
        raise NotOffered("the script has no evaluation")

    def save(self, path: Path) -> None:
        """Raise an error."""
        raise NotOffered("the script doesn't save its model")

    def load(self, path: Path) -> None:
        """Raise an error."""
        raise NotOffered("the script doesn't save its model")

    def export(self, path: Path) -> Play:
        """Raise an error."""
        raise NotOffered("the script has no export")

    def close(self) -> None:
        """Close the environments."""
        self.envs.close()


def agent_class(text: bytes) -> type[Any]:
    """Return class ``Agent`` of the script without running the rest of it."""
    tree = ast.parse(text)
    tree.body = [node for node in tree.body if getattr(node, "name", None) in ("layer_init", "Agent")]
    names: dict[str, Any] = {"np": np, "torch": torch, "nn": nn, "Categorical": Categorical}
    exec(compile(tree, "ppo_atari_lstm.py", "exec"), names)
    return names["Agent"]


def environments(script: Script) -> SyncVectorEnv:
    """Create the environments of a script, which reset in the step that ends an episode, as in Gymnasium 0.29.1."""
    makers = [partial(script.make, row) for row in range(script.num_envs)]
    modes = getattr(gymnasium.vector, "AutoresetMode", None)  # since Gymnasium 1.1
    return SyncVectorEnv(makers, **({} if modes is None else {"autoreset_mode": modes.SAME_STEP}))

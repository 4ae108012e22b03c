"""PPO with a recurrent actor-critic: builds environment, networks and losses from a config, and does one update."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from tensordict import TensorDictBase

from recurl.collectors import Collector, OverlappedCollector
from recurl.data import SequenceMinibatches
from recurl.envs import EnvBase
from recurl.keys import DONE, NEXT, REWARD
from recurl.lowering import Entries
from recurl.modules import RewardScaler
from recurl.objectives import ClipPPOLoss
from recurl.objectives.value import GAE
from recurl.trainers.agent import Agent, collecting
from recurl.trainers.config import PPOConfig
from recurl.trainers.cuda_graph import CudaGraphStep
from recurl.trainers.environment import make_env
from recurl.trainers.finite import first_of
from recurl.trainers.gradient_step import GradientStep
from recurl.trainers.seeding import seed_everything

_LOSSES = ("loss_objective", "loss_critic", "loss_entropy")
_DIAGNOSTICS = ("entropy", "kl_approx", "clip_fraction", "explained_variance")


class PPO:
    """One learner: its environments, networks, optimiser and statistics.

    Args:
        config: the options; its seed decides everything random.

    Source: Schulman et al., "Proximal policy optimization algorithms" (2017), with the implementation details of
    Huang et al., "The 37 implementation details of PPO" (2022): orthogonal initialisation, Adam epsilon 1e-5, annealed
    step size, advantages normalised per minibatch, gradient clipping.
    """

    agent_class = Agent
    reported = (*_LOSSES, "grad_norm", *_DIAGNOSTICS, "learning_rate")
    live = "loss {loss_objective:+.3f} (policy) {loss_critic:.3f} (value)  entropy {entropy:.2f}"

    def __init__(self, config: PPOConfig) -> None:
        torch.set_num_threads(config.threads)
        seed_everything(config.seed)
        self.config = config
        self.env_steps = 0
        self.fault: str | None = None
        env = make_env(config, config.num_envs)
        env.set_seed(config.seed)
        self.can_save_env = env.can_save_state
        self.agent = Agent(config, env.observation_spec, env.action_spec_unbatched).to(config.device)
        self.scaler = RewardScaler(config.gamma, (config.num_envs,)).to(config.device) if config.scale_rewards else None
        self.gae = GAE(gamma=config.gamma, lmbda=config.gae_lambda, value_network=self.agent.critic)
        self.loss = ClipPPOLoss(
            self.agent.actor,
            self.agent.critic,
            clip_epsilon=config.clip_epsilon,
            entropy_coeff=config.entropy_coeff,
            critic_coeff=config.critic_coeff,
            loss_critic_type="l2",
            normalize_advantage=True,
        )
        self.optimizer = GradientStep(
            self.agent.parameters(),
            learning_rate=config.learning_rate,
            max_norm=config.max_grad_norm,
            eps=1e-5,
            capturable=config.cuda_graph,
        )
        self._train = self._captured() if config.cuda_graph else self._step
        self.collector = self._make_collector(env)

    def _make_collector(self, env: EnvBase) -> Collector | OverlappedCollector:
        config, policy = self.config, collecting(self.agent.policy)
        if not config.overlap:
            return Collector(env, policy, frames_per_batch=config.frames_per_batch, device=config.device)
        env.close()
        create = partial(make_env, config, config.num_envs)
        collector = OverlappedCollector(create, policy, frames_per_batch=config.frames_per_batch)
        collector.set_seed(config.seed)
        return collector

    def collect(self) -> TensorDictBase:
        """Take ``rollout_steps`` steps in every environment and return the batch, ``[B, T]``."""
        batch = self.collector.collect()
        self.env_steps += batch.numel()
        return batch

    def learn(self, batch: TensorDictBase) -> dict[str, float]:
        """Improve the networks on a batch.

        Args:
            batch: what :meth:`collect` returned, ``[B, T]``; rewards are replaced by scaled ones.

        Returns:
            Losses and gradient norm, averaged over the update; diagnostics, averaged over its last epoch; and the step
            size used. Steps whose loss or norm wasn't finite were not made; ``fault`` names the first of these.
        """
        fraction = self._set_schedules()
        if self.scaler is not None:
            self.scaler.update(batch[NEXT, REWARD], batch[NEXT, DONE])
            batch[NEXT, REWARD] = self.scaler(batch[NEXT, REWARD])
        self.gae(batch)
        data = batch.select(*self.loss.in_keys, strict=False)
        minibatches = SequenceMinibatches(data, self.config.minibatches, self.config.sequence_length)
        epochs = [self._epoch(minibatches, last=left == 0) for left in reversed(range(self.config.epochs))]
        if self.agent.norm is not None:
            flat = self.agent.flat
            self.agent.norm.update(flat(*(batch[key] for key in flat.keys)))
        split = len(_LOSSES) + 1
        steps = [values[:split] for epoch in epochs for values in epoch]
        means = torch.cat([_means(steps), _means([values[split:] for values in epochs[-1]])])
        values = (*means.tolist(), self.config.learning_rate * fraction)
        learned: dict[str, float] = dict(zip(self.reported, values, strict=True))
        self.fault = first_of(learned, self.reported[:split])
        return learned

    def restart(self, rows: torch.Tensor) -> bool:
        """Begin new episodes in some environments; see :meth:`Algorithm.restart`."""
        self.collector.reset_rows(rows)
        if self.scaler is not None:
            self.scaler.returns[rows] = 0
        return self.config.overlap

    def _epoch(self, minibatches: SequenceMinibatches, *, last: bool) -> list[list[torch.Tensor]]:
        """Make the gradient steps of an epoch and return what each reports; the diagnostics in the last one."""
        self.loss.metrics = last or self.config.cuda_graph  # a captured step always does the same
        return [list(self._train(minibatch)) for minibatch in minibatches.entries()]

    def _set_schedules(self) -> float:
        done = self.env_steps // self.config.frames_per_batch - 1
        fraction = 1 - done / self.config.updates if self.config.anneal else 1.0
        self.optimizer.set_learning_rate(self.config.learning_rate * fraction)
        if isinstance(self.loss.entropy_coeff, torch.Tensor):
            self.loss.entropy_coeff.fill_(self.config.entropy_coeff * fraction)
        else:
            self.loss.entropy_coeff = self.config.entropy_coeff * fraction
        return fraction

    def _captured(self) -> CudaGraphStep:
        """The same step as a CUDA graph, in which the numbers that change are tensors."""
        if self.config.entropy_coeff:
            self.loss.entropy_coeff = torch.tensor(self.config.entropy_coeff, device=self.config.device)
        return CudaGraphStep(lambda minibatch: torch.stack(self._step(minibatch)), self.agent, self.optimizer.optimizer)

    def _step(self, minibatch: Entries) -> list[torch.Tensor]:
        losses = self.loss.tensors(minibatch)
        norm = self.optimizer(cast(torch.Tensor, sum(losses[name] for name in _LOSSES)))
        diagnostics = [losses[name] for name in _DIAGNOSTICS] if self.loss.metrics else []
        return [*(losses[name].detach() for name in _LOSSES), norm, *diagnostics]

    def close(self) -> None:
        """Close the environments."""
        self.collector.shutdown()

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to go on: networks, optimiser, statistics, environments, carried states."""
        return {
            "env_steps": self.env_steps,
            "agent": self.agent.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "collector": self.collector.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned.

        A state of other options raises whatever the part that it doesn't fit raises.
        """
        self.agent.load_state_dict(state["agent"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        restored = self.collector.load_state_dict(state["collector"])
        self.env_steps = state["env_steps"]
        if not restored:
            self.collector.set_seed(self.config.seed + self.env_steps)  # other episodes than those of the beginning


def _means(rows: list[list[torch.Tensor]]) -> torch.Tensor:
    """Means over rows of scalars, one for each column."""
    return torch.stack([value for row in rows for value in row]).reshape(len(rows), -1).mean(0)

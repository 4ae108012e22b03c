"""DQN and R2D2: builds environment, network, replay buffer and loss from a config, and does one update."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import TensorDictBase

from recurl.collectors import Collector
from recurl.data import (
    LazyTensorStorage,
    PrioritizedSliceSampler,
    SliceSampler,
    TensorDictReplayBuffer,
    ZeroStart,
    slice_priorities,
)
from recurl.objectives import DQNLoss, HardUpdate
from recurl.trainers.agent import collecting
from recurl.trainers.config import NO_CELL
from recurl.trainers.environment import make_env
from recurl.trainers.finite import all_finite, first_of
from recurl.trainers.gradient_step import GradientStep
from recurl.trainers.q_agent import QAgent
from recurl.trainers.replay_burn_in import MidEpisodeBurnIn
from recurl.trainers.replay_config import DQNConfig
from recurl.trainers.seeding import seed_everything

_REPORTED = ("loss", "q_value", "q_target")
_CHECKED = (*_REPORTED, "grad_norm")


class DQN:
    """One learner: its environments, network, target network, replay buffer and optimiser.

    Args:
        config: the options; its seed decides everything random. Those of R2D2 are the same with other defaults.

    Sources: Hausknecht and Stone, "Deep recurrent Q-learning for partially observable MDPs" (2015); Kapturowski et al.,
    "Recurrent experience replay in distributed reinforcement learning" (R2D2, 2019).
    """

    agent_class = QAgent
    reported = (*_CHECKED, "eps")
    live = "loss {loss:.4f}  value {q_value:.3f}  eps {eps:.2f}"

    def __init__(self, config: DQNConfig) -> None:
        torch.set_num_threads(config.threads)
        seed_everything(config.seed)
        self.config = config
        self.env_steps = 0
        self.fault: str | None = None
        env = make_env(config, config.num_envs)
        env.set_seed(config.seed)
        self.can_save_env = env.can_save_state
        self.agent = QAgent(config, env.observation_spec, env.action_spec_unbatched).to(config.device)
        self.loss = DQNLoss(
            self.agent.actor,
            gamma=config.gamma,
            n_steps=config.n_steps,
            double_dqn=config.double,
            value_rescaling=config.value_rescaling,
        )
        self.targets = HardUpdate(self.loss, value_network_update_interval=config.target_interval)
        self.optimizer = GradientStep(
            self.agent.actor.parameters(), learning_rate=config.learning_rate, max_norm=config.max_grad_norm
        )
        self.collector = Collector(
            env, collecting(self.agent.policy), frames_per_batch=config.frames_per_batch, device=config.device
        )
        self.buffer = _make_buffer(config)
        self._burn_in = self._make_burn_in()
        if config.cell != NO_CELL and config.start_state == "zero":
            self.buffer.append_transform(ZeroStart(self.agent.actor))

    def _make_burn_in(self) -> tuple[MidEpisodeBurnIn, ...]:
        """Burn-ins of the network and of its target, if there are any."""
        if self.config.cell == NO_CELL or self.config.burn_in == 0:
            return ()
        steps = self.config.burn_in
        return tuple(MidEpisodeBurnIn(network, steps) for network in (self.agent.actor, self.loss.target_value_network))

    def collect(self) -> TensorDictBase:
        """Take ``rollout_steps`` steps in every environment and return the batch, ``[B, T]``."""
        batch = self.collector.collect()
        self.env_steps += batch.numel()
        self.agent.explore.step(batch.numel())
        return batch

    def learn(self, batch: TensorDictBase) -> dict[str, float]:
        """Put a batch into the buffer and improve the network on samples of it.

        Args:
            batch: what :meth:`collect` returned, ``[B, T]``.

        Returns:
            Loss, mean value of the actions taken and mean target, averaged over the update (nan before learning
            starts), the norm of the gradient, and the present probability of a random action. Steps whose loss or norm
            wasn't finite were not made; ``fault`` names the first of these.
        """
        self.buffer.extend(batch.select(*self.loss.in_keys, strict=False))
        if self.agent.norm is not None:
            flat = self.agent.flat
            self.agent.norm.update(flat(*(batch[key] for key in flat.keys)))
        learned = {**dict.fromkeys(_CHECKED, math.nan), "eps": self.agent.explore.eps.item()}
        if self.env_steps >= self.config.learning_starts:
            mean = torch.stack([self._step() for _ in range(self.config.gradient_steps)]).mean(0)
            learned.update(zip(_CHECKED, mean.tolist(), strict=True))
            self.fault = first_of(learned, _CHECKED)
        return learned

    def restart(self, rows: torch.Tensor) -> bool:
        """Begin new episodes in some environments; see :meth:`Algorithm.restart`."""
        self.collector.reset_rows(rows)
        return False

    def _step(self) -> torch.Tensor:
        sample = self.buffer.sample().to(self.config.device)
        trained = self._burnt_in(sample)
        losses = self.loss(trained)
        norm = self.optimizer(losses["loss"])
        self.targets.step()
        if self.config.prioritized and all_finite([norm, losses["td_error"]]):
            priority = slice_priorities(sample, losses["td_error"], trained, eta=self.config.priority_eta)
            self.buffer.update_priority(sample["index"], priority, sample["collector", "write_step"])
        return torch.stack([*(losses[name].detach() for name in _REPORTED), norm])

    def _burnt_in(self, sample: TensorDictBase) -> TensorDictBase:
        """The steps to learn from, each network's states computed by that network."""
        if not self._burn_in:
            return sample
        rest, slow = (burn_in(sample) for burn_in in self._burn_in)
        for key, at in self.loss.target_states.items():
            rest.set(at, slow.get(key))
        return rest

    def close(self) -> None:
        """Close the environments."""
        self.collector.shutdown()

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to go on: networks, optimiser, buffer, environments, carried states."""
        return {
            "env_steps": self.env_steps,
            "agent": self.agent.state_dict(),
            "target": self.loss.target_value_network.state_dict(),
            "targets": self.targets.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "buffer": self.buffer.state_dict(),
            "collector": self.collector.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned.

        A state of other options raises whatever the part that it doesn't fit raises.
        """
        self.agent.load_state_dict(state["agent"])
        self.loss.target_value_network.load_state_dict(state["target"])
        self.targets.load_state_dict(state["targets"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.buffer.load_state_dict(state["buffer"])
        restored = self.collector.load_state_dict(state["collector"])
        self.env_steps = state["env_steps"]
        if not restored:
            self.collector.set_seed(self.config.seed + self.env_steps)  # other episodes than those of the beginning


def _make_buffer(config: DQNConfig) -> TensorDictReplayBuffer:
    if config.prioritized:
        sampler = PrioritizedSliceSampler(
            config.buffer_size,
            config.priority_exponent,
            config.importance_exponent,
            slice_len=config.slice_length,
            strict_length=False,
        )
    else:
        sampler = SliceSampler(slice_len=config.slice_length, strict_length=False)
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(config.buffer_size, device=config.device, ndim=2),
        sampler=sampler,
        batch_size=config.slices * config.slice_length,
    )

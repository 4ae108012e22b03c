"""Base of all learners: seed, environments, networks, collector, the parts of a checkpoint."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from tensordict import TensorDictBase
from torch import Tensor

from recurl.collectors import Collector, OverlappedCollector, RayCollector
from recurl.collectors.captured import tensor_env
from recurl.envs import EnvBase
from recurl.errors import UnsupportedError
from recurl.keys import TRAJ_STEPS, WEIGHTS_LAG
from recurl.modules import RewardScaler
from recurl.specs import Composite, TensorSpec
from recurl.trainers.algorithms.actors import actors_of
from recurl.trainers.algorithms.environment import training_env
from recurl.trainers.algorithms.footprint import check_machine
from recurl.trainers.algorithms.schedules import SCHEDULES
from recurl.trainers.algorithms.seeding import seed_everything
from recurl.trainers.config import RunConfig
from recurl.trainers.networks.agent import Agent, collecting
from recurl.trainers.optim.finite import first_of
from recurl.trainers.optim.gradient_step import GradientStep
from recurl.trainers.report.metrics import COLLECTION

ConfigT = TypeVar("ConfigT", bound=RunConfig)
AgentT = TypeVar("AgentT", bound=Agent)


class Stateful(Protocol):
    """A part of a learner that a checkpoint holds."""

    def state_dict(self) -> Any:
        """Return the state as tensors and plain values."""
        ...

    def load_state_dict(self, state: Any, /) -> Any:
        """Restore what :meth:`state_dict` returned."""
        ...


class Learner(ABC, Generic[ConfigT, AgentT]):
    """Collects batches and learns from them; the base of every algorithm.

    A subclass names what it reports, builds its networks (:meth:`make_agent`), losses and optimiser, lists what a
    checkpoint must hold (:meth:`parts`), and learns (:meth:`learn`). Its step size follows the schedule of the options;
    for other options with a schedule it says how to set them (:meth:`schedules`).

    Args:
        config: the options; the seed decides everything random.
        overlap: collect in a second process, one update behind.

    Attributes:
        config: the options.
        agent: the networks, on the device of the run.
        collector: collects with ``agent.policy``.
        env_steps: environment steps taken.
        can_save_env: True where running episodes can be saved and restored.
        collection: numbers of the actors that collect, by column of the metrics; empty without actors.
        fault: the number of the latest update that wasn't finite, None if all were; :meth:`report` sets it.

    Raises:
        ArgumentError: the environment can't be made.
    """

    reported: ClassVar[tuple[str, ...]]
    """Names of the numbers that :meth:`learn` returns: columns of ``metrics.csv``."""
    live: ClassVar[str]
    """Format of those that are shown during training, such as ``"loss {loss:.3f}"``."""
    captures = False
    """Whether what can be a CUDA graph is launched as one: gradient steps, and collection from tasks on the device."""
    collected: ClassVar[tuple[str, ...]] = ("collector",)
    """Parts of a checkpoint that hold collected data, which was checked for NaN when it was collected."""

    def __init__(self, config: ConfigT, *, overlap: bool = False) -> None:
        torch.set_num_threads(config.threads)
        seed_everything(config.seed)
        self.config = config
        self.env_steps = 0
        self.fault: str | None = None
        env = training_env(config)
        check_machine(config, env.observation_spec)
        env.set_seed(config.seed)
        self.can_save_env = env.can_save_state
        self.agent = self.make_agent(config, env.observation_spec, env.action_spec_unbatched).to(config.device)
        self._overlap = overlap
        self.collection: dict[str, float] = dict.fromkeys(COLLECTION, math.nan) if config.actors else {}
        self.collector = self._overlapped(env) if overlap else self._collector(env)

    @classmethod
    @abstractmethod
    def make_agent(cls, config: ConfigT, observation_spec: Composite, action_spec: TensorSpec) -> AgentT:
        """Build the networks, untrained.

        Args:
            config: the options.
            observation_spec: observations of the environments, ``[*B]``.
            action_spec: actions of one environment.

        Raises:
            UnsupportedError: the algorithm can't choose such actions.
        """

    @abstractmethod
    def learn(self, batch: TensorDictBase) -> dict[str, float]:
        """Learn from a batch.

        Args:
            batch: what :meth:`collect` returned, ``[B, T]``.

        Returns:
            The numbers that ``reported`` names, through :meth:`report`.
        """

    def report(self, learned: dict[str, float], checked: Sequence[str] | None = None) -> dict[str, float]:
        """Return ``learned``, and set ``fault`` to the first number in it that isn't finite.

        Args:
            learned: what :meth:`learn` returns.
            checked: names of the numbers that must be finite; all of them by default.
        """
        self.fault = first_of(learned, list(learned) if checked is None else checked)
        return learned

    def parts(self) -> dict[str, Stateful | None]:
        """Return what a checkpoint holds besides the collector, by name; None for what the options leave out.

        The parts are restored in this order. A subclass adds its own: ``{**super().parts(), "optimizer": ...}``.
        """
        return {"agent": self.agent}

    def _collector(self, env: EnvBase) -> Collector | RayCollector:
        policy, config = collecting(self.agent.policy), self.config
        if config.actors:
            env.close()
            return actors_of(config, policy)
        graph = self.captures and tensor_env(env) is not None
        return Collector(env, policy, frames_per_batch=config.frames_per_batch, device=config.device, cuda_graph=graph)

    def _overlapped(self, env: EnvBase) -> OverlappedCollector:
        policy, config = collecting(self.agent.policy), self.config
        env.close()
        collector = OverlappedCollector(partial(training_env, config), policy, frames_per_batch=config.frames_per_batch)
        collector.set_seed(config.seed)
        return collector

    @property
    def remaining(self) -> float:
        """Fraction of the run that remains, 1 at the first update: the factor of linear schedules."""
        done = self.env_steps // self.config.frames_per_batch - 1
        return 1 - done / self.config.updates

    @property
    def scheduled(self) -> dict[str, float]:
        """Values at this update of the options that have a schedule, by name."""
        factors = {name: SCHEDULES[schedule](self.remaining) for name, schedule in self.config.scheduled.items()}
        return {name: getattr(self.config, name) * factor for name, factor in factors.items()}

    def schedules(self) -> dict[str, Callable[[float], None]]:
        """Return what sets each option that has a schedule, by name: here the step size of all optimisers.

        A subclass whose options have more, such as ``temperature`` and ``temperature_schedule``, adds how to set them:
        ``{**super().schedules(), "temperature": ...}``.
        """
        return {"learning_rate": self._set_learning_rate}

    def _set_learning_rate(self, value: float) -> None:
        for part in self.parts().values():
            if isinstance(part, GradientStep):
                part.set_learning_rate(value)

    def collect(self) -> TensorDictBase:
        """Take ``rollout_steps`` steps in every environment and return the batch, ``[B, T]``.

        Options that have a schedule get their values for this batch.

        Raises:
            UnsupportedError: the learner doesn't say how to set one of them.
        """
        if isinstance(self.collector, RayCollector):
            self.collector.update_policy_weights_()
        batch = self.collector.collect()
        if isinstance(self.collector, RayCollector):
            self._note(self.collector, batch)
        self.env_steps += batch.numel()
        setters = self.schedules()
        for name, value in self.scheduled.items():
            if name not in setters:
                raise UnsupportedError(
                    f"{type(self).__name__} must say in schedules() how to set {name}, as its options have "
                    f"{name}_schedule."
                )
            setters[name](value)
        return batch

    def _note(self, collector: RayCollector, batch: TensorDictBase) -> None:
        """Take note of what actors did; episodes that ended with one are not carried on."""
        lag = batch[WEIGHTS_LAG].double()
        numbers = (lag.mean().item(), lag.max().item(), len(collector.replacements), collector.lost_frames)
        self.collection = dict(zip(COLLECTION, numbers, strict=True))
        begins = batch[TRAJ_STEPS][..., 0] == 0
        for part in self.parts().values():
            if isinstance(part, RewardScaler):
                part.returns.masked_fill_(begins, 0.0)

    def restart(self, rows: Tensor) -> bool:
        """Begin new episodes in some environments.

        Args:
            rows: which ones, bool ``[B]``.

        Returns:
            True where the next batch has begun already, so that only the one after it starts with new episodes.
        """
        self.collector.reset_rows(rows)
        return self._overlap or (self.config.actors > 0 and self.config.lag > 0)

    def close(self) -> None:
        """Close the environments."""
        self.collector.shutdown()

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state: parts, environments, carried hidden states."""
        parts = {name: None if part is None else part.state_dict() for name, part in self.parts().items()}
        return {"env_steps": self.env_steps, **parts, "collector": self.collector.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        A state of other options raises the error of the first part that it doesn't fit.
        """
        for name, part in self.parts().items():
            if part is not None:
                part.load_state_dict(state[name])
        restored = self.collector.load_state_dict(state["collector"])
        self.env_steps = state["env_steps"]
        if not restored:
            self.collector.set_seed(self.config.seed + self.env_steps)  # other episodes than those of the beginning

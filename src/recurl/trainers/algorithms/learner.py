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
from recurl.collectors.captured import Programs, tensor_env
from recurl.collectors.threaded import ThreadedCollector
from recurl.distributed import broadcast_parameters, rank, world_size
from recurl.envs import EnvBase
from recurl.errors import ArgumentError, UnsupportedError
from recurl.keys import TRAJ_STEPS, WEIGHTS_LAG
from recurl.modules import RewardScaler
from recurl.seeding import EnvPurpose, env_seed, seed_everything
from recurl.specs import Composite, TensorSpec
from recurl.trainers.algorithms.actors import actors_of
from recurl.trainers.algorithms.environment import training_env
from recurl.trainers.algorithms.footprint import check_machine
from recurl.trainers.algorithms.schedules import SCHEDULES
from recurl.trainers.config import RunConfig
from recurl.trainers.networks.agent import Agent, check_names, collecting
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
        overlap: collect in a second process, or on a GPU in a second thread, one update behind.

    Attributes:
        config: the options.
        agent: the networks, on the device of the run.
        collector: collects with ``agent.policy``.
        env_steps: environment steps taken, by all ranks.
        state_obstacle: why running episodes can't be saved and restored; None where they can.
        restored_episodes: whether the last :meth:`load_state_dict` restored running episodes.
        collection: numbers of the actors that collect, by column of the metrics; empty without actors.
        fault: the number of the latest update that wasn't finite, None if all were; :meth:`report` sets it.

    Raises:
        ArgumentError: the environment can't be made.
    """

    reported: ClassVar[tuple[str, ...]]
    """Names of the numbers that :meth:`learn` returns: columns of ``metrics.csv``."""
    live: ClassVar[str]
    """Format of those that are shown during training, such as ``"loss {loss:.3f}"``."""
    collected: ClassVar[tuple[str, ...]] = ("collector",)
    """Parts of a checkpoint that hold collected data, which was checked for NaN when it was collected."""
    data_parallel: ClassVar[bool] = False
    """Whether ranks of torchrun may learn together: gradients, statistics and numbers are those of all of them."""

    def __init__(self, config: ConfigT, *, overlap: bool = False) -> None:
        torch.set_num_threads(config.threads)
        seed_everything(config.seed, "environments", rank())
        self.config = config
        self._overlap = overlap
        if world_size() > 1:
            self.check_ranks()
        self.env_steps = 0
        self.fault: str | None = None
        env = training_env(config)
        check_machine(config, env.observation_spec)
        env.set_seed(self.env_seed)
        self.state_obstacle = env.state_obstacle
        self.restored_episodes = False
        seed_everything(config.seed, "networks")  # the same on all ranks
        self.agent = self.make_agent(config, env.observation_spec, env.action_spec_unbatched).to(config.device)
        check_names(self.agent)
        broadcast_parameters(self.agent)
        seed_everything(config.seed, "training", rank())
        self.collection: dict[str, float] = dict.fromkeys(COLLECTION, math.nan) if config.actors else {}
        self.collector = self._overlapped(env) if overlap else self._collector(env)

    @property
    def can_save_env(self) -> bool:
        """True where running episodes can be saved and restored."""
        return self.state_obstacle is None

    @property
    def programs(self) -> Programs:
        """How a collector runs its steps, those of tasks on the device; of others the policy alone can be a graph."""
        return Programs()

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

    @property
    def learns_ahead(self) -> bool:
        """Whether :meth:`learn_later` returns before the device has learnt."""
        return False

    def learn_later(self, batch: TensorDictBase) -> Callable[[], dict[str, float]]:
        """Learn from a batch, and return what waits for the result of :meth:`learn` and returns it."""
        learned = self.learn(batch)
        return lambda: learned

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
            return actors_of(config, policy, self.env_seed)
        programs = self.programs
        if tensor_env(env) is None:  # what steps on the host is no program
            on_gpu = torch.device(config.device).type != "cpu"
            programs = Programs(cuda_graph=on_gpu and programs.get("cuda_graph", False))
        return Collector(
            env,
            policy,
            frames_per_batch=config.frames_per_batch,
            device=config.device,
            sequence_length=config.states_every,
            **programs,
        )

    def _overlapped(self, env: EnvBase) -> OverlappedCollector | ThreadedCollector:
        policy, config = collecting(self.agent.policy), self.config
        if torch.device(config.device).type != "cpu":  # a second process would have to take turns on the GPU
            return ThreadedCollector(
                env,
                policy,
                frames_per_batch=config.frames_per_batch,
                device=config.device,
                sequence_length=config.states_every,
            )
        env.close()
        collector = OverlappedCollector(
            partial(training_env, config),
            policy,
            frames_per_batch=config.frames_per_batch,
            timeout=config.env_timeout,
        )
        collector.set_seed(self.env_seed)
        return collector

    def check_ranks(self) -> None:
        """Refuse several ranks where they can't learn together.

        Raises:
            UnsupportedError: the algorithm, or a way of collecting, is for one process.
            ArgumentError: a number of the options doesn't fit.
        """
        if not self.data_parallel:
            raise UnsupportedError(
                f"{self.config.algorithm} can't learn over several ranks (its learner does not say data_parallel = "
                "True): start it without torchrun."
            )
        if self._overlap:
            raise UnsupportedError("--overlap can't be used over several ranks: leave it out.")
        if self.config.total_steps < self.frames_per_update:
            raise ArgumentError(
                f"--total-steps must cover one batch of all {world_size()} ranks, {self.frames_per_update} steps, got "
                f"{self.config.total_steps}: raise it, or lower --num-envs, which is that of each rank."
            )

    @property
    def env_seed(self) -> int:
        """Seed of this rank's first environment; its others, and those of the other ranks, follow."""
        return self._env_seed("training")

    def _env_seed(self, purpose: EnvPurpose, *numbers: int) -> int:
        return env_seed(self.config.seed, purpose, *numbers) + rank() * self.config.num_envs

    @property
    def frames_per_update(self) -> int:
        """Environment steps between two updates, of all ranks."""
        return self.config.frames_per_batch * world_size()

    @property
    def total_steps(self) -> int:
        """Environment steps of the whole run: as many as fit into ``total_steps`` of the options."""
        return self.config.total_steps // self.frames_per_update * self.frames_per_update

    @property
    def remaining(self) -> float:
        """Fraction of the run that remains, 1 at the first update: the factor of linear schedules."""
        return 1 - (self.env_steps - self.frames_per_update) / self.total_steps

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
        self.env_steps += batch.numel() * world_size()
        setters = self.schedules()
        for name, value in self.scheduled.items():
            if name not in setters:
                raise UnsupportedError(
                    f"{type(self).__name__} must say in schedules() how to set {name}, as its options have "
                    f"{name}_schedule."
                )
            setters[name](value)
        return batch

    @property
    def own(self) -> tuple[str, ...]:
        """Parts of a checkpoint that differ between ranks."""
        return (*self.collected, "scaler")

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

    def settle(self) -> None:
        """Wait for a batch that is collected meanwhile, so that nothing draws random numbers but the caller."""
        if isinstance(self.collector, ThreadedCollector):
            self.collector.wait()

    def close(self) -> None:
        """Close the environments."""
        self.collector.shutdown()

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state: parts, environments, carried hidden states."""
        parts = {name: None if part is None else part.state_dict() for name, part in self.parts().items()}
        return {"env_steps": self.env_steps, **parts, "collector": self.collector.state_dict()}

    def load_state_dict(self, state: dict[str, Any], *, begin_anew: bool = False) -> None:
        """Restore what :meth:`state_dict` returned.

        A state of other options raises the error of the first part that it doesn't fit.

        Args:
            state: what was returned.
            begin_anew: begin new episodes, with new random numbers: the state is that of a run over other ranks.
        """
        for name, part in self.parts().items():
            if part is not None:
                part.load_state_dict(state[name])
        self.env_steps = state["env_steps"]
        if begin_anew:
            seed_everything(self.config.seed, "restart", self.env_steps, rank())
            scaler = self.parts().get("scaler")
            if isinstance(scaler, RewardScaler):
                scaler.returns.zero_()
        self.restored_episodes = not begin_anew and self.collector.load_state_dict(state["collector"])
        if not self.restored_episodes:
            self.collector.set_seed(self._env_seed("restart", self.env_steps))

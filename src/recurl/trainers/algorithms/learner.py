"""Base class of all learners: seeding, environments, networks, collector, checkpoint state."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from recurl.collectors import Collector
from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.core.keys import AGENT_MASK, TRAJ_STEPS, WEIGHTS_LAG
from recurl.core.seeding import EnvPurpose, env_seed, seed_everything
from recurl.core.specs import Composite, TensorSpec, has_real_part
from recurl.distributed import broadcast_parameters, rank, world_size
from recurl.envs import EnvBase
from recurl.envs.parameters import Parameter, checked_parameters
from recurl.execution.background import compiled_later
from recurl.modules import RewardScaler
from recurl.trainers.algorithms.environment import training_env
from recurl.trainers.algorithms.footprint import check_machine
from recurl.trainers.algorithms.schedules import SCHEDULES
from recurl.trainers.config import RunConfig
from recurl.trainers.networks.agent import Agent, check_names, collecting
from recurl.trainers.networks.initial import Initial, take_networks
from recurl.trainers.optim.finite import first_nonfinite
from recurl.trainers.optim.gradient_step import GradientStep

if TYPE_CHECKING:
    from recurl.collectors import OverlappedCollector, RayCollector
    from recurl.collectors.captured import CaptureOptions
    from recurl.collectors.threaded import ThreadedCollector

ConfigT = TypeVar("ConfigT", bound=RunConfig)
AgentT = TypeVar("AgentT", bound=Agent)


class Stateful(Protocol):
    """A part of a learner that is saved in checkpoints."""

    def state_dict(self) -> Any:
        """Return the state as tensors and plain values."""
        ...

    def load_state_dict(self, state: Any, /) -> Any:
        """Load a state returned by :meth:`state_dict`."""
        ...


class Learner(ABC, Generic[ConfigT, AgentT]):
    """Base class of all algorithms: collects batches and learns from them.

    A subclass declares the metrics it reports, builds its networks (:meth:`make_agent`), losses and optimizers, lists
    the parts of a checkpoint (:meth:`parts`), and implements :meth:`learn`. The learning rate follows its schedule
    automatically; for other scheduled options, override :meth:`schedules`.

    Args:
        config: the options, including the random seed.
        overlap: collect in a second process, or on a GPU in a second thread, with a policy that is one update old.

    Attributes:
        config: the options.
        agent: the networks, on the device of the run.
        collector: collector that runs ``agent.policy``.
        env_steps: environment steps taken by all ranks.
        state_obstacle: reason why running episodes can't be saved and restored; None if they can.
        restored_episodes: whether the last :meth:`load_state_dict` restored running episodes.
        collection: metrics of the actors by column name; empty without actors.
        real_actions: whether the actions, or parts of them, are real-valued.
        parameters: parameters of the environments that were changed, by name; see :meth:`set_parameters`.
        fault: the first non-finite metric of the latest update, or None; set by :meth:`report`.

    Raises:
        ArgumentError: if the environment can't be created.
    """

    reported: tuple[str, ...]
    """Names of the metrics that :meth:`learn` returns: columns of ``metrics.csv``."""
    live: ClassVar[str]
    """Format string of the metrics shown during training, such as ``"loss {loss:.3f}"``."""
    collected: ClassVar[tuple[str, ...]] = ("collector",)
    """Parts of a checkpoint that hold collected data, which is checked for NaN during collection."""
    data_parallel: ClassVar[bool] = False
    """Whether the learner supports several ranks under torchrun, averaging gradients, statistics and metrics over
    them."""

    masks_agents: ClassVar[bool] = False
    """Whether the learner ignores the steps of absent agents, which batches mask."""

    def __init__(self, config: ConfigT, *, overlap: bool = False) -> None:
        torch.set_num_threads(config.threads)
        seed_everything(config.seed, "environments", rank())
        self.config = config
        self._overlap = overlap
        if world_size() > 1:
            self.check_ranks()
        self.env_steps = 0
        self.fault: str | None = None
        env = self.training_env()
        self._check_agents(env)
        check_machine(config, env.observation_spec)
        env.set_seed(self.env_seed)
        self.state_obstacle = env.state_obstacle
        self._rows_per_env = env.rows_per_env
        self.restored_episodes = False
        seed_everything(config.seed, "networks")  # the same on all ranks
        self.agent = self.make_agent(config, env.observation_spec, env.action_spec_unbatched).to(config.device)
        check_names(self.agent)
        broadcast_parameters(self.agent)
        seed_everything(config.seed, "training", rank())
        self.real_actions = has_real_part(env.action_spec_unbatched)
        self.collection: dict[str, float] = {}
        self.parameters: dict[str, Parameter] = {}
        if config.actors:
            from recurl.trainers.report.metrics import COLLECTION  # noqa: PLC0415 - imported where it is used

            self.collection = dict.fromkeys(COLLECTION, math.nan)
        self.collector = self._overlapped(env) if overlap else self._collector(env)

    def _check_agents(self, env: EnvBase) -> None:
        if AGENT_MASK in env.observation_spec and (world_size() > 1 or not self.masks_agents):
            env.close()
            name = self.config.algorithm_name()
            what = "with several ranks" if self.masks_agents else f"with {name}, which replays all steps"
            raise UnsupportedError(
                f"Agents may leave {self.config.env_name} and return, which isn't supported {what}: use ppo, a2c or "
                "impala in one process; or, if all agents stay, --env-kwargs agents_leave=False."
            )

    @property
    def programs(self) -> CaptureOptions:
        """How the collector compiles or captures its steps. Without device tasks, only the policy can be captured."""
        return {}

    @classmethod
    @abstractmethod
    def make_agent(cls, config: ConfigT, observation_spec: Composite, action_spec: TensorSpec) -> AgentT:
        """Build the untrained networks.

        Args:
            config: the options.
            observation_spec: spec of the environments' observations, ``[*B]``.
            action_spec: spec of the actions of a single environment.

        Raises:
            UnsupportedError: if the algorithm doesn't support these actions.
        """

    @abstractmethod
    def learn(self, batch: TensorDictBase) -> dict[str, float]:
        """Learn from a batch.

        Args:
            batch: batch returned by :meth:`collect`, ``[B, T]``.

        Returns:
            The metrics named in ``reported``, passed through :meth:`report`.
        """

    @property
    def learns_ahead(self) -> bool:
        """Whether :meth:`learn_later` returns before the device has finished the update."""
        return False

    def learn_later(self, batch: TensorDictBase) -> Callable[[], dict[str, float]]:
        """Launch an update on a batch; return a function that waits for the result of :meth:`learn` and returns it."""
        learned = self.learn(batch)
        return lambda: learned

    def report(self, learned: dict[str, float], checked: Sequence[str] | None = None) -> dict[str, float]:
        """Return ``learned``, and set ``fault`` to its first non-finite metric.

        Args:
            learned: metrics to be returned by :meth:`learn`.
            checked: names of the metrics that must be finite; all by default.
        """
        self.fault = first_nonfinite(learned, list(learned) if checked is None else checked)
        return learned

    def parts(self) -> dict[str, Stateful | None]:
        """Return the parts of a checkpoint besides the collector, by name; None for parts that the options disable.

        Parts are restored in this order. A subclass adds its own: ``{**super().parts(), "optimizer": ...}``.
        """
        return {"agent": self.agent}

    def training_env(self) -> EnvBase:
        """Create the training environments."""
        return training_env(self.config)

    def behavior(self, env: EnvBase) -> TensorDictModuleBase:
        """Return the policy that collects in ``env``, with the outputs that a batch needs."""
        del env
        return collecting(self.agent.policy)

    def _collector(self, env: EnvBase) -> Collector | RayCollector:
        policy, config = self.behavior(env), self.config
        if config.actors:
            from recurl.trainers.algorithms.actors import actors_of  # noqa: PLC0415 - imports Ray collectors

            env.close()
            return actors_of(config, policy, self.env_seed)
        programs: CaptureOptions = self.programs
        if env.tensor_env is None:  # host environments can't be compiled or captured
            on_gpu = torch.device(config.device).type != "cpu"
            programs = {"cuda_graph": on_gpu and programs.get("cuda_graph", False)}
        return Collector(
            env,
            policy,
            frames_per_batch=config.frames_per_batch,
            device=config.device,
            sequence_length=config.states_every,
            **programs,
        )

    def _overlapped(self, env: EnvBase) -> OverlappedCollector | ThreadedCollector:
        policy, config = self.behavior(env), self.config
        if torch.device(config.device).type != "cpu":  # a second process would have to share the GPU by time slicing
            from recurl.collectors.threaded import ThreadedCollector  # noqa: PLC0415 - imported where it is used

            return ThreadedCollector(
                env,
                policy,
                frames_per_batch=config.frames_per_batch,
                device=config.device,
                sequence_length=config.states_every,
            )
        from recurl.collectors import OverlappedCollector  # noqa: PLC0415 - as above

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
        """Check that the run supports several ranks.

        Raises:
            UnsupportedError: if the algorithm or the way of collecting supports a single process only.
            ArgumentError: if ``total_steps`` is less than one batch of all ranks.
        """
        if not self.data_parallel:
            raise UnsupportedError(
                f"{self.config.algorithm} doesn't support several ranks (its learner doesn't set data_parallel = "
                "True): start it without torchrun."
            )
        if self._overlap:
            raise UnsupportedError("--overlap can't be used with several ranks: leave it out.")
        if self.config.total_steps < self.frames_per_update:
            raise ArgumentError(
                f"--total-steps must cover one batch of all {world_size()} ranks, {self.frames_per_update} steps, got "
                f"{self.config.total_steps}: raise it, or lower --num-envs, which is the number per rank."
            )

    @property
    def env_seed(self) -> int:
        """Seed of this rank's first environment; its other environments, and the other ranks, use consecutive seeds."""
        return self._env_seed("training")

    def _env_seed(self, purpose: EnvPurpose, *numbers: int) -> int:
        return env_seed(self.config.seed, purpose, *numbers) + rank() * self.config.num_envs

    @property
    def frames_per_update(self) -> int:
        """Environment steps between updates, summed over all ranks."""
        return self.config.frames_per_batch * world_size()

    @property
    def total_steps(self) -> int:
        """Environment steps of the whole run: ``config.total_steps`` rounded down to whole batches."""
        return self.config.total_steps // self.frames_per_update * self.frames_per_update

    @property
    def remaining(self) -> float:
        """Remaining fraction of the run, 1 at the first update: the factor of linear schedules."""
        return 1 - (self.env_steps - self.frames_per_update) / self.total_steps

    @property
    def scheduled(self) -> dict[str, float]:
        """Current values of the scheduled options, by name."""
        factors = {name: SCHEDULES[schedule](self.remaining) for name, schedule in self.config.scheduled.items()}
        return {name: getattr(self.config, name) * factor for name, factor in factors.items()}

    def schedules(self) -> dict[str, Callable[[float], None]]:
        """Return the setters of the scheduled options, by name; here, the learning rate of all optimizers.

        A subclass with other scheduled options, such as ``temperature`` with ``temperature_schedule``, adds their
        setters: ``{**super().schedules(), "temperature": ...}``.
        """
        return {"learning_rate": self._set_learning_rate}

    def _set_learning_rate(self, value: float) -> None:
        for part in self.parts().values():
            if isinstance(part, GradientStep):
                part.set_learning_rate(value)

    def collect(self) -> TensorDictBase:
        """Take ``rollout_steps`` steps in every environment and return the batch, ``[B, T]``.

        Scheduled options are set to their values for this batch.

        Raises:
            UnsupportedError: if :meth:`schedules` has no setter for a scheduled option.
        """
        self.collector.update_policy_weights_()  # to actors; otherwise, the collector has the policy itself
        with compiled_later(not self.env_steps):
            batch = self.collector.collect()
        if self.config.actors:
            self._record_actors(cast("RayCollector", self.collector), batch)
        self.env_steps += batch.numel() * world_size()
        setters = self.schedules()
        for name, value in self.scheduled.items():
            if name not in setters:
                raise UnsupportedError(
                    f"{type(self).__name__}.schedules() must return a setter for {name}, as its options have "
                    f"{name}_schedule."
                )
            setters[name](value)
        return batch

    def start_from(self, initial: Initial) -> str:
        """Start from the networks of another run, and describe in a line what was taken.

        The statistics of scaled rewards are taken with a critic, whose values have their scale.

        Args:
            initial: the other run.

        Raises:
            ArgumentError: if the actor doesn't fit.
        """
        taken, fresh = take_networks(self.agent, self.config, initial)
        scaler, saved = self.parts().get("scaler"), initial.algorithm.get("scaler")
        if isinstance(scaler, RewardScaler) and saved is not None and len(taken) > 1:
            begin = "moments."
            scaler.moments.load_state_dict({n.removeprefix(begin): v for n, v in saved.items() if n.startswith(begin)})
            taken.append("reward scale")
        new = f"; {' and '.join(fresh)} new" if fresh else ""
        return f"Starting from {initial.path}: {', '.join(taken)} taken{new}; optimizers and schedules start over."

    @property
    def own(self) -> tuple[str, ...]:
        """Parts of a checkpoint that differ between ranks."""
        return (*self.collected, "scaler")

    def _record_actors(self, collector: RayCollector, batch: TensorDictBase) -> None:
        """Record the metrics of the actors, and clear the running returns of episodes that ended with a lost actor."""
        lag = batch[WEIGHTS_LAG].double()
        numbers = (lag.mean().item(), lag.max().item(), len(collector.replacements), collector.lost_frames)
        self.collection = dict(zip(self.collection, numbers, strict=True))
        begins = batch[TRAJ_STEPS][..., 0] == 0
        for part in self.parts().values():
            if isinstance(part, RewardScaler):
                part.returns.masked_fill_(begins, 0.0)

    def set_parameters(self, values: Mapping[str, Parameter]) -> None:
        """Change parameters of the training environments, from the next batch on; they are saved in checkpoints.

        Args:
            values: values by name; see :meth:`recurl.envs.EnvBase.set_parameters`.

        Raises:
            ArgumentError: there is no such parameter, or a value isn't accepted.
            UnsupportedError: the environments have no parameters, or collect in other processes.
        """
        if self._overlap or self.config.actors:
            raise UnsupportedError(
                "Parameters can't be changed in environments that collect beside this process: leave out "
                f"{'--overlap' if self._overlap else '--collectors'}."
            )
        checked = checked_parameters(values)
        cast(Collector, self.collector).env.set_parameters(checked)
        self.parameters = {**self.parameters, **checked}

    def whole_envs(self, rows: Tensor) -> Tensor:
        """Return ``rows``, bool ``[B]``, with all rows of their environments: agents are reset together."""
        return rows.view(-1, self._rows_per_env).any(-1).repeat_interleave(self._rows_per_env)

    def restart(self, rows: Tensor) -> bool:
        """Reset some environments.

        Args:
            rows: mask of the environments to reset, bool ``[B]``; see :meth:`whole_envs`.

        Returns:
            True if the next batch is already being collected, so that the new episodes start in the batch after it.
        """
        self.collector.reset_rows(rows)
        return bool(self.collector.max_lag)

    def settle(self) -> None:
        """Wait for a batch being collected in the background, so that only the caller draws random numbers."""
        if self._overlap and torch.device(self.config.device).type != "cpu":
            cast("ThreadedCollector", self.collector).wait()

    def close(self) -> None:
        """Close the environments."""
        self.collector.shutdown()

    def state_dict(self) -> dict[str, Any]:
        """Return the full state: parts, environments, and carried hidden states."""
        parts = {name: None if part is None else part.state_dict() for name, part in self.parts().items()}
        return {
            "env_steps": self.env_steps,
            **parts,
            "parameters": dict(self.parameters),
            "collector": self.collector.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], *, begin_anew: bool = False) -> None:
        """Load a state returned by :meth:`state_dict`.

        If the state belongs to other options, the first part that doesn't fit raises its error.

        Args:
            state: the state.
            begin_anew: start new episodes with new random numbers, because the number of ranks has changed.
        """
        for name, part in self.parts().items():
            if part is not None:
                part.load_state_dict(state[name])
        self.env_steps = state["env_steps"]
        parameters = state.get("parameters", {})  # absent from runs of earlier versions
        if parameters:
            self.set_parameters(parameters)
        if begin_anew:
            seed_everything(self.config.seed, "restart", self.env_steps, rank())
        self.restored_episodes = not begin_anew and self.collector.load_state_dict(state["collector"])
        if not self.restored_episodes:
            self.collector.set_seed(self._env_seed("restart", self.env_steps))
            scaler = self.parts().get("scaler")
            if isinstance(scaler, RewardScaler):
                scaler.returns.zero_()

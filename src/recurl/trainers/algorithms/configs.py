"""Options of the built-in algorithms, importable without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from recurl.core.errors import ArgumentError
from recurl.core.ranges import (
    AUTO,
    AutoFlag,
    Count,
    Exponent,
    Fraction,
    NonNegative,
    NonNegativeInt,
    Number,
    OpenUnit,
    Positive,
    PositiveFraction,
    PositiveOrInf,
    SmallCount,
    Steps,
    flag,
)
from recurl.trainers.config import ADAPTIVE, ADAPTIVE_RANGE, NO_CELL, Choice, RunConfig, Schedule, Work
from recurl.trainers.env_name import is_environment, source_of

_SEPARATE_FROM = 16_384  # environment steps of a gradient step; see benchmarks/notes/learning.md
_CAPTURABLE = ("fastest", "triton")

_COMPILABLE = ("fastest", "cpu", "triton")


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig(RunConfig):
    """Options for compiled updates and CUDA graphs.

    Raises:
        ArgumentError: see :class:`RunConfig`; or if ``cuda_graph`` or ``compile`` is not possible.
    """

    cuda_graph: AutoFlag = AUTO
    """Capture each update as one CUDA graph, and the policy as another (with --vectorization device, the whole
    rollout). Needs --device cuda, and minibatches of equal size. On by default where it is possible."""
    compile: AutoFlag = AUTO
    """Compile losses and gradients into fewer, larger kernels with Inductor; with --vectorization device, also the step
    of policy and environment. Takes some seconds at the first start. On by default where --cuda-graph is possible;
    on the CPU it needs a C++ compiler."""

    def check(self) -> None:
        """Check that the options are consistent."""
        super().check()
        for name, obstacle in {"compile": self.compile_obstacle, "cuda_graph": self.graph_obstacle}.items():
            if getattr(self, name) and obstacle is not None:
                raise ArgumentError(f"{flag(name)} needs {obstacle}.")

    @property
    def compile_obstacle(self) -> str | None:
        """What the compilation of an update lacks to be possible, or None if it is."""
        from recurl.trainers.machine import has_built_in_cell  # noqa: PLC0415 - imports torch

        if self.cell == NO_CELL or (self.backend in _COMPILABLE and has_built_in_cell(self)):
            return None
        return (
            f"a built-in cell and --backend {' or '.join(_COMPILABLE)}, as other backends read episode lengths on the "
            f"host, got {self.cell} and {self.backend}"
        )

    @property
    def graph_obstacle(self) -> str | None:
        """What a CUDA graph of an update lacks to be possible, or None if it is."""
        if not self.device.startswith("cuda"):
            return f"--device cuda, got {self.device}"
        if self.cell != NO_CELL and self.backend not in _CAPTURABLE:
            return f"--backend {' or '.join(_CAPTURABLE)}, which never wait for the GPU, got {self.backend}"
        return None

    def _choose(self, on_cpu: dict[str, Any]) -> Choice:
        if is_environment(source_of(self.env)):
            return super()._choose(on_cpu)
        from recurl.trainers.machine import choose  # noqa: PLC0415 - imports torch, unlike --help

        return choose(self, on_cpu)

    def _fit_machine(self) -> None:
        super()._fit_machine()
        from recurl.trainers.machine import program_obstacles  # noqa: PLC0415 - imports torch, unlike --help

        for name, obstacle in program_obstacles(self).items():
            if getattr(self, name) is AUTO:
                object.__setattr__(self, name, obstacle is None)

    def on_cpu(self) -> Self:
        """Return these options for the CPU, with the fastest backend there."""
        return replace(self, device="cpu", backend="fastest", cuda_graph=False, compile=False)


@dataclass(frozen=True, kw_only=True)
class CriticConfig(ExecutionConfig):
    """Options of the critic beside an actor.

    Raises:
        ArgumentError: see :class:`ExecutionConfig`; or if ``shared_trunk`` contradicts ``critic_observations``.
    """

    private_option: ClassVar[str | None] = "critic_observations"

    shared_trunk: AutoFlag = AUTO
    """Share the encoder and recurrent layers between actor and critic; otherwise each has its own. By default shared,
    without --critic-observations."""
    critic_observations: tuple[str, ...] = ()
    """Observations that only the critic sees, such as velocities that a simulator knows and a robot doesn't measure
    (asymmetric actor-critic); join the parts of a nested key with dots. Actor and critic then have their own encoders,
    normalization and memories, and the policy that is saved, evaluated and exported doesn't need them."""

    def _fit_machine(self) -> None:
        super()._fit_machine()
        object.__setattr__(self, "shared_trunk", self._shares_trunk(self.frames_per_batch))

    def _shares_trunk(self, frames: int) -> bool:
        """Return whether actor and critic share a trunk in batches of ``frames`` environment steps."""
        del frames
        return not self.critic_observations if self.shared_trunk is AUTO else self.shared_trunk

    def check(self) -> None:
        """Check that the options are consistent."""
        super().check()
        if self.critic_observations and self.shared_trunk:
            raise ArgumentError(
                "--critic-observations needs networks of its own for the critic, since the actor would read them "
                "through a shared trunk: leave out --shared-trunk."
            )


@dataclass(frozen=True, kw_only=True)
class OnPolicyConfig(CriticConfig):
    """Options of an actor-critic that learns from each batch and then discards it.

    Raises:
        ArgumentError: see :class:`CriticConfig`; or if ``store_states="starts"`` or ``symmetry`` is not possible.
    """

    fixed: ClassVar[tuple[str, ...]] = (*CriticConfig.fixed, "symmetry")

    learning_rate_schedule: Schedule = "linear"
    """Decay of the learning rate to zero over --total-steps."""
    shared_trunk: AutoFlag = AUTO
    """Share the encoder and recurrent layers between actor and critic; otherwise each has its own. By default shared
    without --critic-observations, unless gradient steps read 16,384 environment steps or more: there, the policy's
    gradient would keep changing what the critic reads after the task has been solved, and the run could lose what it
    has learned."""
    scale_rewards: bool = True
    """Divide rewards by the running standard deviation of the discounted return."""
    entropy_coeff: NonNegative = 0.0
    """Initial coefficient of the entropy bonus."""
    entropy_coeff_schedule: Schedule = "linear"
    """Decay of the entropy coefficient to zero over --total-steps."""
    critic_coeff: NonNegative = 0.5
    """Coefficient of the value loss."""
    adam_eps: Positive = 1e-5
    """Epsilon of Adam, the term in the denominator for numerical stability."""
    symmetry: tuple[str, ...] = ()
    """Symmetries of the environment, each as module:object, a Symmetry or a list of them. A loss is added to the
    others: the distance of what the policy does in mirrored episodes from the mirror image of what it does in the
    originals."""
    symmetry_coeff: NonNegative = 0.5
    """Coefficient of the symmetry loss; 0 only measures it."""
    store_states: Literal["auto", "all", "starts"] = "auto"
    """Recurrent states stored in a batch: those of all steps, or only those at the starts of training sequences, which
    saves memory. auto uses starts if rows divide into whole sequences and one process collects."""

    more_envs_on_gpu: ClassVar[bool] = True
    actor_kind: ClassVar[str | None] = "distribution"

    @property
    def gradient_steps_per_batch(self) -> int:
        """Number of gradient steps that share one pass over a batch."""
        return 1

    def _shares_trunk(self, frames: int) -> bool:
        large = frames // self.gradient_steps_per_batch >= _SEPARATE_FROM
        return False if large and self.shared_trunk is AUTO else super()._shares_trunk(frames)

    def work(self, frames: int) -> Work:
        """Return the work of learning from a batch of ``frames`` environment steps."""
        return Work(self.gradient_steps_per_batch, frames if self._shares_trunk(frames) else 2 * frames)

    @property
    def sequence_steps(self) -> int:
        """Length of the training sequences: whole rows."""
        return self.rollout_steps

    @property
    def states_every(self) -> int | None:
        """Interval, in steps, at which a batch stores recurrent states; None to store them at every step."""
        only_starts = self.store_states != "all" and self._starts_obstacle is None
        return self.sequence_steps if only_starts else None

    @property
    def _starts_obstacle(self) -> str | None:
        """What ``store_states="starts"`` lacks to be possible, or None if it is."""
        if self.rollout_steps % self.sequence_steps:
            return (
                f"rows of whole sequences: --sequence-length must divide --rollout-steps, got "
                f"{self.sequence_steps} for {self.rollout_steps}"
            )
        if self.actors:
            return "a single collecting process, got --collectors"
        if getattr(self, "overlap", False) and self.device == "cpu":
            return "a single collecting process, got --overlap on the CPU"
        return None

    def check(self) -> None:
        """Check that the options are consistent."""
        super().check()
        if self.store_states == "starts" and self._starts_obstacle is not None:
            raise ArgumentError(f"--store-states starts needs {self._starts_obstacle}.")
        if self.symmetry and (self.actors or getattr(self, "overlap", False)):
            other = "--collectors" if self.actors else "--overlap"
            raise ArgumentError(
                "--symmetry carries the memory of mirrored episodes from batch to batch, so it needs batches that the "
                f"current policy has collected in this process: leave out {other}."
            )


@dataclass(frozen=True, kw_only=True)
class OverlappedConfig(OnPolicyConfig):
    """Options of an algorithm that tolerates batches of older policies, so that collection and learning can overlap.

    Raises:
        ArgumentError: see :class:`OnPolicyConfig`; or if ``overlap`` is not possible.
    """

    fixed: ClassVar[tuple[str, ...]] = (*OnPolicyConfig.fixed, "overlap")

    overlap: bool = False
    """Collect in a second process while this one learns (on a GPU, in a second thread; needs --env-workers). Faster on
    two cores; the policy that collects is one update old."""

    def check(self) -> None:
        """Check that the options are consistent."""
        super().check()
        if self.overlap and is_environment(source_of(self.env)):
            raise ArgumentError(
                "--overlap creates the environment in a second process: pass a function, env=lambda: ..."
            )
        if self.overlap and self.device != "cpu" and not self.env_workers:
            raise ArgumentError(
                "--overlap on a GPU collects in a second thread: it needs --env-workers, so that the environments "
                f"don't run in the learner's process, got {self.env_workers} workers."
            )

    @property
    def graph_obstacle(self) -> str | None:
        """What a CUDA graph of an update lacks to be possible, or None if it is."""
        found = super().graph_obstacle
        return (
            "batches that aren't collected in a second thread, got --overlap" if not found and self.overlap else found
        )

    def on_cpu(self) -> Self:
        """Return these options for a single process on the CPU."""
        return replace(super().on_cpu(), overlap=False)


@dataclass(frozen=True, kw_only=True)
class PPOConfig(OverlappedConfig):
    """Options of PPO: proximal policy optimization with a recurrent actor-critic.

    Raises:
        ArgumentError: see :class:`OverlappedConfig`; or if there are more minibatches than sequences.

    Example:
        >>> config = PPOConfig(env="recurl/RepeatPrevious-v0", env_kwargs=("k=8",), cell="gru")
        >>> config.env_arguments
        {'k': 8}
        >>> PPOConfig.from_dict(config.to_dict()) == config
        True
    """

    algorithm: ClassVar[str] = "ppo"
    epochs: Count = 4
    """Number of passes over the batch per update."""
    minibatches: Count = 4
    """Number of minibatches per epoch, each with one gradient step."""
    sequence_length: Count = 32
    """Length of the sequences that rollouts are split into for training; each starts from its stored hidden state."""
    gae_lambda: Fraction = 0.95
    """Lambda of generalized advantage estimation."""
    clip_epsilon: OpenUnit = 0.2
    """Initial clipping range of the probability ratio around 1."""
    clip_epsilon_schedule: Schedule = "constant"
    """Decay of the clipping range to zero over --total-steps."""

    clip_value: NonNegative = 0.0
    """Clipping range of values around those computed during collection; 0 disables value clipping."""
    learning_rate_schedule: Literal["constant", "linear", "cosine", "adaptive"] = "linear"  # type: ignore[assignment] # one more
    """Decay of the learning rate to zero over --total-steps. adaptive: at each gradient step, divide it by 1.5 if the
    policy's KL divergence from the one that collected exceeds twice --target-kl, and multiply it by 1.5 if it is below
    half of --target-kl, between 1e-5 and 1e-2."""
    target_kl: Positive = 0.01
    """KL divergence, in nats, that --learning-rate-schedule adaptive aims at."""

    @property
    def gradient_steps_per_batch(self) -> int:
        """Number of gradient steps that share one pass over a batch."""
        return self.minibatches

    @property
    def sequence_steps(self) -> int:
        """Length of the training sequences."""
        return min(self.sequence_length, self.rollout_steps)

    def work(self, frames: int) -> Work:
        """Return the work of learning from a batch of ``frames`` environment steps."""
        return Work(*(self.epochs * part for part in super().work(frames)))

    @property
    def _sequences(self) -> int:
        """Number of sequences of a batch."""
        return self.num_envs * -(-self.rollout_steps // self.sequence_length)

    def check(self) -> None:
        """Check that the options are consistent."""
        if self.minibatches > self._sequences:
            raise ArgumentError(
                f"--minibatches must not exceed the {self._sequences} sequences of a batch "
                f"({self.num_envs} environments x {self._sequences // self.num_envs}), got {self.minibatches}: lower "
                "it, raise --num-envs or lower --sequence-length."
            )
        if self.learning_rate_schedule == ADAPTIVE:
            self._check_adaptive()
        super().check()

    def _check_adaptive(self) -> None:
        low, high = ADAPTIVE_RANGE
        if not low <= self.learning_rate <= high:
            raise ArgumentError(
                f"--learning-rate must lie between {low:g} and {high:g} with --learning-rate-schedule adaptive, got "
                f"{self.learning_rate:g}."
            )
        if self.epochs * self.minibatches == 1:
            raise ArgumentError(
                "--learning-rate-schedule adaptive needs two gradient steps per update or more, as it measures how far "
                "the earlier ones have moved the policy: raise --epochs or --minibatches."
            )

    @property
    def graph_obstacle(self) -> str | None:
        """What a CUDA graph of an update lacks to be possible, or None if it is."""
        found = super().graph_obstacle
        if found is None and (self.rollout_steps % self.sequence_steps or self._sequences % self.minibatches):
            return (
                "minibatches of equal size: --sequence-length must divide --rollout-steps, and --minibatches the "
                f"{self._sequences} sequences of a batch; got {self.sequence_length} for {self.rollout_steps}, and "
                f"{self.minibatches}"
            )
        return found

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Convert options of any version, replacing ``anneal`` of version 0.1; see :meth:`RunConfig.complete`."""
        values = dict(values)
        if "anneal" in values:
            schedule = "linear" if values.pop("anneal") else "constant"
            values = {"learning_rate_schedule": schedule, "entropy_coeff_schedule": schedule, **values}
        return super().complete(values)


@dataclass(frozen=True, kw_only=True)
class A2CConfig(OnPolicyConfig):
    """Options of A2C: advantage actor-critic with one gradient step per batch.

    Raises:
        ArgumentError: see :class:`OnPolicyConfig`.

    Example:
        >>> config = A2CConfig(env="recurl/TMaze-v0", cell="gru")
        >>> A2CConfig.from_dict(config.to_dict()) == config
        True
    """

    algorithm: ClassVar[str] = "a2c"
    largest_lag: ClassVar[int | None] = 0
    usual_envs: ClassVar[int] = 16

    total_steps: Steps = 300_000
    """Maximum number of environment steps to train for, summed over all environments."""
    rollout_steps: Count = 16
    """Steps per environment between updates: the length of the training sequences."""
    learning_rate: Positive = 3e-3
    """Initial learning rate of Adam."""
    gae_lambda: Fraction = 0.95
    """Lambda of generalized advantage estimation; 1 uses all rewards of a batch."""
    normalize_advantages: bool = False
    """Normalize the advantages of each batch to mean 0 and standard deviation 1."""
    checkpoint_every: Count = 250
    """Updates between checkpoints."""


@dataclass(frozen=True, kw_only=True)
class ImpalaConfig(OverlappedConfig):
    """Options of IMPALA: an actor-critic that learns from batches of older policies, corrected by V-trace.

    Raises:
        ArgumentError: see :class:`OverlappedConfig`.

    Example:
        >>> config = ImpalaConfig(env="recurl/TMaze-v0", cell="gru", clip_epsilon=0.2)
        >>> ImpalaConfig.from_dict(config.to_dict()) == config
        True
    """

    algorithm: ClassVar[str] = "impala"
    usual_lag: ClassVar[int] = 1
    usual_envs: ClassVar[int] = 16

    total_steps: Steps = 300_000
    """Maximum number of environment steps to train for, summed over all environments."""
    rollout_steps: Count = 16
    """Steps per environment between updates: the length of the training sequences."""
    learning_rate: Positive = 3e-3
    """Initial learning rate of Adam."""
    rho_thresh: Positive = 1.0
    """Truncation level (rho-bar) of the importance weights of temporal differences and advantages."""
    c_thresh: Positive = 1.0
    """Truncation level (c-bar) of the importance weights of the trace."""
    clip_epsilon: OpenUnit | None = None
    """Clip the probability ratio to the behavior policy at this distance from 1, as in PPO (APPO), instead of using
    truncated importance weights."""
    normalize_advantages: bool = False
    """Normalize the advantages of each batch to mean 0 and standard deviation 1."""
    checkpoint_every: Count = 250
    """Updates between checkpoints."""


@dataclass(frozen=True, kw_only=True)
class ReplayConfig(ExecutionConfig):
    """Options of the algorithms that learn from trajectory slices in a replay buffer.

    Raises:
        ArgumentError: see :class:`ExecutionConfig`; or if the burn-in is as long as a slice, the buffer is smaller than
            a batch, or an option isn't supported when slices are sampled on the device.
    """

    fixed: ClassVar[tuple[str, ...]] = (*ExecutionConfig.fixed, "buffer_size")
    usual_lag: ClassVar[int] = 1
    usual_envs: ClassVar[int] = 16
    networks: ClassVar[int] = 2
    """Networks that a gradient step runs, in passes forward and backward: the trained one and its target."""

    learning_rate: Positive = 5e-4
    """Initial learning rate of Adam."""
    rollout_steps: Count = 8
    """Steps per environment between updates."""
    head_width: NonNegativeInt = 64
    """Width of the hidden layers between the recurrent layers and each output; 0 for none (critics of continuous
    actions always have one)."""
    max_grad_norm: PositiveOrInf = 10.0
    """Maximum gradient norm; inf disables clipping."""
    checkpoint_every: Count = 250
    """Updates between checkpoints, which include the replay buffer."""

    buffer_size: Count = 100_000
    """Capacity of the replay buffer in environment steps."""
    learning_starts: NonNegativeInt = 2_000
    """Environment steps to collect before learning starts."""
    gradient_steps: Count = 16
    """Gradient steps per update."""
    slices: Count = 32
    """Number of trajectory slices per gradient step."""
    slice_length: Count = 32
    """Maximum length of a slice in steps; a shorter trajectory is used whole."""
    drawn_by: Literal["step", "trajectory"] = "step"
    """How slices are sampled. step: sample a step and a slice that contains it. trajectory: sample a trajectory
    uniformly and a slice within it (with priorities, a slice by its first step), so that the ends of long episodes are
    rare."""
    drawn_on: Literal["auto", "host", "device"] = "auto"
    """How slices of short trajectories are combined. host: one after another, which saves computing, but waits for a
    GPU. device: padded to one length, which never waits. auto picks device with --cuda-graph or --compile."""
    start_state: Literal["stored", "zero"] = "stored"
    """Hidden state at the start of a slice: the state stored during collection, or zeros."""
    burn_in: NonNegativeInt | None = 0
    """Steps at the start of a slice that only warm up its hidden state and aren't trained on (none if the slice starts
    an episode); the value none means a quarter of the slice."""
    refresh_states: bool = False
    """Before training on a slice, write the hidden states of the current networks back to the replay buffer."""
    scale_rewards: bool = False
    """Divide rewards by the current running standard deviation of the discounted return when they are sampled."""
    n_steps: Count = 1
    """Number of rewards summed before bootstrapping (n-step return)."""

    prioritized: bool = False
    """Sample slices in proportion to their TD errors instead of uniformly (prioritized replay)."""
    priority_exponent: Exponent = 0.6
    """Exponent alpha of the priorities; 0 samples uniformly."""
    importance_exponent: Exponent = 1.0
    """Exponent beta of the importance weights; 1 fully corrects for non-uniform sampling."""
    priority_eta: Fraction = 0.9
    """Weight eta of the maximum TD error in a slice's priority; the mean TD error has weight 1 - eta."""

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Convert options of any version; see :meth:`RunConfig.complete`."""
        legacy = "priority_eta" in values and "drawn_by" not in values
        return super().complete({"head_width": 0, "drawn_by": "trajectory", **values} if legacy else values)

    @property
    def replay_steps(self) -> int:
        """Capacity of the replay buffer in environment steps."""
        return self.buffer_size

    @property
    def burn_in_steps(self) -> int:
        """Number of burn-in steps at the start of a slice."""
        return self.slice_length // 4 if self.burn_in is None else self.burn_in

    @property
    def graph_obstacle(self) -> str | None:
        """What a CUDA graph of an update lacks to be possible, or None if it is."""
        return super().graph_obstacle or self._lengths_obstacle

    @property
    def compile_obstacle(self) -> str | None:
        """What the compilation of an update lacks to be possible, or None if it is."""
        return super().compile_obstacle or self._lengths_obstacle

    @property
    def _lengths_obstacle(self) -> str | None:
        if self.drawn_on == "host":
            return "slices of equal length, which --drawn-on device provides, got --drawn-on host"
        return "--drawn-on device, which doesn't support --refresh-states" if self.refresh_states else None

    def work(self, frames: int) -> Work:
        """Return the work of learning from a batch of ``frames`` environment steps."""
        del frames
        steps = self.gradient_steps * self.slices * self.slice_length
        return Work(self.networks * self.gradient_steps, self.networks * steps)

    @property
    def draws_on_device(self) -> bool:
        """Whether slices are padded to one length, so that sampling never waits for the device."""
        return self.drawn_on == "device" or (self.drawn_on == "auto" and (self.cuda_graph or self.compile))

    def check(self) -> None:
        """Check that the options are consistent."""
        super().check()
        if self.refresh_states and self.draws_on_device:
            raise ArgumentError(
                "--refresh-states needs --drawn-on host, without --cuda-graph and --compile: slices overlap, and on a "
                "device it is undefined which of them a step gets its state from."
            )
        if self.burn_in_steps >= self.slice_length:
            raise ArgumentError(
                f"--burn-in must be less than --slice-length, got {self.burn_in_steps} and {self.slice_length}: no "
                "steps would be left to train on."
            )
        if self.refresh_states and self.backend in ("auto", "pad"):
            raise ArgumentError(
                "--refresh-states needs the hidden state after every step, but --backend pad, which auto may choose, "
                f"returns it at segment ends only: use fastest or loop, got {self.backend}."
            )
        from recurl.recurrence import load_cell  # noqa: PLC0415 - only torch's users wait for it

        if self.refresh_states and self.cell != NO_CELL and load_cell(self.cell).states_at_ends:
            raise ArgumentError(
                "--refresh-states needs the hidden state after every step, but passes over sequences return that of "
                f"--cell {self.cell} at segment ends only: use --no-refresh-states, or a cell such as lstm."
            )
        if self.refresh_states and self.start_state != "stored":
            raise ArgumentError(
                "--refresh-states stores hidden states for slices to start from: it needs --start-state stored, got "
                f"{self.start_state}."
            )
        if self.buffer_size < self.frames_per_batch:
            raise ArgumentError(
                f"--buffer-size must hold one batch of {self.frames_per_batch} steps, got {self.buffer_size}."
            )


@dataclass(frozen=True, kw_only=True)
class CriticsConfig(ReplayConfig, CriticConfig):
    """Options of SAC and TD3.

    Raises:
        ArgumentError: see :class:`ReplayConfig` and :class:`CriticConfig`.
    """

    usual_envs: ClassVar[int] = 8
    networks: ClassVar[int] = 4

    learning_starts: NonNegativeInt = 1_000
    """Environment steps before the first update."""
    gradient_steps: Count = 8
    """Gradient steps per update."""
    slices: Count = 16
    """Number of trajectory slices per gradient step."""
    n_steps: Count = 3
    """Number of rewards summed before bootstrapping (n-step return)."""
    scale_rewards: bool = True
    """Divide rewards by the current running standard deviation of the discounted return when they are sampled."""
    critics: SmallCount = 2
    """Number of critics; the minimum of their values is used."""
    target_rate: PositiveFraction = 0.01
    """Soft update coefficient (tau) of the target networks, applied at each gradient step."""


@dataclass(frozen=True, kw_only=True)
class DQNConfig(ReplayConfig):
    """Options of DQN: Q-learning with a recurrent network and a replay buffer.

    Raises:
        ArgumentError: see :class:`ReplayConfig`; or if ``eps_end`` exceeds ``eps_init``.

    Example:
        >>> config = DQNConfig(env="recurl/TMaze-v0", cell="gru", n_steps=3)
        >>> DQNConfig.from_dict(config.to_dict()) == config
        True
    """

    algorithm: ClassVar[str] = "dqn"
    actor_kind: ClassVar[str | None] = "action values"

    learning_rate_schedule: Schedule = "linear"
    """Decay of the learning rate to zero over --total-steps."""
    gradient_steps: Count = 8
    """Gradient steps per update."""
    burn_in: NonNegativeInt | None = None
    """Steps at the start of a slice that only warm up its hidden state and aren't trained on (none if the slice starts
    an episode); by default a quarter of the slice."""
    n_steps: Count = 10
    """Maximum number of rewards summed before bootstrapping (n-step return)."""
    double: bool = True
    """Double DQN: select actions with the online network and evaluate them with the target network."""
    value_rescaling: bool = True
    """Learn values on a compressed scale, for returns of widely different magnitudes."""
    greedy_returns: bool = True
    """Cut n-step returns before the first action that is no longer greedy, so that actions of older policies don't
    lower the value of the state they started from."""
    target_rate: PositiveFraction = 0.01
    """Soft update coefficient (tau) of the target network, applied at each gradient step."""
    target_interval: Count | None = None
    """Gradient steps between hard updates of the target network, which replace --target-rate."""

    eps_init: Fraction = 1.0
    """Initial probability of a random action."""
    eps_end: Fraction = 0.05
    """Final probability of a random action."""
    exploration_fraction: Fraction = 0.3
    """Fraction of the run over which the probability of a random action decays linearly."""

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Convert options of any version; see :meth:`RunConfig.complete`."""
        legacy = "eps_init" in values and "greedy_returns" not in values
        return super().complete({**values, "greedy_returns": False} if legacy else values)

    def check(self) -> None:
        """Check that the options are consistent."""
        super().check()
        if self.eps_end > self.eps_init:
            raise ArgumentError(f"--eps-end must not exceed --eps-init, got {self.eps_end} and {self.eps_init}.")


@dataclass(frozen=True, kw_only=True)
class R2D2Config(DQNConfig):
    """Options of R2D2: DQN with prioritized replay of slices.

    Raises:
        ArgumentError: see :class:`DQNConfig`.

    Example:
        >>> config = R2D2Config(env="recurl/TMaze-v0", collectors="ray:2")
        >>> [round(epsilon, 5) for epsilon in config.epsilons]
        [0.4, 0.00066]
    """

    algorithm: ClassVar[str] = "r2d2"

    prioritized: bool = True
    """Sample slices in proportion to their TD errors instead of uniformly (prioritized replay)."""
    actor_eps: OpenUnit = 0.4
    """Exploration probability of the first actor with --collectors, which replaces --eps-init and --eps-end."""
    actor_eps_exponent: NonNegative = 7.0
    """Exponent alpha of the exploration probability of actor i of N: --actor-eps ** (1 + alpha * i / (N - 1))."""

    @property
    def epsilons(self) -> tuple[float, ...] | None:
        """Exploration probability of each actor, spaced geometrically as in Horgan et al., "Ape-X" (2018)."""
        if not self.actors:
            return None
        last = max(self.actors - 1, 1)
        return tuple(self.actor_eps ** (1 + self.actor_eps_exponent * i / last) for i in range(self.actors))


@dataclass(frozen=True, kw_only=True)
class SACConfig(CriticsConfig):
    """Options of SAC: soft actor-critic with recurrent networks and a replay buffer.

    Raises:
        ArgumentError: see :class:`CriticsConfig`.

    Example:
        >>> config = SACConfig(env="recurl/MaskedPendulum-v1", cell="gru")
        >>> SACConfig.from_dict(config.to_dict()) == config
        True
    """

    algorithm: ClassVar[str] = "sac"
    actor_kind: ClassVar[str | None] = "distribution"

    alpha: Positive = 0.01
    """Initial temperature, the weight of the entropy."""
    fixed_alpha: bool = False
    """Keep the temperature fixed instead of learning it."""
    target_entropy: Number | None = None
    """Target entropy in nats, with continuous actions scaled to [-1, 1]; by default minus the number of action
    dimensions, or --target-entropy-fraction of the maximum entropy for discrete actions."""
    target_entropy_fraction: Fraction = 0.1
    """Target entropy of discrete actions as a fraction of the entropy of the uniform distribution."""


@dataclass(frozen=True, kw_only=True)
class TD3Config(CriticsConfig):
    """Options of TD3: a deterministic recurrent actor and twin critics with a replay buffer.

    Raises:
        ArgumentError: see :class:`CriticsConfig`; or if ``noise_end`` exceeds ``noise_init``.

    Example:
        >>> config = TD3Config(env="recurl/MaskedPendulum-v1", cell="gru")
        >>> TD3Config.from_dict(config.to_dict()) == config
        True
    """

    algorithm: ClassVar[str] = "td3"
    actor_kind: ClassVar[str | None] = "action"

    policy_delay: Count = 2
    """Critic updates per update of the actor and the target networks."""
    policy_noise: NonNegative = 0.2
    """Standard deviation of the noise added to target actions (target policy smoothing), relative to half the action
    range."""
    noise_clip: NonNegative = 0.5
    """Clipping range of the noise added to target actions, relative to half the action range."""
    noise_init: NonNegative = 1.0
    """Initial standard deviation of the exploration noise, relative to half the action range."""
    noise_end: NonNegative = 0.1
    """Final standard deviation of the exploration noise."""
    exploration_fraction: Fraction = 0.1
    """Fraction of the run over which the exploration noise decays linearly."""

    def check(self) -> None:
        """Check that the options are consistent."""
        super().check()
        if self.noise_end > self.noise_init:
            raise ArgumentError(
                f"--noise-end must not exceed --noise-init, got {self.noise_end} and {self.noise_init}."
            )


@dataclass(frozen=True, kw_only=True)
class DistillConfig(RunConfig):
    """Options of distillation: a recurrent student learns the actions of a trained teacher (DAgger) or of episodes.

    Raises:
        ArgumentError: see :class:`RunConfig`; or if not one of teacher and episodes is named, an option needs the
            other, or there are more minibatches than sequences.

    Example:
        >>> config = DistillConfig(env="recurl/MaskedPendulum-v1", teacher="runs/teacher", cell="gru")
        >>> DistillConfig.from_dict(config.to_dict()) == config
        True
    """

    algorithm: ClassVar[str] = "distill"
    actor_kind: ClassVar[str | None] = "distribution"
    private_option: ClassVar[str | None] = "teacher_observations"
    fixed: ClassVar[tuple[str, ...]] = (*RunConfig.fixed, "teacher", "episodes", "teacher_observations")
    usual_envs: ClassVar[int] = 16

    teacher: str | None = None
    """Run folder of the teacher, whose newest checkpoint is used."""
    episodes: str | None = None
    """Recorded episodes to learn from in place of a teacher (behavioral cloning): a folder, as recurl evaluate
    --save-episodes writes it, or minari:ID. Steps and returns of training are theirs."""
    teacher_observations: tuple[str, ...] = ()
    """Observations that only the teacher sees, such as velocities that a simulator knows and a robot doesn't measure;
    join the parts of a nested key with dots."""
    teacher_share: Fraction = 1.0
    """Initial fraction of the steps in which the environments get the teacher's action instead of the student's."""
    teacher_fraction: Fraction = 0.5
    """Fraction of the run over which --teacher-share decays linearly to 0, so that the student learns what to do in the
    states that it gets into by itself; 0 leaves all steps to the student from the start."""
    epochs: Count = 4
    """Number of passes over the batch per update."""
    minibatches: Count = 8
    """Number of minibatches per epoch, each with one gradient step."""
    sequence_length: Count = 64
    """Length of the sequences that rollouts are split into for training; each starts from its stored hidden state."""
    learning_rate: Positive = 3e-3
    """Initial learning rate of Adam."""
    learning_rate_schedule: Schedule = "linear"
    """Decay of the learning rate to zero over --total-steps."""
    max_grad_norm: PositiveOrInf = 5.0
    """Maximum gradient norm; inf disables clipping."""

    def work(self, frames: int) -> Work:
        """Return the work of learning from a batch of ``frames`` environment steps."""
        return Work(self.epochs * self.minibatches, self.epochs * frames)

    def check(self) -> None:
        """Check that the options are consistent."""
        super().check()
        if (self.teacher is None) == (self.episodes is None):
            raise ArgumentError(
                "Distillation needs a teacher or recorded episodes: name a run folder, recurl distill RUN (--teacher "
                "RUN), or else --episodes DIR."
            )
        if self.episodes is not None:
            self._check_recorded()
        sequences = self.num_envs * -(-self.rollout_steps // self.sequence_length)
        if self.minibatches > sequences:
            raise ArgumentError(
                f"--minibatches must not exceed the {sequences} sequences of a batch, got {self.minibatches}: lower "
                "it, raise --num-envs or lower --sequence-length."
            )
        if self.actors:
            raise ArgumentError("Distillation collects in this process, beside its teacher: leave out --collectors.")

    def _check_recorded(self) -> None:
        needing = ("teacher_observations", "teacher_share", "teacher_fraction")
        given = [name for name in needing if getattr(self, name) != getattr(type(self), name)]
        if given:
            raise ArgumentError(
                f"Recorded episodes have no teacher, which {', '.join(map(flag, given))} need: leave them out. To "
                "keep observations from the student, use --drop-observations."
            )
        if self.stop_return is not None:
            raise ArgumentError(
                "With --episodes, training returns are those of the recorded episodes: use --stop-eval-return with "
                "--eval-every instead of --stop-return."
            )


CONFIGS: dict[str, type[RunConfig]] = {
    config.algorithm: config
    for config in (PPOConfig, DQNConfig, R2D2Config, A2CConfig, ImpalaConfig, SACConfig, TD3Config, DistillConfig)
}

"""Options shared by all algorithms: a frozen dataclass that also defines the command line."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeAlias

from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.core.keys import ACTION_MASK, is_within
from recurl.core.messages import nearest
from recurl.core.ranges import (
    AUTO,
    AutoCount,
    AutoNonNegativeInt,
    Count,
    Fraction,
    NonNegative,
    NonNegativeInt,
    Number,
    Positive,
    PositiveOrInf,
    Seed,
    SmallNonNegativeInt,
    Steps,
    Threads,
    check_fields,
    fields_of,
    flag,
    shown,
)
from recurl.trainers.env_name import EnvSource, is_environment, is_jax, is_multi_agent, named, source_of
from recurl.trainers.keyword_arguments import keyword_arguments

NO_MASK = "none"
"""Value of ``action_mask`` for a run without an action mask."""
Schedule: TypeAlias = Literal["constant", "linear", "cosine"]
"""How an option decays from its initial value to zero over the run: not at all, linearly, or along half a cosine."""
ADAPTIVE = "adaptive"
"""Value of ``learning_rate_schedule`` of a learning rate that follows the KL divergence instead of a schedule."""
ADAPTIVE_RANGE = (1e-5, 1e-2)
"""Smallest and largest adaptive learning rate."""
NO_CELL = "none"
"""Value of ``cell`` for a feed-forward network."""
_DIVISORS = 12  # divisors of the number of environments listed in an error message
ALGORITHM_OBSTACLE = "an algorithm of recurl's, unless it is asked for"
"""What a run of another algorithm lacks to be on a GPU, captured and compiled without being asked for."""
_CHOSEN = ("device", "num_envs", "env_workers", "env_groups")  # where they are left open
_SETTLED = {
    "device": "cpu",
    "env_workers": 0,
    "env_groups": 1,
    "cuda_graph": False,
    "compile": False,
    "shared_trunk": True,
}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Options shared by all algorithms.

    Raises:
        ArgumentError: if a size is not positive, a fraction is outside [0, 1], options contradict each other, or
            ``total_steps`` is less than one batch.
    """

    algorithm: ClassVar[str]
    """Name on the command line."""
    fixed: ClassVar[tuple[str, ...]] = (
        "env",
        "env_kwargs",
        "num_envs",
        "drop_observations",
        "action_mask",
        "wrapper",
        "vectorization",
        "env_workers",
        "env_groups",
        "previous_action",
        "previous_reward",
        "observation_noise",
        "observation_delay",
        "reset_memory_at",
        "trial_episodes",
        "collectors",
    )
    """Options that can't be changed when a run is resumed."""
    usual_envs: ClassVar[int] = 8
    """Number of environments on a CPU."""
    more_envs_on_gpu: ClassVar[bool] = False
    """Whether tasks on a GPU have more environments by default; not if that changes how often a step is learned."""
    usual_lag: ClassVar[int] = 0
    """Default of ``max_lag``."""
    largest_lag: ClassVar[int | None] = None
    """Upper bound of ``max_lag``; None for no bound."""
    private_option: ClassVar[str | None] = None
    """Option that names observations which the actor doesn't see."""
    actor_kind: ClassVar[str | None] = None
    """What the actor computes. Runs of one kind can start from each other's networks (``init_from``); with None, only
    from those of the same algorithm."""
    choice: ClassVar[Any] = None
    """What was chosen for this machine where the options left it open: a :class:`Choice`, once they are complete."""
    env: EnvSource
    """Gymnasium id of the environment, such as recurl/MaskedCartPole-v1, or module:id to import the module that
    registers it, such as ale_py:ALE/Pong-v5 or my_file:My-v0 (the working directory is searched too), or one in JAX
    (jax:gymnax/CartPole-v1 or jax:my_file:function) or of several agents (vmas/balance, pettingzoo/ID)."""
    env_kwargs: tuple[str, ...] = ()
    """Keyword arguments of the environment as name=value, such as k=8. Values are Python literals, or else strings."""
    wrapper: tuple[str, ...] = ()
    """Gymnasium wrappers applied to each environment, innermost first, as module:Class or module:Class(name=value),
    such as --wrapper gymnasium.wrappers:FlattenObservation --wrapper my_file:Mine."""
    vectorization: Literal["auto", "native", "sync", "async", "device"] = "auto"
    """How environments are vectorized: native uses the environment's own vector implementation, sync steps them one
    after the other, async steps each in its own process, and device steps them as tensors on the device (tasks only).
    auto picks device for tasks on a GPU; otherwise native if it can reset single rows and there is no wrapper, else
    sync."""
    env_workers: AutoNonNegativeInt = AUTO
    """Worker processes that step the training environments; must divide --num-envs. 0 steps them in the main process,
    the default; with --device auto on a machine with a GPU, their number is chosen by the time that a step takes."""
    env_groups: AutoCount = AUTO
    """Groups of environments that alternate: while the workers step one group, the actions of the next are computed. 2
    keeps the workers busy when the policy is slow, as on a GPU. Needs --env-workers. By default 1, unless
    --env-workers was chosen too."""
    collectors: str | None = None
    """Actors that collect on the CPU and share the environments: ray:8 starts eight Ray actors."""
    ray_address: str | None = None
    """Ray cluster to run the actors on, as HOST:PORT, or auto for the cluster on this machine; by default a private
    Ray instance for this run."""
    max_lag: NonNegativeInt | None = None
    """Maximum number of updates by which an actor's weights may lag, so that actors collect while this process learns;
    by default 0 for on-policy algorithms that don't correct for older weights, otherwise 1."""
    previous_action: bool = False
    """Add the previous action to the policy's inputs (zeros at the start of an episode)."""
    previous_reward: bool = False
    """Add the previous reward to the policy's inputs (zero at the start of an episode)."""
    observation_noise: NonNegative = 0.0
    """Standard deviation of normal noise added to each number of the observations, in training and evaluation. What
    only a critic or a teacher sees has none."""
    observation_delay: SmallNonNegativeInt = 0
    """Steps by which observations arrive late, in training and evaluation, except those that only a critic or a teacher
    sees. The first observation of an episode is repeated until then."""
    reset_memory_at: Literal["episode", "trial"] = "episode"
    """Where the policy forgets: at each episode, or at each trial of --trial-episodes episodes (RL squared). A trial
    then is what an episode is otherwise: memory, previous action and reward, and discounting go on within it; its
    return is the sum of its episodes'; and a flag, 1 where an episode begins, is added to the observations."""
    trial_episodes: Count | None = None
    """Episodes of a trial, with --reset-memory-at trial."""
    action_mask: str = ACTION_MASK
    """Key of the mask of valid actions in the observation or in info; none ignores it."""
    show_action_mask: bool = False
    """Add the action mask to the networks' inputs."""

    drop_observations: tuple[str, ...] = ()
    """Observations to drop, such as MiniGrid's mission text; join the parts of a nested key with dots."""
    encoder: Literal["auto", "mlp", "nature", "impala"] = "auto"
    """Encoder before the recurrent layers: auto uses convolutions for images (uint8 with 2 or 3 dimensions), those of
    Nature DQN from 36x36 pixels up, and an MLP for vectors; mlp flattens images."""
    encoder_width: Count | None = None
    """Width of each encoder's fully connected layers; by default --hidden-size."""
    encoder_layers: Count = 1
    """Number of fully connected layers of each encoder, after the convolutions if there are any."""
    image_layout: Literal["auto", "hwc", "chw", "hw"] = "auto"
    """Layout of image observations; auto takes the smaller of the first and last dimensions as the channels."""
    head_width: NonNegativeInt = 0
    """Width of the hidden layers between the recurrent layers and each output; 0 for none."""
    head_layers: Count = 1
    """Number of these hidden layers (critics of continuous actions always have one)."""

    cell: str = "lstm"
    """Recurrent cell: lstm, gru, mingru, minlstm, lru, s5, rglru, ffm, gtrxl, mlstm, mamba2, gated_deltanet, slstm,
    shm, a custom module:Class, or none. Options follow in parentheses: "s5(state_size=128, norm=False)"."""
    hidden_size: Count = 64
    """Size of the hidden state."""
    num_layers: Count = 1
    """Number of stacked recurrent layers."""
    backend: str = "fastest"
    """Backend that runs the recurrence; fastest picks the best one available on this machine."""
    normalize_observations: bool = True
    """Normalize observations with running statistics, which are saved with the policy."""

    init_from: str | None = None
    """Run folder, or a checkpoint in it, whose networks this run starts from: weights and statistics of the actor,
    which must fit in full, and of the critics where they fit. Optimizers and schedules start over."""

    total_steps: Steps = 150_000
    """Maximum number of environment steps to train for, summed over all environments."""
    num_envs: AutoCount = AUTO
    """Number of environments stepped in parallel. By default 8 (16 for A2C, IMPALA, DQN and R2D2); on-policy algorithms
    with tasks on a GPU take as many as --total-steps has use for, up to 4,096."""
    rollout_steps: Count = 128
    """Steps per environment between updates."""
    learning_rate: Positive = 1e-3
    """Initial learning rate of Adam."""
    learning_rate_schedule: Schedule = "constant"
    """Decay of the learning rate to zero over --total-steps."""
    gamma: Fraction = 0.99
    """Discount factor."""
    max_grad_norm: PositiveOrInf = 0.5
    """Maximum gradient norm; inf disables clipping."""

    seed: Seed = 0
    """Random seed; the same seed gives the same run."""
    device: str = "auto"
    """Device of the networks, such as cpu or cuda; auto picks the one that is expected to finish first."""
    matmul_precision: Literal["auto", "highest", "high", "medium"] = "auto"
    """Precision of float32 matrix products, as in torch.set_float32_matmul_precision: highest is float32, high and
    medium are TF32 on a GPU; auto is high on a GPU and highest on a CPU. The setting applies to this run only."""
    threads: Threads = 1
    """Number of CPU threads for torch; small networks are slower with more."""
    checkpoint_every: Count = 50
    """Updates between checkpoints."""
    stop_return: Number | None = None
    """Stop when the mean return of the last 20 training episodes reaches this value."""
    stop_eval_return: Number | None = None
    """Stop when the mean return of an evaluation during training reaches this value (needs --eval-every)."""
    eval_every: Steps | None = None
    """Environment steps between evaluations during training, which use separate environments and seeds."""
    eval_episodes: Count = 100
    """Number of episodes per evaluation with the greedy policy, during and after training."""
    eval_env: str | None = None
    """Gymnasium id of the evaluation environment; by default the training environment."""
    eval_env_kwargs: tuple[str, ...] = ()
    """Keyword arguments of the evaluation environment as name=value. Without --eval-env they are added to --env-kwargs
    and override it."""
    keep_best: bool = False
    """Save the policy with the best evaluation during training (needs --eval-every)."""
    eval_max_steps: Count = 27_000
    """Maximum length of an evaluation episode; the evaluation reports how many episodes were cut off."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What to do when a reward, observation, loss or gradient is NaN or infinite: stop the run, or skip the batch or
    gradient step."""
    env_timeout: Positive = 60.0
    """Timeout in seconds for a step or reset of environments in other processes (--env-workers, --overlap)."""
    rank_timeout: Positive = 60.0
    """Seconds without progress on a rank after which all ranks are stopped (torchrun only). Setup, the first three
    updates, evaluations and checkpoints may take longer."""
    logger: Literal["tensorboard", "wandb", "none"] = "tensorboard"
    """Logger to use in addition to metrics.csv and the terminal."""
    callback: tuple[str, ...] = ()
    """Custom callbacks, each as module:Class."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "env", named(self.env))
        check_fields(self)
        self._check_backend()
        if self.cell != NO_CELL:
            self._check_cell()
        self._check_given_collectors()
        self._fit_machine()
        self._check_backend_device()
        self._check_env()
        self._check_collectors()
        self.check()
        if self.total_steps < self.frames_per_batch:
            raise ArgumentError(
                f"--total-steps must cover one batch of {self.frames_per_batch} steps ({self.num_envs} environments x "
                f"{self.rollout_steps}), got {self.total_steps}: raise it, or lower --rollout-steps."
            )
        self._check_evaluation()
        _ = self.env_arguments

    def _fit_machine(self) -> None:
        """Replace the values that are left to recurl by those chosen for this machine."""
        settled = self.settled()
        left = tuple(name for name in settled if getattr(self, name) in (None, "auto"))
        choice = self._choose({name: settled[name] for name in _CHOSEN if name in left})._replace(left=left)
        for name, value in {**choice.values, "choice": choice}.items():
            object.__setattr__(self, name, value)

    def _choose(self, on_cpu: dict[str, Any]) -> Choice:
        """Return what is chosen, given the values of the open options on a CPU; an environment object has a device."""
        source: Any = source_of(self.env)
        if is_environment(source):
            own = {"device": str(source.device or "cpu")} if "device" in on_cpu else {}
            return Choice({**on_cpu, **own}, {}, source.tensor_env is not None)
        return Choice(on_cpu, {}, tasks=None, obstacle=ALGORITHM_OBSTACLE)

    @property
    def graph_obstacle(self) -> str | None:
        """What a CUDA graph of an update lacks to be possible, or None if it is."""
        return "an algorithm with --cuda-graph"

    @property
    def compile_obstacle(self) -> str | None:
        """What the compilation of an update lacks to be possible, or None if it is."""
        return "an algorithm with --compile"

    def work(self, frames: int) -> Work:
        """Return the work of learning from a batch of ``frames`` environment steps."""
        return Work(1, frames)

    def _check_env(self) -> None:
        workers = self.env_workers
        if self.env_groups > 1 and (not workers or self.num_envs % (workers * self.env_groups)):
            raise ArgumentError(
                f"--env-groups {self.env_groups} needs --env-workers, and --num-envs must be a multiple of groups x "
                f"workers, got {workers} workers and {self.num_envs} environments."
            )
        if workers and self.num_envs % workers:
            raise ArgumentError(
                f"--env-workers must divide --num-envs, got {workers} and {self.num_envs}: use "
                f"{self._dividing_envs(workers)}."
            )
        host_only = self.host_only
        if is_jax(self.env) or is_multi_agent(self.env):
            unfit = [name for name in host_only if is_jax(self.env) or name not in ("env_workers", "action_mask")]
            unfit += ["vectorization"] * (self.vectorization not in ("auto", "device"))
            unfit += ["reset_memory_at"] * (self.trial_episodes is not None)
            if unfit:
                raise ArgumentError(
                    f"--env {self.env_name} steps as a batch of tensors and doesn't support "
                    f"{', '.join(map(flag, unfit))}: leave {'it' if len(unfit) == 1 else 'them'} out."
                )
        elif self.vectorization == "device" and host_only:
            raise ArgumentError(
                "--vectorization device steps a task as tensors and doesn't support "
                f"{', '.join(map(flag, host_only))}: leave {'it' if len(host_only) == 1 else 'them'} out, or choose "
                "another vectorization."
            )
        if (self.reset_memory_at == "trial") != (self.trial_episodes is not None):
            raise ArgumentError(
                "--reset-memory-at trial and --trial-episodes belong together, got --reset-memory-at "
                f"{self.reset_memory_at} and {self.trial_episodes or 'no'} episodes: give both or neither."
            )
        given = is_environment(source_of(self.env))
        if given and self.trial_episodes is not None:
            raise ArgumentError(
                "--reset-memory-at trial creates the environments of the trials: pass a function, env=lambda: ..., or "
                "build them into the environment (recurl.envs.Trials)."
            )
        if given and (host_only or self.drop_observations or self.env_kwargs or self.vectorization != "auto"):
            raise ArgumentError(
                "An environment passed as an object is used as is and doesn't support wrapper, vectorization, "
                "env_workers, env_kwargs, drop_observations or action_mask: pass a function that creates it, "
                "env=lambda: ..."
            )

    def _check_given_collectors(self) -> None:
        if self.collectors is not None and not re.fullmatch("ray:[1-9][0-9]{0,4}", self.collectors):
            raise ArgumentError(f"--collectors takes ray:N, such as ray:8 for eight actors, got {self.collectors!r}.")

    def _check_collectors(self) -> None:
        if self.collectors is None:
            for name in ("ray_address", "max_lag"):
                if getattr(self, name) is not None:
                    raise ArgumentError(f"{flag(name)} applies to actors only: add --collectors, such as ray:8.")
            return
        if self.num_envs % self.actors:
            raise ArgumentError(
                f"The number of --collectors must divide --num-envs, got {self.actors} and {self.num_envs}: use "
                f"{self._dividing_envs(self.actors)}."
            )
        if self.env_workers or getattr(self, "overlap", False):
            raise ArgumentError("--collectors creates environments in actors: leave out --env-workers and --overlap.")
        if is_environment(source_of(self.env)):
            raise ArgumentError("--collectors creates environments in actors: pass a function, env=lambda: ...")
        if self.largest_lag is not None and self.lag > self.largest_lag:
            raise ArgumentError(
                f"{self.algorithm} doesn't correct for older weights: --max-lag must be at most {self.largest_lag}, "
                f"got {self.lag}."
            )
        if self.on_nonfinite == "skip" and self.lag > 1:
            raise ArgumentError(f"--on-nonfinite skip needs --max-lag 0 or 1 with --collectors, got {self.lag}.")

    def _check_evaluation(self) -> None:
        for name in ("keep_best", "stop_eval_return"):
            if self.eval_every is None and getattr(self, name) not in (None, False):
                raise ArgumentError(f"{flag(name)} needs evaluations during training: add --eval-every STEPS.")
        _ = self.for_evaluation().env_arguments

    def _check_backend(self) -> None:
        from recurl.recurrence import BACKENDS  # noqa: PLC0415 - imports torch, which --help doesn't need

        if self.backend not in BACKENDS.names:
            near = nearest(self.backend, BACKENDS.names)
            raise ArgumentError(f"--backend must be one of {', '.join(BACKENDS.names)}, got {self.backend!r}.{near}")

    def check(self) -> None:
        """Check that the options are consistent; subclasses extend this."""
        both = [name for name in self.private_observations if is_within(name, self.drop_observations)]
        if both:
            raise ArgumentError(
                f"{', '.join(both)} can't be in both {flag(self.private_option or '')} and --drop-observations, which "
                "takes it from all networks."
            )

    def _check_backend_device(self) -> None:
        from recurl.recurrence import BACKENDS  # noqa: PLC0415 - see above

        serves = BACKENDS.device_of(self.backend)
        if self.cell != NO_CELL and serves not in (None, self.device.partition(":")[0]):
            raise ArgumentError(
                f"--backend {self.backend} needs --device {serves}, got {self.device}: use that device, or "
                "--backend fastest."
            )

    def _check_cell(self) -> None:
        from recurl.recurrence import BACKENDS, CELLS, load_cell  # noqa: PLC0415 - see above

        try:
            BACKENDS.check_cell(self.backend, load_cell(self.cell))
        except ArgumentError as error:
            known = ":" in self.cell or self.cell.partition("(")[0] in CELLS
            raise ArgumentError(f"--cell: {error}{'' if known else ' Use none for a feed-forward network.'}") from error
        except UnsupportedError as error:
            raise ArgumentError(f"--backend: {error}") from error

    def _dividing_envs(self, wanted: int) -> str:
        """Return the divisors of ``num_envs`` closest to ``wanted`` as text."""
        small = [count for count in range(1, math.isqrt(self.num_envs) + 1) if self.num_envs % count == 0]
        divisors = sorted({*small, *(self.num_envs // count for count in small)}, key=lambda one: abs(one - wanted))
        return ", ".join(map(str, sorted(divisors[:_DIVISORS])))

    @property
    def actors(self) -> int:
        """Number of actors; 0 without ``collectors``."""
        return 0 if self.collectors is None else int(self.collectors.partition(":")[2])

    @property
    def lag(self) -> int:
        """Maximum number of updates by which actors may lag."""
        return self.usual_lag if self.max_lag is None else self.max_lag

    @property
    def epsilons(self) -> tuple[float, ...] | None:
        """Exploration probability of each actor; None if all actors share that of the run."""
        return None

    @property
    def host_only(self) -> list[str]:
        """Names of the options in use that only Gymnasium environments on the host support."""
        masked = self.action_mask not in (NO_MASK, ACTION_MASK)
        return [name for name in ("env_workers", "wrapper") if getattr(self, name)] + ["action_mask"] * masked

    @property
    def torch_precision(self) -> str:
        """Argument of ``torch.set_float32_matmul_precision`` for this run."""
        by_device = "high" if self.device.startswith("cuda") else "highest"
        return by_device if self.matmul_precision == "auto" else self.matmul_precision

    @property
    def private_observations(self) -> tuple[str, ...]:
        """Observations that the actor doesn't see, but a critic or a teacher does."""
        return () if self.private_option is None else getattr(self, self.private_option)

    @property
    def env_name(self) -> str:
        """Gymnasium id of the environment, or the name of the function or environment object."""
        return str(self.env)

    @property
    def frames_per_batch(self) -> int:
        """Environment steps between updates."""
        return self.num_envs * self.rollout_steps

    @property
    def states_every(self) -> int | None:
        """Interval, in steps, at which a batch stores recurrent states; None to store them at every step."""
        return None

    @property
    def updates(self) -> int:
        """Number of updates of the run: whole batches in ``total_steps``."""
        return self.total_steps // self.frames_per_batch

    @property
    def scheduled(self) -> dict[str, Schedule]:
        """Schedules, such as ``learning_rate_schedule``, by the name of the scheduled option; not what is adaptive."""
        ending = "_schedule"
        found = {f.name.removesuffix(ending): getattr(self, f.name) for f in fields(self) if f.name.endswith(ending)}
        return {name: schedule for name, schedule in found.items() if schedule != ADAPTIVE}

    @property
    def env_arguments(self) -> dict[str, Any]:
        """Keyword arguments of the environment, from ``env_kwargs``."""
        return keyword_arguments("--env-kwargs", self.env_kwargs)

    def for_evaluation(self) -> Self:
        """Return these options with the evaluation environment in place of the training environment."""
        if self.eval_env is None and not self.eval_env_kwargs:
            return self
        env, texts = evaluation_task(self.env, self.env_kwargs, self.eval_env, self.eval_env_kwargs)
        return replace(self, env=env, env_kwargs=texts, eval_env=None, eval_env_kwargs=())

    @property
    def gradient_steps_per_batch(self) -> int:
        """Number of gradient steps that share one pass over a batch; 0 if they don't use the batch directly."""
        return 0

    @property
    def replay_steps(self) -> int:
        """Capacity of the replay buffer in environment steps; 0 without one."""
        return 0

    @classmethod
    def settled(cls) -> dict[str, Any]:
        """Return the values, on a CPU, of the options that can be left to recurl."""
        values = {**_SETTLED, "num_envs": cls.usual_envs}
        open_ones = [field.name for field in fields_of(cls) if field.optional or field.name == "device"]
        return {name: values[name] for name in open_ones if name in values}

    @classmethod
    def algorithm_name(cls) -> str:
        """Return the name that identifies the algorithm in a new process: ``module:name`` for a custom algorithm."""
        module = cls.__module__
        return cls.algorithm if module == "__main__" or module.startswith("recurl.") else f"{module}:{cls.algorithm}"

    def on_cpu(self) -> Self:
        """Return these options for the CPU, with the fastest backend there."""
        return replace(self, device="cpu", backend="fastest")

    def with_env(self, env: EnvSource) -> Self:
        """Return these options with another environment; a function or object keeps the current environment name.

        Args:
            env: the environment; see the ``env`` option.
        """
        return replace(self, env=named(env, self.env_name))

    def to_dict(self) -> dict[str, Any]:
        """Return the options as plain values that can be written as JSON."""
        values = {**asdict(self), "env": self.env_name}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        return {"algorithm": self.algorithm_name(), **plain}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build options from the output of :meth:`to_dict`.

        Raises:
            ArgumentError: if an option is unknown, missing or invalid.
        """
        options = cls.complete(values)
        check_names_of(cls, options)
        try:
            return cls(**options)
        except TypeError as error:
            raise ArgumentError(f"The options can't be read: {error}.") from error

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the output of :meth:`to_dict`, of any recurl version, to keyword arguments of this class, unchecked.

        Subclasses fill in options that earlier versions didn't have, with the behavior of those versions. Nothing is
        left to be chosen for this machine.
        """
        many = {field.name for field in fields_of(cls) if field.many}
        left = {field.name for field in fields_of(cls) if field.default in (None, "auto")}
        settled = {name: value for name, value in cls.settled().items() if name in left}
        options = {**settled, **{name: value for name, value in values.items() if name != "algorithm"}}
        return {n: tuple(value) if n in many and isinstance(value, list) else value for n, value in options.items()}


class Choice(NamedTuple):
    """What was chosen for a run.

    Attributes:
        values: the chosen options by name.
        seconds: expected seconds of the run, by device.
        tasks: whether the environments are tasks, which a GPU steps as tensors; None if that isn't known.
        obstacle: what the run lacks to be on a GPU without being asked for.
        left: names of the options that were left open.
    """

    values: dict[str, Any]
    seconds: dict[str, float]
    tasks: bool | None
    obstacle: str | None = None
    left: tuple[str, ...] = ()


class Work(NamedTuple):
    """Work of learning from a batch."""

    gradient_steps: int
    """Number of gradient steps."""
    steps: int
    """Environment steps that pass through the networks, forward and backward."""


def check_names_of(kind: type[RunConfig], options: Mapping[str, Any]) -> None:
    """Check that an algorithm has all of these options.

    Raises:
        ArgumentError: if an option is unknown.
    """
    unknown = sorted(set(options) - {field.name for field in fields(kind)})
    if unknown:
        raise ArgumentError(f"Unknown options {shown(unknown)}: this run was written by another version of recurl.")


def evaluation_task(
    env: EnvSource, env_kwargs: Sequence[str], eval_env: str | None, eval_env_kwargs: Sequence[str]
) -> tuple[EnvSource, tuple[str, ...]]:
    """Return the evaluation environment and its arguments, from the options of the same names.

    Raises:
        ArgumentError: if an argument is not of the form name=value, or a name appears twice.
    """
    texts = {text.partition("=")[0]: text for text in env_kwargs if eval_env is None}
    texts.update({text.partition("=")[0]: text for text in eval_env_kwargs})
    keyword_arguments("--eval-env-kwargs", eval_env_kwargs)
    return env if eval_env is None else eval_env, tuple(texts.values())

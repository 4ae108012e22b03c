"""Options that every algorithm has: a frozen dataclass, which is also the command line."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self, TypeAlias

from recurl.errors import ArgumentError, UnsupportedError
from recurl.keys import ACTION_MASK
from recurl.nearest import nearest
from recurl.ranges import (
    Count,
    Fraction,
    NoBound,
    Number,
    Positive,
    Seed,
    Steps,
    Threads,
    Whole,
    check_fields,
    fields_of,
    flag,
    shown,
)
from recurl.trainers.env_name import EnvSource, is_environment, named, source_of
from recurl.trainers.keyword_arguments import keyword_arguments

NO_MASK = "none"
"""The action mask of a run without one."""
Schedule: TypeAlias = Literal["constant", "linear", "cosine"]
"""How an option falls from its value to zero over the run: not at all, on a line, on half a cosine."""
NO_CELL = "none"
"""The cell of a feed-forward control."""
_DIVISORS = 12  # of the number of environments, named in a message


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Options that every algorithm has.

    Raises:
        ArgumentError: a size that is not positive, a fraction outside [0, 1], environment arguments that don't fit, or
            fewer steps than a batch has.
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
        "collectors",
    )
    """Options that a run can't change when it is resumed."""
    usual_lag: ClassVar[int] = 0
    """What ``max_lag`` is by default."""
    largest_lag: ClassVar[int | None] = None
    """What ``max_lag`` may be at most; None for no bound."""
    env: EnvSource
    """Gymnasium id of the environment, such as recurl/MaskedCartPole-v1, or module:id where a module registers it, such
    as ale_py:ALE/Pong-v5 or my_file:My-v0 (the working directory is searched too)."""
    env_kwargs: tuple[str, ...] = ()
    """Arguments of the environment as name=value, such as k=8 (a Python literal, otherwise text)."""
    wrapper: tuple[str, ...] = ()
    """Gymnasium wrappers of each environment, module:Class or module:Class(name=value), the first innermost, such as
    --wrapper gymnasium.wrappers:FlattenObservation --wrapper my_file:Mine."""
    vectorization: Literal["auto", "native", "sync", "async", "device"] = "auto"
    """How environments are stepped together: the environment's own vector implementation, one after the other, each in
    a process, or (tasks only) as tensors on the device; auto takes native where it can begin episodes of single rows
    and there is no wrapper, else sync, and on a GPU device for tasks."""
    env_workers: Whole = 0
    """Processes that share the environments of the training, which must be a multiple; 0 for none."""
    env_groups: Count = 1
    """Groups of environments that take turns: while the workers step one, the actions of the next are computed (2 keeps
    workers busy where acting takes long, as on a GPU; needs --env-workers)."""
    collectors: str | None = None
    """Actors that share the environments and collect, on the CPU: ray:8 for eight actors of Ray."""
    ray_address: str | None = None
    """Ray cluster of these actors, HOST:PORT, or auto for that of this machine; by default a Ray that only this run
    reaches."""
    max_lag: Whole | None = None
    """Updates that an actor may be behind, so that it acts while this process learns; by default 0 for what learns from
    each batch once and doesn't correct for older weights, else 1."""
    previous_action: bool = False
    """Show the policy the action of the step before too (zeros when an episode begins)."""
    previous_reward: bool = False
    """Show the policy the reward of the step before too (zero when an episode begins)."""
    action_mask: str = ACTION_MASK
    """Mask of allowed actions: its name in the observation or in info; none for no mask."""
    show_action_mask: bool = False
    """Let the networks see the mask too."""

    drop_observations: tuple[str, ...] = ()
    """Observations to leave out, such as MiniGrid's mission, a text; the parts of a nested name are joined by dots."""
    encoder: Literal["auto", "mlp", "nature", "impala"] = "auto"
    """What comes before the memory: auto takes convolutions for images (uint8 of 2 or 3 dimensions), Nature DQN's from
    36x36 on, and a multilayer perceptron for vectors; mlp takes images as vectors."""
    encoder_width: Count | None = None
    """Width of each encoder's fully connected layers; by default that of the hidden state."""
    encoder_layers: Count = 1
    """Fully connected layers of each encoder, after the convolutions of an image."""
    image_layout: Literal["auto", "hwc", "chw", "hw"] = "auto"
    """Order of an image's dimensions; auto takes the smaller one of first and last as the channels."""
    head_width: Whole = 0
    """Width of a hidden layer between the memory and each output; 0 for none."""

    cell: str = "lstm"
    """The memory: lstm, gru, mingru, minlstm, lru, s5, rglru, ffm, module:Class for a cell of your own, or none for a
    feed-forward control. Options of a cell follow in brackets: "s5(state_size=128, norm=False)"."""
    hidden_size: Count = 64
    """Width of the hidden state, and of the encoder where none is given."""
    num_layers: Count = 1
    """Stacked recurrent layers."""
    backend: str = "fastest"
    """Implementation of the recurrence; fastest takes the best one of this machine."""
    normalize_observations: bool = True
    """Standardise observations with running statistics, which are saved with the policy."""

    total_steps: Steps = 150_000
    """Environment steps to train for at most, summed over the environments."""
    num_envs: Count = 8
    """Environments stepped side by side."""
    rollout_steps: Count = 128
    """Steps of each environment between two updates."""
    learning_rate: Positive = 1e-3
    """Step size of Adam, at the start."""
    learning_rate_schedule: Schedule = "constant"
    """How it falls to zero over --total-steps."""
    gamma: Fraction = 0.99
    """Discount per step."""
    max_grad_norm: NoBound = 0.5
    """Largest norm of the gradient; inf for no bound."""

    seed: Seed = 0
    """Seed of everything random; the same seed gives the same run."""
    device: str = "cpu"
    """Device of the networks, such as cpu or cuda."""
    matmul_precision: Literal["auto", "highest", "high", "medium"] = "auto"
    """Precision of all products of float32 matrices, in torch's words: highest is float32, high and medium are tf32 on
    a GPU; auto is high on a GPU and highest on a CPU. The run sets it for itself."""
    threads: Threads = 1
    """CPU threads of torch; small networks run slower with more."""
    checkpoint_every: Count = 50
    """Updates between two checkpoints."""
    stop_return: Number | None = None
    """Mean return of the last 20 training episodes that ends the run."""
    stop_eval_return: Number | None = None
    """Mean return of an evaluation during training that ends the run (needs --eval-every)."""
    eval_every: Steps | None = None
    """Environment steps between evaluations during training, which have environments and seeds of their own."""
    eval_episodes: Count = 100
    """Greedy episodes of each evaluation, during training and at the end."""
    eval_env: str | None = None
    """Environment of the evaluations; by default that of the training."""
    eval_env_kwargs: tuple[str, ...] = ()
    """Arguments of that environment as name=value; those of --env-kwargs hold besides where it is the same one."""
    keep_best: bool = False
    """Keep the policy of the best evaluation during training (needs --eval-every)."""
    eval_max_steps: Count = 27_000
    """Step limit of these episodes; the evaluation says how many were cut there."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Reaction to a NaN or infinite reward, observation, loss or gradient: stop, or skip the batch or step."""
    env_timeout: Positive = 60.0
    """Seconds that a step or reset of environments in other processes (--env-workers, --overlap) may take before they
    count as hung."""
    rank_timeout: Positive = 60.0
    """Seconds without progress of a rank under torchrun after which all end; set-up, the first three updates,
    evaluations and checkpoints may take longer."""
    logger: Literal["tensorboard", "wandb", "none"] = "tensorboard"
    """Where the numbers go besides metrics.csv and the terminal."""
    callback: tuple[str, ...] = ()
    """Callbacks of your own, module:Class each."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "env", named(self.env))
        check_fields(self)
        self._check_env()
        self._check_collectors()
        self._check_backend()
        if self.cell != NO_CELL:
            self._check_cell()
        self.check()
        if self.total_steps < self.frames_per_batch:
            raise ArgumentError(
                f"--total-steps must cover one batch of {self.frames_per_batch} steps ({self.num_envs} environments x "
                f"{self.rollout_steps}), got {self.total_steps}: raise it, or lower --rollout-steps."
            )
        self._check_evaluation()
        _ = self.env_arguments

    def _check_env(self) -> None:
        workers = self.env_workers
        if self.env_groups > 1 and (not workers or self.num_envs % (workers * self.env_groups)):
            raise ArgumentError(
                f"--env-groups {self.env_groups} needs --env-workers, and --num-envs must be a multiple of groups x "
                f"workers, got {workers} workers and {self.num_envs} environments."
            )
        if workers and self.num_envs % workers:
            raise ArgumentError(
                f"--env-workers must divide --num-envs, got {workers} and {self.num_envs}: take "
                f"{self._dividing_envs(workers)}."
            )
        host_only = self.host_only
        if self.vectorization == "device" and host_only:
            raise ArgumentError(
                f"--vectorization device steps a task as tensors, without {', '.join(map(flag, host_only))}: leave "
                f"{'it' if len(host_only) == 1 else 'them'} out, or take another vectorization."
            )
        given = is_environment(source_of(self.env))
        if given and (host_only or self.env_kwargs or self.vectorization != "auto"):
            raise ArgumentError(
                "An environment that is given as an object is used as it is, without wrapper, vectorization, "
                "env_workers, env_kwargs, drop_observations and action_mask: give a function that makes it, "
                "env=lambda: ..."
            )

    def _check_collectors(self) -> None:
        if self.collectors is None:
            for name in ("ray_address", "max_lag"):
                if getattr(self, name) is not None:
                    raise ArgumentError(f"{flag(name)} is for actors: add --collectors, such as ray:8.")
            return
        if not re.fullmatch("ray:[1-9][0-9]{0,4}", self.collectors):
            raise ArgumentError(f"--collectors takes ray:N, such as ray:8 for eight actors, got {self.collectors!r}.")
        if self.num_envs % self.actors:
            raise ArgumentError(
                f"The actors of --collectors must divide --num-envs, got {self.actors} and {self.num_envs}: take "
                f"{self._dividing_envs(self.actors)}."
            )
        if self.env_workers or getattr(self, "overlap", False):
            raise ArgumentError("--collectors makes environments in actors: leave out --env-workers and --overlap.")
        if is_environment(source_of(self.env)):
            raise ArgumentError("--collectors makes environments in actors: give a function, env=lambda: ...")
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
        from recurl.recurrence import BACKENDS  # noqa: PLC0415 - it imports torch, which the help of the options doesn't need

        if self.backend not in BACKENDS.names:
            near = nearest(self.backend, BACKENDS.names)
            raise ArgumentError(f"--backend must be one of {', '.join(BACKENDS.names)}, got {self.backend!r}.{near}")

    def check(self) -> None:
        """Refuse options that don't fit together."""

    def _check_cell(self) -> None:
        from recurl.recurrence import BACKENDS, load_cell  # noqa: PLC0415 - as said above

        try:
            BACKENDS.check_cell(self.backend, load_cell(self.cell))
        except ArgumentError as error:
            raise ArgumentError(f"--cell: {error} For a feed-forward control write none.") from error
        except UnsupportedError as error:
            raise ArgumentError(f"--backend: {error}.") from error

    def _dividing_envs(self, wanted: int) -> str:
        """Return the divisors of ``num_envs``, those nearest to ``wanted`` where there are many, as text."""
        small = [count for count in range(1, math.isqrt(self.num_envs) + 1) if self.num_envs % count == 0]
        divisors = sorted({*small, *(self.num_envs // count for count in small)}, key=lambda one: abs(one - wanted))
        return ", ".join(map(str, sorted(divisors[:_DIVISORS])))

    @property
    def actors(self) -> int:
        """Number of actors that collect, 0 for none."""
        return 0 if self.collectors is None else int(self.collectors.partition(":")[2])

    @property
    def lag(self) -> int:
        """Updates that actors may be behind."""
        return self.usual_lag if self.max_lag is None else self.max_lag

    @property
    def epsilons(self) -> tuple[float, ...] | None:
        """Probability of random actions of each actor; None for that of the run."""
        return None

    @property
    def host_only(self) -> list[str]:
        """Names of the options in use that only environments of Gymnasium have, on the host."""
        names = ("env_workers", "wrapper", "drop_observations")
        masked = self.action_mask not in (NO_MASK, ACTION_MASK)
        return [name for name in names if getattr(self, name)] + ["action_mask"] * masked

    @property
    def torch_precision(self) -> str:
        """What ``torch.set_float32_matmul_precision`` takes for this run."""
        by_device = "high" if self.device.startswith("cuda") else "highest"
        return by_device if self.matmul_precision == "auto" else self.matmul_precision

    @property
    def env_name(self) -> str:
        """Gymnasium id of the environment, or the name of what was given in its place."""
        return str(self.env)

    @property
    def frames_per_batch(self) -> int:
        """Environment steps between two updates."""
        return self.num_envs * self.rollout_steps

    @property
    def states_every(self) -> int | None:
        """Distance of the steps whose recurrent states a batch stores; None for those of all steps."""
        return None

    @property
    def updates(self) -> int:
        """Whole batches that fit into ``total_steps``."""
        return self.total_steps // self.frames_per_batch

    @property
    def scheduled(self) -> dict[str, Schedule]:
        """Schedules of the options that have one, such as ``learning_rate_schedule``, by the option's name."""
        ending = "_schedule"
        names = [field.name for field in fields(self) if field.name.endswith(ending)]
        return {name.removesuffix(ending): getattr(self, name) for name in names}

    @property
    def env_arguments(self) -> dict[str, Any]:
        """Keyword arguments of the environment, from ``env_kwargs``."""
        return keyword_arguments("--env-kwargs", self.env_kwargs)

    def for_evaluation(self) -> Self:
        """Return the options of the same run with the environment of its evaluations."""
        if self.eval_env is None and not self.eval_env_kwargs:
            return self
        env, texts = evaluation_task(self.env, self.env_kwargs, self.eval_env, self.eval_env_kwargs)
        return replace(self, env=env, env_kwargs=texts, eval_env=None, eval_env_kwargs=())

    @property
    def gradient_steps_per_batch(self) -> int:
        """Into how many gradient steps a batch is divided; 0 where they learn from something else."""
        return 0

    @property
    def replay_steps(self) -> int:
        """Environment steps kept for replay."""
        return 0

    @classmethod
    def algorithm_name(cls) -> str:
        """Return the name that finds the algorithm in a new process: ``module:name`` for one that isn't recurl's."""
        module = cls.__module__
        return cls.algorithm if module == "__main__" or module.startswith("recurl.") else f"{module}:{cls.algorithm}"

    def on_cpu(self) -> Self:
        """Return the options of the same run on the CPU, with the backend that is best there."""
        return replace(self, device="cpu", backend="fastest")

    def with_env(self, env: EnvSource) -> Self:
        """Return the options with another environment; a function or an object keeps the name in these options.

        Args:
            env: see ``env``.
        """
        return replace(self, env=named(env, self.env_name))

    def to_dict(self) -> dict[str, Any]:
        """Return the options as plain values, ready for JSON."""
        values = {**asdict(self), "env": self.env_name}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        return {"algorithm": self.algorithm_name(), **plain}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build the options from what :meth:`to_dict` returned.

        Raises:
            ArgumentError: an option is unknown, missing, or has a value that can't be used.
        """
        options = cls.complete(values)
        check_names_of(cls, options)
        try:
            return cls(**options)
        except TypeError as error:
            raise ArgumentError(f"The options can't be read: {error}.") from error

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return what :meth:`to_dict` returned, of any version, as arguments of this class; nothing is checked.

        A subclass adds what runs of earlier versions didn't say, as it was then.
        """
        many = {field.name for field in fields_of(cls) if field.many}
        options = {name: value for name, value in values.items() if name != "algorithm"}
        return {n: tuple(value) if n in many and isinstance(value, list) else value for n, value in options.items()}


def check_names_of(kind: type[RunConfig], options: Mapping[str, Any]) -> None:
    """Refuse options that an algorithm doesn't have.

    Raises:
        ArgumentError: there is one.
    """
    unknown = sorted(set(options) - {field.name for field in fields(kind)})
    if unknown:
        raise ArgumentError(f"Unknown options {shown(unknown)}: this run was written by another version of recurl.")


def evaluation_task(
    env: EnvSource, env_kwargs: Sequence[str], eval_env: str | None, eval_env_kwargs: Sequence[str]
) -> tuple[EnvSource, tuple[str, ...]]:
    """Return environment and arguments of evaluations, from the options of those names.

    Raises:
        ArgumentError: an argument is written otherwise than name=value, or a name comes twice.
    """
    texts = {text.partition("=")[0]: text for text in env_kwargs if eval_env is None}
    texts.update({text.partition("=")[0]: text for text in eval_env_kwargs})
    keyword_arguments("--eval-env-kwargs", eval_env_kwargs)
    return env if eval_env is None else eval_env, tuple(texts.values())

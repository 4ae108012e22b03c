"""What decides a run: a frozen dataclass for each algorithm, which is also its command line."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self

from recurl.errors import ArgumentError, UnsupportedError
from recurl.ranges import (
    Count,
    Fraction,
    Inside,
    NoBound,
    NotNegative,
    Number,
    Positive,
    Seed,
    Steps,
    Threads,
    check_fields,
)
from recurl.recurrence import BACKENDS, load_cell

NO_CELL = "none"
"""The cell of a feed-forward control."""
_CAPTURABLE = ("fastest", "triton")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Options that every algorithm has.

    Raises:
        ArgumentError: a size that is not positive, a fraction outside [0, 1], environment arguments that don't fit, or
            fewer steps than a batch has.
    """

    algorithm: ClassVar[str]
    """Name on the command line."""
    env: str
    """Gymnasium id of the environment, such as recurl/MaskedCartPole-v1."""
    env_kwargs: tuple[str, ...] = ()
    """Arguments of the environment as name=value, such as k=8 (a Python literal, otherwise text)."""

    cell: str = "lstm"
    """The memory: lstm, gru, module:Class for a cell of your own, or none for a feed-forward control."""
    hidden_size: Count = 64
    """Width of the encoder and of the hidden state."""
    num_layers: Count = 1
    """Stacked recurrent layers."""
    backend: str = "fastest"
    """Which implementation runs the recurrence (fastest takes the best one of this machine)."""
    normalize_observations: bool = True
    """Standardise observations with running statistics, which are saved with the policy."""

    total_steps: Steps = 150_000
    """Most environment steps to train for, summed over the environments."""
    num_envs: Count = 8
    """Environments stepped side by side."""
    rollout_steps: Count = 128
    """Steps of each environment between two updates."""
    learning_rate: Positive = 1e-3
    """Step size of Adam."""
    gamma: Fraction = 0.99
    """Discount per step."""
    max_grad_norm: NoBound = 0.5
    """Largest norm of the gradient; inf for no bound."""

    seed: Seed = 0
    """Seed of everything random; the same seed gives the same run."""
    device: str = "cpu"
    """Where the networks live, such as cpu or cuda."""
    threads: Threads = 1
    """CPU threads of torch (at this size more of them only cost)."""
    checkpoint_every: Count = 50
    """Updates between two checkpoints."""
    stop_return: Number | None = None
    """End the run once the mean return of the last 20 episodes reaches this."""
    eval_episodes: Count = 100
    """Greedy episodes played at the end."""
    eval_max_steps: Count = 27_000
    """Most steps of such an episode: a longer one is cut there, and the evaluation says so."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Where a reward, an observation, a loss or a gradient is NaN or infinite: stop, or skip the batch or step."""

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_backend()
        if self.cell != NO_CELL:
            self._check_cell()
        self.check()
        if self.total_steps < self.frames_per_batch:
            raise ArgumentError(
                f"--total-steps must cover one batch of {self.frames_per_batch} steps ({self.num_envs} environments x "
                f"{self.rollout_steps}), got {self.total_steps}: raise it, or lower --rollout-steps."
            )
        _ = self.env_arguments

    def _check_backend(self) -> None:
        if self.backend not in BACKENDS.names:
            raise ArgumentError(f"--backend must be one of {', '.join(BACKENDS.names)}, got {self.backend!r}.")

    def check(self) -> None:
        """Refuse options that don't fit together."""

    def _check_cell(self) -> None:
        try:
            BACKENDS.check_cell(self.backend, load_cell(self.cell))
        except ArgumentError as error:
            raise ArgumentError(f"--cell: {error} For a feed-forward control write none.") from error
        except UnsupportedError as error:
            raise ArgumentError(f"--backend: {error}.") from error

    @property
    def frames_per_batch(self) -> int:
        """Environment steps between two updates."""
        return self.num_envs * self.rollout_steps

    @property
    def updates(self) -> int:
        """Whole batches that fit into ``total_steps``."""
        return self.total_steps // self.frames_per_batch

    @property
    def env_arguments(self) -> dict[str, Any]:
        """``env_kwargs`` as keyword arguments."""
        return keyword_arguments("--env-kwargs", self.env_kwargs)

    def on_cpu(self) -> Self:
        """Return the options of the same run on the CPU, with the backend that is best there."""
        return replace(self, device="cpu", backend="fastest")

    def to_dict(self) -> dict[str, Any]:
        """Return the options as plain values, ready for JSON."""
        return {"algorithm": self.algorithm, **asdict(self), "env_kwargs": list(self.env_kwargs)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build the options from what :meth:`to_dict` returned.

        Raises:
            ArgumentError: an option is unknown, missing, or has a value that can't be used.
        """
        values = {name: value for name, value in values.items() if name != "algorithm"}
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise ArgumentError(f"Unknown options {unknown}: this run was written by another version of recurl.")
        try:
            options: dict[str, Any] = {**values, "env_kwargs": tuple(values.get("env_kwargs", ()))}
            return cls(**options)
        except TypeError as error:
            raise ArgumentError(f"The options can't be read: {error}.") from error


@dataclass(frozen=True, kw_only=True)
class PPOConfig(RunConfig):
    """Options of a recurrent PPO run.

    Raises:
        ArgumentError: see :class:`RunConfig`; or more minibatches than sequences.

    Example:
        >>> config = PPOConfig(env="recurl/RepeatPrevious-v0", env_kwargs=("k=8",), cell="gru")
        >>> config.env_arguments
        {'k': 8}
        >>> PPOConfig.from_dict(config.to_dict()) == config
        True
    """

    algorithm: ClassVar[str] = "ppo"

    shared_trunk: bool = True
    """Actor and critic share encoder and memory; otherwise each has its own."""
    scale_rewards: bool = True
    """Divide rewards by the running standard deviation of the discounted return."""
    epochs: Count = 4
    """Passes over a batch per update."""
    minibatches: Count = 4
    """Gradient steps per pass."""
    sequence_length: Count = 32
    """Cut rows into sequences of this length for the update; a sequence starts from the state stored there."""
    entropy_coeff: NotNegative = 0.0
    """Weight of the entropy bonus at the start."""
    anneal: bool = True
    """Let step size and entropy bonus fall linearly to zero over the run."""
    gae_lambda: Fraction = 0.95
    """Decay of generalised advantage estimation."""
    clip_epsilon: Inside = 0.2
    """How far the probability ratio may leave 1 before its gradient is cut."""
    critic_coeff: NotNegative = 0.5
    """Weight of the value loss."""
    cuda_graph: bool = False
    """Run each gradient step as one CUDA graph (needs --device cuda, and minibatches of the same size)."""
    overlap: bool = False
    """Collect in a second process while this one learns: quicker on two cores; batches are one update old."""

    def check(self) -> None:
        """Refuse more minibatches than sequences, and a CUDA graph or overlap where there can't be one."""
        pieces = -(-self.rollout_steps // self.sequence_length)
        if self.minibatches > self.num_envs * pieces:
            raise ArgumentError(
                f"--minibatches must not exceed the {self.num_envs * pieces} sequences of a batch "
                f"({self.num_envs} environments x {pieces}), got {self.minibatches}: lower it, raise --num-envs "
                "or lower --sequence-length."
            )
        if self.cuda_graph:
            self._check_cuda_graph(self.num_envs * pieces)
        if self.overlap and self.device != "cpu":
            raise ArgumentError(
                f"--overlap needs --device cpu, as the second process collects there, got {self.device}."
            )

    def on_cpu(self) -> Self:
        """Return the options of the same run on the CPU, with the backend that is best there."""
        return replace(self, device="cpu", backend="fastest", cuda_graph=False, overlap=False)

    def _check_cuda_graph(self, sequences: int) -> None:
        if not self.device.startswith("cuda"):
            raise ArgumentError(f"--cuda-graph needs --device cuda, got {self.device}.")
        if self.cell != NO_CELL and self.backend not in _CAPTURABLE:
            raise ArgumentError(
                f"--cuda-graph needs --backend {' or '.join(_CAPTURABLE)}, which never wait for the GPU, got "
                f"{self.backend}."
            )
        if self.rollout_steps % self.sequence_length or sequences % self.minibatches:
            raise ArgumentError(
                "--cuda-graph needs minibatches of the same size: --sequence-length must divide --rollout-steps, and "
                f"--minibatches the {sequences} sequences of a batch; got {self.sequence_length} for "
                f"{self.rollout_steps}, and {self.minibatches}."
            )


def keyword_arguments(option: str, texts: Sequence[str]) -> dict[str, Any]:
    """Return keyword arguments written as name=value, where a value is a Python literal, or else text.

    Args:
        option: what they are given with, for messages.
        texts: the arguments.

    Raises:
        ArgumentError: one is written otherwise, or a name comes twice.

    Example:
        >>> keyword_arguments("--env-kwargs", ["k=8", "mode=human"])
        {'k': 8, 'mode': 'human'}
    """
    arguments: dict[str, Any] = {}
    for text in texts:
        name, found, value = text.partition("=")
        if not found or not name.isidentifier():
            raise ArgumentError(f"{option} takes name=value, such as k=8, got {text!r}.")
        if name in arguments:
            raise ArgumentError(f"{option} got {name} twice.")
        arguments[name] = _literal(value)
    return arguments


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # the last two: deeply nested
        return text

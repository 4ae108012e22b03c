"""Everything that decides a PPO run: one frozen dataclass, which is also the command line."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from recurl.errors import ArgumentError

_POSITIVE = (
    "hidden_size",
    "num_layers",
    "num_envs",
    "rollout_steps",
    "total_steps",
    "epochs",
    "minibatches",
    "sequence_length",
    "learning_rate",
    "clip_epsilon",
    "max_grad_norm",
    "checkpoint_every",
    "threads",
    "eval_episodes",
)
_NOT_NEGATIVE = ("seed", "entropy_coeff", "critic_coeff")
_FRACTIONS = ("gamma", "gae_lambda")
_CELLS = ("lstm", "gru", "none")


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Options of a recurrent PPO run.

    Raises:
        ArgumentError: a size that is not positive, a fraction outside [0, 1], minibatches or environment
            arguments that don't fit.

    Example:
        >>> config = PPOConfig(env="recurl/RepeatPrevious-v0", env_kwargs=("k=8",), cell="gru")
        >>> config.env_arguments
        {'k': 8}
        >>> PPOConfig.from_dict(config.to_dict()) == config
        True
    """

    env: str
    """Gymnasium id of the environment, such as recurl/MaskedCartPole-v1."""
    env_kwargs: tuple[str, ...] = ()
    """Arguments of the environment as name=value, such as k=8 (a Python literal, otherwise text)."""

    cell: Literal["lstm", "gru", "none"] = "lstm"
    """The memory: lstm, gru, or none for a feed-forward control with as many weights as the LSTM."""
    hidden_size: int = 64
    """Width of the encoder and of the hidden state."""
    num_layers: int = 1
    """Stacked recurrent layers."""
    backend: str = "fastest"
    """Which implementation runs the recurrence (fastest takes the best one of this machine)."""
    shared_trunk: bool = True
    """Actor and critic share encoder and memory; otherwise each has its own."""
    normalize_observations: bool = True
    """Standardise observations with running statistics, which are saved with the policy."""
    scale_rewards: bool = True
    """Divide rewards by the running standard deviation of the discounted return."""

    total_steps: int = 150_000
    """Most environment steps to train for, summed over the environments."""
    num_envs: int = 8
    """Environments stepped side by side."""
    rollout_steps: int = 128
    """Steps of each environment between two updates."""
    epochs: int = 4
    """Passes over a batch per update."""
    minibatches: int = 4
    """Gradient steps per pass."""
    sequence_length: int = 32
    """Cut rows into sequences of this length for the update; a sequence starts from the state stored there."""

    learning_rate: float = 1e-3
    """Step size of Adam at the start."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus at the start."""
    anneal: bool = True
    """Let step size and entropy bonus fall linearly to zero over the run."""
    gamma: float = 0.99
    """Discount per step."""
    gae_lambda: float = 0.95
    """Decay of generalised advantage estimation."""
    clip_epsilon: float = 0.2
    """How far the probability ratio may leave 1 before its gradient is cut."""
    critic_coeff: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Largest norm of the gradient."""

    seed: int = 0
    """Seed of everything random; the same seed gives the same run."""
    device: str = "cpu"
    """Where the networks live, such as cpu or cuda."""
    threads: int = 1
    """CPU threads of torch (at this size more of them only cost)."""
    checkpoint_every: int = 20
    """Updates between two checkpoints."""
    stop_return: float | None = None
    """End the run once the mean return of the last 20 episodes reaches this."""
    eval_episodes: int = 100
    """Greedy episodes played at the end."""

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise ArgumentError(f"{_flag(name)} must be positive, got {getattr(self, name)}.")
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise ArgumentError(f"{_flag(name)} must not be negative, got {getattr(self, name)}.")
        for name in _FRACTIONS:
            if not 0 <= getattr(self, name) <= 1:
                raise ArgumentError(f"{_flag(name)} must lie between 0 and 1, got {getattr(self, name)}.")
        if self.cell not in _CELLS:
            raise ArgumentError(f"--cell must be one of {', '.join(_CELLS)}, got {self.cell!r}.")
        _check_sequences(self)
        _ = self.env_arguments

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
        return dict(_argument(text) for text in self.env_kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return the options as plain values, ready for JSON."""
        return {**asdict(self), "env_kwargs": list(self.env_kwargs)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PPOConfig:
        """Build the options from what :meth:`to_dict` returned.

        Raises:
            ArgumentError: an option is unknown, missing, or has a value that can't be used.
        """
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise ArgumentError(f"Unknown options {unknown}: this run was written by another version of recurl.")
        try:
            options: dict[str, Any] = {**values, "env_kwargs": tuple(values.get("env_kwargs", ()))}
            return cls(**options)
        except TypeError as error:
            raise ArgumentError(f"The options can't be read: {error}.") from error


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _argument(text: str) -> tuple[str, Any]:
    name, found, value = text.partition("=")
    if not found or not name.isidentifier():
        raise ArgumentError(f"--env-kwargs takes name=value, such as k=8, got {text!r}.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _check_sequences(config: PPOConfig) -> None:
    pieces = -(-config.rollout_steps // config.sequence_length)
    if config.minibatches > config.num_envs * pieces:
        raise ArgumentError(
            f"--minibatches must not exceed the {config.num_envs * pieces} sequences of a batch "
            f"({config.num_envs} environments x {pieces}), got {config.minibatches}: lower it, raise --num-envs "
            "or lower --sequence-length."
        )
    if config.total_steps < config.frames_per_batch:
        raise ArgumentError(
            f"--total-steps must cover one batch of {config.frames_per_batch} steps ({config.num_envs} environments x "
            f"{config.rollout_steps}), got {config.total_steps}: raise it, or lower --rollout-steps."
        )

"""Options of PPO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from recurl.envs import EnvBase
from recurl.errors import ArgumentError
from recurl.ranges import Count, Fraction, Inside, NotNegative
from recurl.trainers.config import NO_CELL, RunConfig, Schedule
from recurl.trainers.env_name import source_of

_CAPTURABLE = ("fastest", "triton")


@dataclass(frozen=True, kw_only=True)
class PPOConfig(RunConfig):
    """Options of PPO: proximal policy optimisation with a recurrent actor and critic.

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
    fixed: ClassVar[tuple[str, ...]] = (*RunConfig.fixed, "overlap")

    learning_rate_schedule: Schedule = "linear"
    """How it falls to zero over --total-steps."""
    shared_trunk: bool = True
    """Share encoder and memory between actor and critic; otherwise each has its own."""
    scale_rewards: bool = True
    """Divide rewards by the running standard deviation of the discounted return."""
    epochs: Count = 4
    """Passes over a batch per update."""
    minibatches: Count = 4
    """Gradient steps per pass."""
    sequence_length: Count = 32
    """Length of the sequences that rows are cut into for the update; each starts from the state stored there."""
    entropy_coeff: NotNegative = 0.0
    """Weight of the entropy bonus at the start."""
    entropy_coeff_schedule: Schedule = "linear"
    """How it falls to zero over --total-steps."""
    gae_lambda: Fraction = 0.95
    """Decay of generalised advantage estimation."""
    clip_epsilon: Inside = 0.2
    """Distance of the probability ratio from 1 beyond which its gradient is cut, at the start."""
    clip_epsilon_schedule: Schedule = "constant"
    """How it falls to zero over --total-steps."""
    critic_coeff: NotNegative = 0.5
    """Weight of the value loss."""
    cuda_graph: bool = False
    """Run each gradient step as one CUDA graph, and with --vectorization device the steps of a batch as another (needs
    --device cuda, and minibatches of equal size)."""
    overlap: bool = False
    """Collect in a second process while this one learns: faster on two cores; batches are one update old."""

    @property
    def gradient_steps_per_batch(self) -> int:
        """Into how many gradient steps a batch is divided."""
        return self.minibatches

    def check(self) -> None:
        """Refuse more minibatches than sequences, and a CUDA graph or overlap where it can't work."""
        pieces = -(-self.rollout_steps // self.sequence_length)
        if self.minibatches > self.num_envs * pieces:
            raise ArgumentError(
                f"--minibatches must not exceed the {self.num_envs * pieces} sequences of a batch "
                f"({self.num_envs} environments x {pieces}), got {self.minibatches}: lower it, raise --num-envs "
                "or lower --sequence-length."
            )
        if self.cuda_graph:
            self._check_cuda_graph(self.num_envs * pieces)
        if self.overlap and isinstance(source_of(self.env), EnvBase):
            raise ArgumentError("--overlap makes the environment in a second process: give a function, env=lambda: ...")
        if self.overlap and self.device != "cpu":
            raise ArgumentError(
                f"--overlap needs --device cpu, as the second process collects there, got {self.device}."
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build the options from what :meth:`to_dict` returned; ``anneal``, of version 0.1, becomes schedules."""
        values = dict(values)
        if "anneal" in values:
            schedule = "linear" if values.pop("anneal") else "constant"
            values = {"learning_rate_schedule": schedule, "entropy_coeff_schedule": schedule, **values}
        return super().from_dict(values)

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

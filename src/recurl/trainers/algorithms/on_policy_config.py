"""Options of the on-policy algorithms: PPO, A2C, IMPALA."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from recurl.core.errors import ArgumentError
from recurl.core.ranges import NonNegative, Positive
from recurl.trainers.algorithms.programs_config import ExecutionConfig
from recurl.trainers.config import Schedule
from recurl.trainers.env_name import is_environment, source_of


@dataclass(frozen=True, kw_only=True)
class OnPolicyConfig(ExecutionConfig):
    """Options of an actor-critic that learns from each batch and then discards it.

    Raises:
        ArgumentError: see :class:`ExecutionConfig`; or if ``store_states="starts"`` is not possible.
    """

    learning_rate_schedule: Schedule = "linear"
    """Decay of the learning rate to zero over --total-steps."""
    shared_trunk: bool = True
    """Share the encoder and recurrent layers between actor and critic; otherwise each has its own."""
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
    store_states: Literal["auto", "all", "starts"] = "auto"
    """Recurrent states stored in a batch: those of all steps, or only those at the starts of training sequences, which
    saves memory. auto uses starts on a GPU if rows divide into whole sequences."""

    @property
    def gradient_steps_per_batch(self) -> int:
        """Number of gradient steps that share one pass over a batch."""
        return 1

    @property
    def sequence_steps(self) -> int:
        """Length of the training sequences: whole rows."""
        return self.rollout_steps

    @property
    def states_every(self) -> int | None:
        """Interval, in steps, at which a batch stores recurrent states; None to store them at every step."""
        only_starts = self.store_states == "starts"
        if self.store_states == "auto":
            only_starts = self.device != "cpu" and self._starts_obstacle is None
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
        if self.overlap and self.device != "cpu" and (self.cuda_graph or not self.env_workers):
            raise ArgumentError(
                "--overlap on a GPU collects in a second thread: it needs --env-workers, so that the environments "
                "don't run in the learner's process, and can't be used with --cuda-graph, got "
                f"{self.env_workers} workers"
                f"{' and --cuda-graph' if self.cuda_graph else ''}."
            )

    def on_cpu(self) -> Self:
        """Return these options for a single process on the CPU."""
        return replace(super().on_cpu(), overlap=False)

"""Options of the algorithms that learn from each batch and forget it: PPO, A2C, IMPALA."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from recurl.errors import ArgumentError
from recurl.ranges import NotNegative, Positive
from recurl.trainers.algorithms.programs_config import ProgramsConfig
from recurl.trainers.config import Schedule
from recurl.trainers.env_name import is_environment, source_of


@dataclass(frozen=True, kw_only=True)
class OnPolicyConfig(ProgramsConfig):
    """Options of an actor and a critic that learn from each batch once it is collected.

    Raises:
        ArgumentError: see :class:`ProgramsConfig`; or states that can't be left out.
    """

    learning_rate_schedule: Schedule = "linear"
    """How it falls to zero over --total-steps."""
    shared_trunk: bool = True
    """Share encoder and memory between actor and critic; otherwise each has its own."""
    scale_rewards: bool = True
    """Divide rewards by the running standard deviation of the discounted return."""
    entropy_coeff: NotNegative = 0.0
    """Weight of the entropy bonus at the start."""
    entropy_coeff_schedule: Schedule = "linear"
    """How it falls to zero over --total-steps."""
    critic_coeff: NotNegative = 0.5
    """Weight of the value loss."""
    adam_eps: Positive = 1e-5
    """Term of Adam that keeps its steps finite."""
    store_states: Literal["auto", "all", "starts"] = "auto"
    """Recurrent states that a batch holds: those of all steps, or those at the starts of the sequences that are learnt
    from, to save memory; auto takes starts on a GPU where rows are whole sequences."""

    @property
    def gradient_steps_per_batch(self) -> int:
        """Into how many gradient steps a batch is divided."""
        return 1

    @property
    def learnt_length(self) -> int:
        """Steps of the sequences that are learnt from: whole rows."""
        return self.rollout_steps

    @property
    def states_every(self) -> int | None:
        """Distance of the steps whose recurrent states a batch stores; None for those of all steps."""
        chosen = self.store_states == "starts"
        if self.store_states == "auto":
            chosen = self.device != "cpu" and self._why_all_states is None
        return self.learnt_length if chosen else None

    @property
    def _why_all_states(self) -> str | None:
        """The reason why a batch must store the states of all steps, or None."""
        if self.rollout_steps % self.learnt_length:
            return (
                f"rows that are whole sequences: --sequence-length must divide --rollout-steps, got "
                f"{self.learnt_length} for {self.rollout_steps}"
            )
        if self.actors:
            return "one process that collects, got --collectors"
        if getattr(self, "overlap", False) and self.device == "cpu":
            return "one process that collects, got --overlap on the CPU"
        return None

    def check(self) -> None:
        """Refuse states, a CUDA graph, and compiled programs, where there can be none."""
        super().check()
        if self.store_states == "starts" and self._why_all_states is not None:
            raise ArgumentError(f"--store-states starts needs {self._why_all_states}.")


@dataclass(frozen=True, kw_only=True)
class OverlappedConfig(OnPolicyConfig):
    """Options of an algorithm that corrects for batches of older weights, so that they may be collected meanwhile.

    Raises:
        ArgumentError: see :class:`OnPolicyConfig`; or overlap where it can't work.
    """

    fixed: ClassVar[tuple[str, ...]] = (*OnPolicyConfig.fixed, "overlap")

    overlap: bool = False
    """Collect in a second process while this one learns (on a GPU: in a second thread, needs --env-workers): faster on
    two cores; batches are one update old."""

    def check(self) -> None:
        """Refuse a CUDA graph and overlap where they can't work."""
        super().check()
        if self.overlap and is_environment(source_of(self.env)):
            raise ArgumentError("--overlap makes the environment in a second process: give a function, env=lambda: ...")
        if self.overlap and self.device != "cpu" and (self.cuda_graph or not self.env_workers):
            raise ArgumentError(
                "--overlap on a GPU collects in a second thread: it needs --env-workers, which leave Python to the "
                f"learner, and no --cuda-graph, got {self.env_workers} workers"
                f"{' and --cuda-graph' if self.cuda_graph else ''}."
            )

    def on_cpu(self) -> Self:
        """Return the options of the same run on the CPU, in one process."""
        return replace(super().on_cpu(), overlap=False)

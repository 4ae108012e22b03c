"""Options of the algorithms that learn from each batch and forget it: PPO, A2C, IMPALA."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from recurl.envs import EnvBase
from recurl.errors import ArgumentError
from recurl.ranges import NotNegative
from recurl.recurrence import CELLS, load_cell
from recurl.trainers.config import NO_CELL, RunConfig, Schedule
from recurl.trainers.env_name import source_of

_CAPTURABLE = ("fastest", "triton")
_COMPILABLE = ("fastest", "cpu", "triton")


@dataclass(frozen=True, kw_only=True)
class OnPolicyConfig(RunConfig):
    """Options of an actor and a critic that learn from each batch once it is collected.

    Raises:
        ArgumentError: see :class:`RunConfig`; or a CUDA graph where there can't be one.
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
    cuda_graph: bool = False
    """Run each update as one CUDA graph, and the policy of a step as another, with --vectorization device all steps of
    a batch (needs --device cuda, and minibatches of equal size)."""
    compile: bool = False
    """Compile losses and gradients as one program, and with --vectorization device a step of policy and environment as
    another: fewer, larger kernels, after some seconds at the start; a C++ compiler is needed on the CPU."""

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
        if self.store_states == "starts" and self._why_all_states is not None:
            raise ArgumentError(f"--store-states starts needs {self._why_all_states}.")
        if self.compile and not self.is_compilable:
            raise ArgumentError(
                f"--compile needs a cell of the library and --backend {' or '.join(_COMPILABLE)}, as others read the "
                f"lengths of episodes back, got {self.cell} and {self.backend}."
            )
        if not self.cuda_graph:
            return
        if not self.device.startswith("cuda"):
            raise ArgumentError(f"--cuda-graph needs --device cuda, got {self.device}.")
        if self.cell != NO_CELL and self.backend not in _CAPTURABLE:
            raise ArgumentError(
                f"--cuda-graph needs --backend {' or '.join(_CAPTURABLE)}, which never wait for the GPU, got "
                f"{self.backend}."
            )

    @property
    def is_compilable(self) -> bool:
        """Whether ``compile`` is possible with the cell and its backend."""
        known = map(type, CELLS.values())
        return self.cell == NO_CELL or (self.backend in _COMPILABLE and type(load_cell(self.cell)) in known)

    def on_cpu(self) -> Self:
        """Return the options of the same run on the CPU, with the backend that is best there."""
        return replace(self, device="cpu", backend="fastest", cuda_graph=False, compile=False)


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
        if self.overlap and isinstance(source_of(self.env), EnvBase):
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

"""Options of the algorithms whose updates can be compiled or captured as CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from recurl.core.errors import ArgumentError
from recurl.trainers.config import NO_CELL, RunConfig

_CAPTURABLE = ("fastest", "triton")
_COMPILABLE = ("fastest", "cpu", "triton")


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig(RunConfig):
    """Options for compiled updates and CUDA graphs.

    Raises:
        ArgumentError: see :class:`RunConfig`; or if ``cuda_graph`` or ``compile`` is not possible.
    """

    cuda_graph: bool = False
    """Capture each update as one CUDA graph, and the policy as another (with --vectorization device, the whole
    rollout). Needs --device cuda, and minibatches of equal size."""
    compile: bool = False
    """Compile losses and gradients into fewer, larger kernels with Inductor; with --vectorization device, also the step
    of policy and environment. Takes some seconds at the start; needs a C++ compiler on the CPU."""

    def check(self) -> None:
        """Check that the options are consistent."""
        super().check()
        if self.compile and not self.is_compilable:
            raise ArgumentError(
                f"--compile needs a built-in cell and --backend {' or '.join(_COMPILABLE)}, as other backends read "
                f"episode lengths on the host, got {self.cell} and {self.backend}."
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
        """Whether the cell and the backend support ``compile``."""
        from recurl.recurrence import CELLS, load_cell  # noqa: PLC0415 - imports torch, which --help doesn't need

        known = map(type, CELLS.values())
        return self.cell == NO_CELL or (self.backend in _COMPILABLE and type(load_cell(self.cell)) in known)

    def on_cpu(self) -> Self:
        """Return these options for the CPU, with the fastest backend there."""
        return replace(self, device="cpu", backend="fastest", cuda_graph=False, compile=False)

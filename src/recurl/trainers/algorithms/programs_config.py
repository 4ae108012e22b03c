"""Options of the algorithms whose updates can be compiled, and captured as CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from recurl.errors import ArgumentError
from recurl.trainers.config import NO_CELL, RunConfig

_CAPTURABLE = ("fastest", "triton")
_COMPILABLE = ("fastest", "cpu", "triton")


@dataclass(frozen=True, kw_only=True)
class ProgramsConfig(RunConfig):
    """Options of updates that run as programs.

    Raises:
        ArgumentError: see :class:`RunConfig`; or a CUDA graph, or compiled programs, where there can be none.
    """

    cuda_graph: bool = False
    """Run each update as one CUDA graph, and the policy of a step as another, with --vectorization device all steps of
    a batch (needs --device cuda; minibatches, where there are some, of equal size)."""
    compile: bool = False
    """Compile losses and gradients as one program, and with --vectorization device a step of policy and environment as
    another: fewer, larger kernels, after some seconds at the start; a C++ compiler is needed on the CPU."""

    def check(self) -> None:
        """Refuse a CUDA graph, and compiled programs, where there can be none."""
        super().check()
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
        from recurl.recurrence import CELLS, load_cell  # noqa: PLC0415 - it imports torch, which help doesn't need

        known = map(type, CELLS.values())
        return self.cell == NO_CELL or (self.backend in _COMPILABLE and type(load_cell(self.cell)) in known)

    def on_cpu(self) -> Self:
        """Return the options of the same run on the CPU, with the backend that is best there."""
        return replace(self, device="cpu", backend="fastest", cuda_graph=False, compile=False)

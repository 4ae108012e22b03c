"""Linear recurrences on an NVIDIA GPU, in one pass over memory.

Pieces of 16 tokens are computed in the dtype of their numbers, bfloat16 in float32. From piece to piece the state is
carried in float64 (in float32 for bfloat16).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recurl.recurrence.backend import OperatorSupport
from recurl.recurrence.cuda.backend import missing_package, refused_device
from recurl.recurrence.cuda.linear.config import Chunk, chunk_for
from recurl.recurrence.linear.kernels import Gradients, LinearInputs, LinearKernels, Needs


class TritonLinear(LinearKernels):
    """Forward and backward pass of linear recurrences as one kernel each.

    Attributes:
        chunk_for: rule for the chunks of a stream: :func:`~recurl.recurrence.cuda.linear.config.chunk_for`.
    """

    name = "triton"

    def __init__(self, chunk_for: Callable[[str, int, torch.dtype], Chunk] = chunk_for) -> None:
        self.chunk_for = chunk_for

    def missing(self) -> str | None:
        """Return how to install Triton, which comes with torch's CUDA builds, if it is missing, else None."""
        return missing_package()

    def unsupported(self, support: OperatorSupport) -> str | None:
        """Return why a device isn't supported, or None; it must be an NVIDIA GPU of compute capability 8.0 or newer."""
        return refused_device(support.device)

    def forward(self, inputs: LinearInputs) -> Tensor:
        """Return the states; see :meth:`recurl.recurrence.linear.kernels.LinearKernels.forward`."""
        return _launch().run_forward(inputs, self._chunk("forward", inputs))

    def backward(self, inputs: LinearInputs, h: Tensor, grad: Tensor, needs: Needs) -> Gradients:
        """Return the gradients; see :meth:`recurl.recurrence.linear.kernels.LinearKernels.backward`."""
        return _launch().run_backward(inputs, h, grad, needs, self._chunk("backward", inputs))

    def _chunk(self, direction: str, inputs: LinearInputs) -> Chunk:
        return self.chunk_for(direction, inputs.states.shape[1], inputs.states.dtype)


def _launch() -> Any:
    # By name: a static import would make users without a GPU load Triton.
    return importlib.import_module("recurl.recurrence.cuda.linear.launch")

"""Windowed attention on an NVIDIA GPU, in kernels whose grids depend on the number of tokens alone."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from recurl.recurrence.attention.chunked import ChunkedAttention
from recurl.recurrence.attention.kernels import AttentionInputs, AttentionKernels, Gradients, Needs
from recurl.recurrence.backend import OperatorSupport
from recurl.recurrence.cells import States
from recurl.recurrence.cells.attention import Attention
from recurl.recurrence.cuda.attention.config import Tiles, tiles_for
from recurl.recurrence.cuda.backend import missing_package, refused_device

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDEST_HEAD, _WIDEST = 128, 513  # what a multiprocessor's memory holds, in float32


class TritonAttention(AttentionKernels):
    """Forward and backward pass of windowed attention.

    Attributes:
        tiles: sizes of the tiles, of all passes; None for those of :func:`~recurl.recurrence.cuda.attention.config`.
    """

    tiles: Tiles | None = None

    def missing(self) -> str | None:
        """Return how to install Triton, which comes with torch's CUDA builds, if it is missing, else None."""
        return missing_package()

    def unsupported(self, support: OperatorSupport) -> str | None:
        """Return why a call isn't supported, or None: it needs an NVIDIA GPU, and heads and inputs that fit on it."""
        refusal = refused_device(support.device)
        if refusal is not None:
            return refusal
        if support.dtype not in _DTYPES:
            return f"it computes in float32, bfloat16 and float16, got {support.dtype}; use 'loop'"
        if support.keys > _WIDEST_HEAD:
            return f"it holds heads of at most {_WIDEST_HEAD} numbers, got {support.keys}; use 'loop' or more heads"
        if support.values > _WIDEST:
            return f"it holds stored inputs of at most {_WIDEST} numbers, got {support.values}; use 'loop'"
        return None

    def forward(self, inputs: AttentionInputs, keep: bool) -> tuple[States, States]:
        """Return the result; saves the logarithms of the sums of the exponentials."""
        result, total = _launch().run_forward(inputs, self._tiles("forward", inputs))
        return (result,), (total,) if keep else ()

    def backward(self, inputs: AttentionInputs, after: States, saved: States, grads: States, needs: Needs) -> Gradients:
        """Return the gradients; that of the windows, as large as they are, by operations of torch."""
        tiles = self._tiles("backward", inputs)
        total = saved[0] if saved else _launch().run_forward(inputs, self._tiles("forward", inputs))[1]
        found = list(_launch().run_backward(inputs, after[0], total, grads[0], needs, tiles))
        if needs[4]:
            only = tuple(k == 4 for k in range(len(needs)))
            found[4] = ChunkedAttention("chunked").backward(inputs, after, (), grads, only)[4]
        return tuple(found)

    def step(self, attention: Attention, inputs: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result of one step of every row and the inputs to keep, from one kernel, without gradients."""
        return _launch().run_step(attention, inputs, before, "ieee")

    def saved_like(self, inputs: AttentionInputs) -> States:
        """Return a tensor like the saved one."""
        return (inputs.query.new_empty(inputs.query.shape[:2], dtype=torch.float32),)

    def _tiles(self, direction: str, inputs: AttentionInputs) -> Tiles:
        sizes = inputs.query.shape[-1], inputs.windows.shape[-1]
        return self.tiles or tiles_for(direction, *sizes, inputs.query.dtype, inputs.precision)


def _launch() -> Any:
    # By name: a static import would make users without a GPU load Triton.
    return importlib.import_module("recurl.recurrence.cuda.attention.launch")

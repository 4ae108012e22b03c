"""Kernel protocol of linear recurrences."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from recurl.sequences.boundaries import Boundaries

ACCUMULATED = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float64,
    torch.float64: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex128: torch.complex128,
}
"""Supported dtypes, with the dtype in which the state is carried from token to token.

A float32 product of many factors near one loses a digit every few hundred factors; the wider carried state loses one in
10,000 steps.
"""


class LinearInputs(NamedTuple):
    """Inputs of a recurrence over a flat stream of N tokens with D channels.

    Attributes:
        a: coefficients ``[N, D]``, or ``[D]`` if they are the same at every token.
        b: ``[N, D]``.
        states: stored states ``[N, D]``, read only at the first token of each segment.
        boundaries: the segments.
    """

    a: Tensor
    b: Tensor
    states: Tensor
    boundaries: Boundaries


class LinearKernels(Protocol):
    """Kernels for ``h[n] = a[n] * h[n - 1] + b[n]``, or ``a[n] * states[n] + b[n]`` where a segment starts.

    Both passes are pure functions without autograd, for N > 0 tokens and D > 0 channels.
    """

    @property
    def name(self) -> str:
        """Name for ``recurrent_backend``."""
        ...

    def missing(self) -> str | None:
        """Return what must be installed before these kernels can run, or None."""
        ...

    def unsupported(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why these kernels can't serve tensors of ``dtype`` on ``device``, or None."""
        ...

    def forward(self, inputs: LinearInputs) -> Tensor:
        """Return h, ``[N, D]``."""
        ...

    def backward(
        self, inputs: LinearInputs, h: Tensor, grad: Tensor, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of a, b and states, None where ``needs`` is false; ``inputs.b`` is not read.

        Args:
            inputs: inputs of :meth:`forward`.
            h: result of :meth:`forward`.
            grad: gradient of ``h``, possibly expanded.
            needs: which gradients to compute. The gradient of the states is zero except at the first token of each
                segment.
        """
        ...

"""What computes a linear recurrence, and the one place that decides who does."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from recurl._torch import is_exporting
from recurl.errors import ArgumentError, UnsupportedError
from recurl.recurrence.boundaries import Boundaries

ACCUMULATED = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float64,
    torch.float64: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex128: torch.complex128,
}
"""The dtypes that are served, and that in which the state is carried from token to token.

A product of many factors near one loses a digit in float32 every few hundred factors; the state that is carried loses
one in 10,000 steps.
"""


class Inputs(NamedTuple):
    """A flat stream of N tokens with D channels.

    Attributes:
        a: coefficients ``[N, D]``, or ``[D]`` where they are the same at every token.
        b: ``[N, D]``.
        states: stored states ``[N, D]``, read at the first token of each segment only.
        boundaries: the segments.
    """

    a: Tensor
    b: Tensor
    states: Tensor
    boundaries: Boundaries


class LinearKernels(Protocol):
    """A way to compute ``h[n] = a[n] * h[n - 1] + b[n]``; where a segment starts, ``a[n] * states[n] + b[n]``.

    Both passes are pure functions, without autograd, of N > 0 tokens of D > 0 channels.
    """

    @property
    def name(self) -> str:
        """What users call it."""
        ...

    def missing(self) -> str | None:
        """Return what must be installed before it can run at all, or None."""
        ...

    def unsupported(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why it can't serve tensors on ``device`` of ``dtype``, or None."""
        ...

    def forward(self, inputs: Inputs) -> Tensor:
        """Return h, ``[N, D]``."""
        ...

    def backward(
        self, inputs: Inputs, h: Tensor, grad: Tensor, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of a, b and states, None where ``needs`` is false; ``inputs.b`` is not read.

        Args:
            inputs: what :meth:`forward` got.
            h: what it returned.
            grad: gradient of ``h``, possibly expanded.
            needs: which gradients are wanted. That of the states is zero but at the first token of each segment.
        """
        ...


class LinearRegistry:
    """Kernels by name, and the rules for ``"auto"`` and ``"fastest"``."""

    def __init__(self, kernels: tuple[LinearKernels, ...], fast: tuple[str, ...]) -> None:
        self._kernels = {one.name: one for one in kernels}
        self._fast = fast

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that :meth:`choose` accepts."""
        return ("auto", "fastest", *self._kernels)

    def named(self, name: str) -> LinearKernels:
        """Return the kernels of a name, whether or not they can run."""
        return self._kernels[name]

    def choose(self, name: str, device: torch.device, dtype: torch.dtype) -> LinearKernels:
        """Return the kernels that serve ``name``; there is no silent fallback from those asked for by name.

        Raises:
            ArgumentError: no such name.
            UnsupportedError: they can't serve; the message says why and what can.
        """
        if name not in self.names:
            raise ArgumentError(
                f"The backend of a linear recurrence must be one of {', '.join(self.names)}; got {name!r}."
            )
        if name == "auto":
            name = "scan" if torch.compiler.is_compiling() and not is_exporting() else "loop"
        elif name == "fastest":
            name = next((one for one in self._fast if self._refusal(one, device, dtype) is None), "loop")
        reason = self._refusal(name, device, dtype)
        if reason is not None:
            raise UnsupportedError(f"The backend {name!r} can't run this linear recurrence: {reason}.")
        return self._kernels[name]

    def _refusal(self, name: str, device: torch.device, dtype: torch.dtype) -> str | None:
        kernels = self._kernels[name]
        return kernels.missing() or kernels.unsupported(device, dtype)

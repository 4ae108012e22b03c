"""Kernel protocol, registry, and kernel selection for linear recurrences."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.core.torch_compat import is_compiling, is_exporting
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


class LinearRegistry:
    """Registry of kernels by name, with the rules for ``"auto"`` and ``"fastest"``."""

    def __init__(self, kernels: tuple[LinearKernels, ...], fast: tuple[str, ...]) -> None:
        self._kernels = {one.name: one for one in kernels}
        self._fast = fast

    @property
    def names(self) -> tuple[str, ...]:
        """All names accepted by :meth:`choose`."""
        return ("auto", "fastest", *self._kernels)

    def named(self, name: str) -> LinearKernels:
        """Return the kernels called ``name``, whether or not they can run."""
        return self._kernels[name]

    def choose(self, name: str, device: torch.device, dtype: torch.dtype) -> LinearKernels:
        """Select the kernels for ``name``. Kernels requested by name never fall back to others.

        Raises:
            ArgumentError: there is no such name.
            UnsupportedError: the kernels can't serve the call; the message states the reason.
        """
        if name not in self.names:
            raise ArgumentError(
                f"The backend of a linear recurrence must be one of {', '.join(self.names)}; got {name!r}."
            )
        if name == "auto":
            name = "scan" if is_compiling() and not is_exporting() else "loop"
        elif name == "fastest":
            name = next((one for one in self._fast if self._refusal(one, device, dtype) is None), "loop")
        reason = self._refusal(name, device, dtype)
        if reason is not None:
            raise UnsupportedError(f"The backend {name!r} can't run this linear recurrence: {reason}.")
        return self._kernels[name]

    def _refusal(self, name: str, device: torch.device, dtype: torch.dtype) -> str | None:
        kernels = self._kernels[name]
        return kernels.missing() or kernels.unsupported(device, dtype)

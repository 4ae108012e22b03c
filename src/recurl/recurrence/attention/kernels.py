"""Kernel protocol of windowed attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from recurl.recurrence.cells import States
from recurl.recurrence.operators import OperatorKernels
from recurl.sequences.index import Boundaries

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Supported dtypes. Scores and sums are at least float32."""


class AttentionInputs(NamedTuple):
    """Inputs of windowed attention over a flat stream of N tokens.

    Attributes:
        query: ``[N, heads, D]``, scaled.
        key: keys of the tokens, ``[N, heads, D]``.
        value: their values, ``[N, heads, D]``.
        position: scores of the distances 0 (the own token) to M, ``[N, heads, M + 1]``.
        windows: stored inputs ``[N / S, M, E]`` of every S-th token, where S divides the length of rows, oldest first,
            read only at the first token of each segment; there are none for segments that start at other tokens. The
            last number of an input is 1, or 0 where there is none. E is 0 without stored windows.
        to_key: map from stored inputs to their keys, ``[heads, D, E]``; None without stored windows.
        to_value: map from stored inputs to their values, ``[heads, D, E]``; None without stored windows.
        boundaries: the segments.
        precision: precision of products in float32: ``"ieee"``, ``"tf32"`` or ``"tf32x3"``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    position: Tensor
    windows: Tensor
    to_key: Tensor | None
    to_value: Tensor | None
    boundaries: Boundaries
    precision: str = "ieee"

    @property
    def past(self) -> int:
        """M."""
        return self.position.shape[-1] - 1

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The differentiable inputs."""
        return self[:7]

    def with_tensors(self, values: Sequence[Any]) -> AttentionInputs:
        """Return these inputs with others in place of :attr:`tensors`."""
        query, key, value, position, windows, to_key, to_value = values
        return AttentionInputs(query, key, value, position, windows, to_key, to_value, self.boundaries, self.precision)


Needs = tuple[bool, ...]
"""Which of :attr:`AttentionInputs.tensors` need gradients."""
Gradients = tuple[Tensor | None, ...]


class AttentionKernels(OperatorKernels, Protocol):
    """Kernels of windowed attention, as pure functions without autograd, for N > 0 tokens.

    Numbers of a token that aren't finite reach, in the forward pass, the results of tokens that attend to it; in the
    backward pass, the gradients of those tokens and of all that they attend to. So do incoming gradients.

    Args:
        name: name for ``recurrent_backend``.
    """

    name: str

    def __init__(self, name: str) -> None:
        self.name = name

    def forward(self, inputs: AttentionInputs, keep: bool) -> tuple[States, States]:
        """Return ``(result,)``, ``[N, heads, D]``, and what :meth:`backward` needs; ``()`` where ``keep`` is false."""
        ...

    def backward(self, inputs: AttentionInputs, after: States, saved: States, grads: States, needs: Needs) -> Gradients:
        """Return the gradients of :attr:`AttentionInputs.tensors`, None where ``needs`` is false.

        Args:
            inputs: inputs of :meth:`forward`.
            after: its result.
            saved: what it saved; ``()`` if nothing.
            grads: gradient of the result, possibly expanded.
            needs: which gradients to compute. The gradient of the windows is zero except at the first token of each
                segment.
        """
        ...

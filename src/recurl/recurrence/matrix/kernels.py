"""Kernel protocol of gated matrix recurrences."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from recurl.recurrence.cells import States
from recurl.recurrence.operators import OperatorKernels
from recurl.sequences.index import Boundaries

COMPUTED = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}
"""Supported dtypes of queries, keys and values, with the dtype of states, decays and rates."""


class MatrixInputs(NamedTuple):
    """Inputs of a recurrence over a flat stream of N tokens.

    Attributes:
        query: ``[N, heads, K]``.
        key: ``[N, heads, K]``.
        value: ``[N, heads, V]``.
        log_decay: logarithms of a, ``[N, heads]``.
        rate: b, ``[N, heads]``.
        states: stored states ``[N / S, heads, K, V]`` of every S-th token, where S divides the length of rows, read
            only at the first token of each segment. Segments that start at other tokens start from zeros; for None, all
            do.
        boundaries: the segments.
        delta: whether what the state holds for a key is taken out before the value is written.
        after: whether the states after the last token of each segment are results.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    rate: Tensor
    states: Tensor | None
    boundaries: Boundaries
    delta: bool
    after: bool = True


class MatrixKernels(OperatorKernels, Protocol):
    """Kernels for ``S = a (I - delta b k k^T) S + b k v^T``, with results ``S^T q``; see :class:`MatrixInputs`."""

    def forward(self, inputs: MatrixInputs, keep: bool) -> tuple[States, States]:
        """Return the results, and what :meth:`backward` needs, or ``()`` where ``keep`` is false.

        Differentiable, unless the kernels have a backward pass. The results are ``[N, heads, V]``, and with
        ``inputs.after`` the states after the last token of each segment, ``[N, heads, K, V]``, zero at all other
        tokens.

        Args:
            inputs: the inputs, of N > 0 tokens.
            keep: whether a backward pass follows.
        """
        ...

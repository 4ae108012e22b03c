"""Kernel protocol of gated matrix recurrences."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

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
        states: stored states ``[N, heads, K, V]``, read only at the first token of each segment; None for zeros.
        boundaries: the segments.
        delta: whether what the state holds for a key is taken out before the value is written.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    rate: Tensor
    states: Tensor | None
    boundaries: Boundaries
    delta: bool


class MatrixKernels(Protocol):
    """Kernels for ``S = a (I - delta b k k^T) S + b k v^T``, with results ``S^T q``; see :class:`MatrixInputs`.

    Attributes:
        name: name for ``recurrent_backend``.
    """

    name: str

    def missing(self) -> str | None:
        """Return what must be installed before these kernels can run, or None."""
        return None

    def unsupported(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why these kernels can't serve tensors of ``dtype`` on ``device``, or None."""
        return None

    def run(self, inputs: MatrixInputs, after: bool) -> tuple[Tensor, Tensor | None]:
        """Return the results ``[N, heads, V]`` and the states after the last token of each segment; differentiable.

        Args:
            inputs: the inputs, of N > 0 tokens.
            after: whether states are wanted: ``[N, heads, K, V]``, zero at all other tokens.
        """
        ...

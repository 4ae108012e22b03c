"""Inputs of the kernels of gated matrix recurrences."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from recurl.sequences.index import Boundaries


class MatrixInputs(NamedTuple):
    """Inputs of a recurrence over a flat stream of N tokens.

    Attributes:
        query: ``[N, heads, K]``, already scaled.
        key: ``[N, heads, K]``.
        value: ``[N, heads, V]``.
        log_decay: ``[N, heads]``, logarithms of a <= 1, in float32 (float64 for float64 inputs).
        rate: b, ``[N, heads]`` in the dtype of ``log_decay``.
        states: stored states ``[N, heads, K, V]`` in the same dtype, read where segments start; None: zeros.
        boundaries: the segments.
        delta: whether a token first removes what the state holds under its key.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    rate: Tensor
    states: Tensor | None
    boundaries: Boundaries
    delta: bool

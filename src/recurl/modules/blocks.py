"""Recurrent modules whose layers are blocks: linear recurrences, matrix memories, windows, exponential gates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypedDict, Unpack

import torch

from recurl import recurrence  # each cell is imported when it is used
from recurl.core.keys import NestedKey
from recurl.modules.cell_module import CellModule


class CellOptions(TypedDict, total=False):
    """Keyword arguments of :class:`CellModule` after the sizes."""

    bias: bool
    batch_first: bool
    dropout: float
    proj_size: int
    bidirectional: bool
    python_based: bool
    recurrent_backend: str
    recurrent_compute_dtype: torch.dtype
    recurrent_recompute: str
    recurrent_matmul_precision: str
    in_key: NestedKey | None
    in_keys: Sequence[NestedKey] | None
    out_key: NestedKey | None
    out_keys: Sequence[NestedKey] | None
    device: torch.device | str | None
    dtype: torch.dtype | None
    default_recurrent_mode: bool | None


class MinGRUModule(CellModule):
    """minGRU blocks, for single environment steps and whole sequences, reset by ``is_init``.

    Each layer is a :class:`recurl.recurrence.MinGRUCell`, including convolution, feed-forward part and residual
    connections. States are h ``[*B, L, S]`` and, with a convolution, its window ``[*B, L, W - 1, H]``.

    Args:
        input_size: I.
        hidden_size: H, the width of the features.
        num_layers: L.
        state_size: S, width of the state; None for H.
        conv_width: W, kernel width of the convolution; 0 for none.
        feed_forward: hidden units of the feed-forward part, as a multiple of H; 0 for none.
        **options: further arguments of :class:`CellModule`.

    Example:
        >>> mingru = MinGRUModule(4, 8, conv_width=4, in_key="observation", out_key="features")
        >>> mingru.in_keys
        ['observation', 'recurrent_state_h', 'recurrent_state_window', 'is_init']
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        state_size: int | None = None,
        conv_width: int = 0,
        feed_forward: int = 4,
        **options: Unpack[CellOptions],
    ) -> None:
        cell = recurrence.MinGRUCell(state_size, conv_width, feed_forward)
        super().__init__(cell, input_size, hidden_size, num_layers, **options)


class MinLSTMModule(CellModule):
    """minLSTM blocks, with all arguments of :class:`MinGRUModule`; see :class:`recurl.recurrence.MinLSTMCell`.

    Args:
        input_size: I.
        hidden_size: H, the width of the features.
        num_layers: L.
        state_size: S, width of the state; None for H.
        conv_width: W, kernel width of the convolution; 0 for none.
        feed_forward: hidden units of the feed-forward part, as a multiple of H; 0 for none.
        **options: further arguments of :class:`CellModule`.

    Example:
        >>> minlstm = MinLSTMModule(4, 8, state_size=16, in_key="observation", out_key="features")
        >>> minlstm.make_tensordict_primer().primers["recurrent_state"].shape
        torch.Size([1, 16])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        state_size: int | None = None,
        conv_width: int = 0,
        feed_forward: int = 4,
        **options: Unpack[CellOptions],
    ) -> None:
        cell = recurrence.MinLSTMCell(state_size, conv_width, feed_forward)
        super().__init__(cell, input_size, hidden_size, num_layers, **options)


class LRUModule(CellModule):
    """Blocks of linear recurrent units; each layer is an :class:`recurl.recurrence.LRUCell`.

    The state holds N complex numbers as pairs, ``[*B, L, N, 2]``.

    Args:
        input_size: I.
        hidden_size: H, the width of the features.
        num_layers: L.
        state_size: N; None for H.
        norm: whether each block has a layer norm.
        min_radius: smallest initial modulus of the recurrence.
        max_radius: largest initial modulus.
        max_phase: largest initial phase.
        **options: further arguments of :class:`CellModule`.

    Example:
        >>> lru = LRUModule(4, 8, min_radius=0.9, in_key="observation", out_key="features")
        >>> lru.make_tensordict_primer().primers["recurrent_state"].shape
        torch.Size([1, 8, 2])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        state_size: int | None = None,
        norm: bool = True,
        min_radius: float = 0.0,
        max_radius: float = 1.0,
        max_phase: float = 2 * math.pi,
        **options: Unpack[CellOptions],
    ) -> None:
        cell = recurrence.LRUCell(state_size, norm, min_radius, max_radius, max_phase)
        super().__init__(cell, input_size, hidden_size, num_layers, **options)


class S5Module(CellModule):
    """S5 blocks; each layer is an :class:`recurl.recurrence.S5Cell`.

    The state holds N / 2 complex numbers as pairs, ``[*B, L, N / 2, 2]``.

    Args:
        input_size: I.
        hidden_size: H, the width of the features.
        num_layers: L.
        state_size: N, even; None for H, rounded up.
        norm: whether each block has a layer norm.
        min_step: smallest initial time step.
        max_step: largest initial time step.
        **options: further arguments of :class:`CellModule`.

    Example:
        >>> s5 = S5Module(4, 8, num_layers=4, in_key="observation", out_key="features")
        >>> s5.make_tensordict_primer().primers["recurrent_state"].shape
        torch.Size([4, 4, 2])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        state_size: int | None = None,
        norm: bool = True,
        min_step: float = 0.001,
        max_step: float = 0.1,
        **options: Unpack[CellOptions],
    ) -> None:
        cell = recurrence.S5Cell(state_size, norm, min_step, max_step)
        super().__init__(cell, input_size, hidden_size, num_layers, **options)


class RGLRUModule(CellModule):
    """Griffin's residual blocks with an RG-LRU; each layer is an :class:`recurl.recurrence.RGLRUCell`.

    States are h ``[*B, L, S]`` and, with a convolution, its window ``[*B, L, W - 1, S]``.

    Args:
        input_size: I.
        hidden_size: H, the width of the features.
        num_layers: L.
        state_size: S, width of the state; None for H.
        heads: number of blocks of the block-diagonal gates.
        conv_width: W, kernel width of the convolution; 0 for none.
        feed_forward: hidden units of the feed-forward part, as a multiple of H; 0 for none.
        **options: further arguments of :class:`CellModule`.

    Example:
        >>> rglru = RGLRUModule(4, 8, heads=2, in_key="observation", out_key="features")
        >>> rglru.make_tensordict_primer().primers["recurrent_state"].shape
        torch.Size([1, 8])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        state_size: int | None = None,
        heads: int = 1,
        conv_width: int = 0,
        feed_forward: int = 3,
        **options: Unpack[CellOptions],
    ) -> None:
        cell = recurrence.RGLRUCell(state_size, heads, conv_width, feed_forward)
        super().__init__(cell, input_size, hidden_size, num_layers, **options)


class FFMModule(CellModule):
    """Fast and forgetful memory (FFM); each layer is an :class:`recurl.recurrence.FFMCell`.

    The state holds m times c complex numbers as pairs, ``[*B, L, m, c, 2]``.

    Args:
        input_size: I.
        hidden_size: H, the width of the features.
        num_layers: L.
        memory_size: m, number of decay rates.
        context_size: c, number of oscillation frequencies.
        **options: further arguments of :class:`CellModule`.

    Example:
        >>> ffm = FFMModule(4, 8, in_key="observation", out_key="features")
        >>> ffm.make_tensordict_primer().primers["recurrent_state"].shape
        torch.Size([1, 32, 4, 2])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        memory_size: int = 32,
        context_size: int = 4,
        **options: Unpack[CellOptions],
    ) -> None:
        cell = recurrence.FFMCell(memory_size, context_size)
        super().__init__(cell, input_size, hidden_size, num_layers, **options)


class GTrXLModule(CellModule):
    """Gated Transformer-XL blocks; each layer is a :class:`recurl.recurrence.GTrXLCell`.

    The state of a layer is its last M inputs, each followed by 1, ``[*B, L, M, H + 1]``.

    Args:
        input_size: I.
        hidden_size: H, the width of the features.
        num_layers: L.
        window: M, number of past inputs that a layer attends to.
        heads: number of heads, which must divide their width in all; None for 4, 2 or 1, the first that does.
        head_size: width of a head; None for H / heads.
        feed_forward: hidden units of the feed-forward part, as a multiple of H.
        gate_bias: how far the gates are closed at first.
        **options: further arguments of :class:`CellModule`.

    Example:
        >>> gtrxl = GTrXLModule(4, 8, num_layers=2, window=16, heads=2, in_key="observation", out_key="features")
        >>> gtrxl.make_tensordict_primer().primers["recurrent_state"].shape
        torch.Size([2, 16, 9])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        window: int = 64,
        heads: int | None = None,
        head_size: int | None = None,
        feed_forward: int = 4,
        gate_bias: float = 2.0,
        **options: Unpack[CellOptions],
    ) -> None:
        cell = recurrence.GTrXLCell(window, heads, head_size, feed_forward, gate_bias)
        super().__init__(cell, input_size, hidden_size, num_layers, **options)


class MLSTMModule(CellModule):
    """mLSTM blocks; each layer is a :class:`recurl.recurrence.MLSTMCell`.

    States are h, a matrix for each head, ``[*B, L, heads, D, D]``, n ``[*B, L, heads, D]``, m ``[*B, L, heads]`` and,
    with a convolution, its window ``[*B, L, W - 1, heads * D]``. Passes over sequences return h after the last steps of
    segments only, and zeros elsewhere.

    Args:
        input_size: I.
        hidden_size: H, the width of the features.
        num_layers: L.
        heads: number of heads, which must divide their width in all; None for 4, 2 or 1, the first that does.
        expand: heads times D as a multiple of H.
        conv_width: W, kernel width of the convolution; 0 for none.
        **options: further arguments of :class:`CellModule`.

    Example:
        >>> mlstm = MLSTMModule(4, 8, in_key="observation", out_key="features")
        >>> mlstm.make_tensordict_primer().primers["recurrent_state_h"].shape
        torch.Size([1, 4, 4, 4])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        heads: int | None = None,
        expand: int = 2,
        conv_width: int = 4,
        **options: Unpack[CellOptions],
    ) -> None:
        cell = recurrence.MLSTMCell(heads, expand, conv_width)
        super().__init__(cell, input_size, hidden_size, num_layers, **options)


class Mamba2Module(CellModule):
    """Mamba-2 blocks; each layer is a :class:`recurl.recurrence.Mamba2Cell`.

    States are h, a matrix for each head, ``[*B, L, heads, N, D]``, and, with a convolution, its window
    ``[*B, L, W - 1, heads * D + 2 N]``. Passes over sequences return h after the last steps of segments only, and zeros
    elsewhere.

    Args:
        input_size: I.
        hidden_size: H, the width of the features.
        num_layers: L.
        heads: number of heads, which must divide their width in all; None for 4, 2 or 1, the first that does.
        state_size: N.
        expand: heads times D as a multiple of H.
        conv_width: W, kernel width of the convolution; 0 for none.
        **options: further arguments of :class:`CellModule`.

    Example:
        >>> mamba = Mamba2Module(4, 8, state_size=16, in_key="observation", out_key="features")
        >>> mamba.make_tensordict_primer().primers["recurrent_state_h"].shape
        torch.Size([1, 4, 16, 4])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        heads: int | None = None,
        state_size: int = 64,
        expand: int = 2,
        conv_width: int = 4,
        **options: Unpack[CellOptions],
    ) -> None:
        cell = recurrence.Mamba2Cell(heads, state_size, expand, conv_width)
        super().__init__(cell, input_size, hidden_size, num_layers, **options)


class GatedDeltaNetModule(CellModule):
    """Gated DeltaNet blocks; each layer is a :class:`recurl.recurrence.GatedDeltaNetCell`.

    States are h, a matrix for each head, ``[*B, L, heads, K, V]``, and, with a convolution, its window
    ``[*B, L, W - 1, heads * (2 K + V)]``. Passes over sequences return h after the last steps of segments only, and
    zeros elsewhere.

    Args:
        input_size: I.
        hidden_size: H, the width of the features.
        num_layers: L.
        heads: number of heads, which must divide their width in all; None for 4, 2 or 1, the first that does.
        key_size: K; None for H / heads.
        value_size: V; None for K.
        conv_width: W, kernel width of the convolution; 0 for none.
        feed_forward: hidden units of the feed-forward part, as a multiple of H; 0 for none.
        **options: further arguments of :class:`CellModule`.

    Example:
        >>> delta = GatedDeltaNetModule(4, 8, heads=2, in_key="observation", out_key="features")
        >>> delta.make_tensordict_primer().primers["recurrent_state_h"].shape
        torch.Size([1, 2, 4, 4])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        heads: int | None = None,
        key_size: int | None = None,
        value_size: int | None = None,
        conv_width: int = 4,
        feed_forward: int = 3,
        **options: Unpack[CellOptions],
    ) -> None:
        cell = recurrence.GatedDeltaNetCell(heads, key_size, value_size, conv_width, feed_forward)
        super().__init__(cell, input_size, hidden_size, num_layers, **options)


class SLSTMModule(CellModule):
    """LSTMs with exponential gates in the blocks of xLSTM; each layer is a :class:`recurl.recurrence.SLSTMCell`.

    States are h, c, n and m, ``[*B, L, H]``, and, with a convolution, its window ``[*B, L, W - 1, H]``.

    Args:
        input_size: I.
        hidden_size: H, the width of the features.
        num_layers: L.
        heads: number of blocks of the block-diagonal matrices of the gates.
        conv_width: W, kernel width of the convolution; 0 for none.
        feed_forward: hidden units of the feed-forward part, as a multiple of H; 0 for none.
        exponential_forget: whether forget gates are exponential, too.
        **options: further arguments of :class:`CellModule`.

    Example:
        >>> slstm = SLSTMModule(4, 8, heads=2, in_key="observation", out_key="features")
        >>> slstm.in_keys[1:5]
        ['recurrent_state_h', 'recurrent_state_c', 'recurrent_state_n', 'recurrent_state_m']
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        heads: int = 1,
        conv_width: int = 0,
        feed_forward: float = 4 / 3,
        exponential_forget: bool = False,
        **options: Unpack[CellOptions],
    ) -> None:
        cell = recurrence.SLSTMCell(heads, conv_width, feed_forward, exponential_forget)
        super().__init__(cell, input_size, hidden_size, num_layers, **options)


class SHMModule(CellModule):
    """Stable Hadamard memory (SHM); each layer is a :class:`recurl.recurrence.SHMCell`.

    States are the memory ``[*B, L, K, K]`` and the number of the last row of theta ``[*B, L, 1]``.

    Args:
        input_size: I.
        hidden_size: H, the width of the features.
        num_layers: L.
        memory_size: K.
        rows: number of rows of theta, which take turns.
        **options: further arguments of :class:`CellModule`.

    Example:
        >>> shm = SHMModule(4, 8, memory_size=16, in_key="observation", out_key="features")
        >>> shm.make_tensordict_primer().primers["recurrent_state_memory"].shape
        torch.Size([1, 16, 16])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        memory_size: int = 32,
        rows: int = 128,
        **options: Unpack[CellOptions],
    ) -> None:
        cell = recurrence.SHMCell(memory_size, rows)
        super().__init__(cell, input_size, hidden_size, num_layers, **options)

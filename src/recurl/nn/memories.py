"""Networks of the built-in memories by name: linear recurrences, matrix memories, attention windows."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any, ClassVar

import torch

from recurl import recurrence  # each cell is imported when it is used
from recurl.core.errors import ArgumentError
from recurl.nn.rnn import CellNet


class MemoryNet(CellNet):
    """Base class of the networks that are named after their cell, such as :class:`S5`.

    Args:
        input_size: I.
        hidden_size: H, the width of the features.
        num_layers: L.
        bias: must be True for cells without biases to omit.
        batch_first: whether input, resets and features are ``[B, T, ...]`` instead of ``[T, B, ...]``.
        dropout: dropout probability of outputs between layers, in training.
        bidirectional: also run from end to start.
        recurrent_backend: backend of sequences: see [backends](../concepts/backends.md).
        device: device of the parameters.
        dtype: dtype of the parameters.
        **options: the arguments of the cell.

    Raises:
        ArgumentError: the cell doesn't take these options or values.

    Example:
        >>> from recurl.nn import S5
        >>> isinstance(S5(4, 8), MemoryNet)
        True
    """

    cell_class: ClassVar[str]
    """Name of the cell in :mod:`recurl.recurrence`."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        recurrent_backend: str = "fastest",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        kind = getattr(recurrence, self.cell_class)
        known = inspect.signature(kind).parameters
        unknown = [name for name in options if name not in known]
        if unknown:
            raise ArgumentError(
                f"{type(self).__name__} has no argument {', '.join(unknown)}; those of its cell are {', '.join(known)}."
            )
        sizes = (input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional)
        super().__init__(kind(**options), *sizes, recurrent_backend=recurrent_backend, device=device, dtype=dtype)

    def extra_repr(self) -> str:
        """Return the sizes and the arguments that differ from their defaults."""
        cell: Any = self.cell
        given = {one.name: getattr(cell, one.name) for one in fields(cell) if getattr(cell, one.name) != one.default}
        return ", ".join([super().extra_repr(), *(f"{name}={value}" for name, value in given.items())])


class MinGRU(MemoryNet):
    """minGRU blocks, a linear recurrence.

    Each layer is a :class:`recurl.recurrence.MinGRUCell`, whose arguments this class takes by name, beside
    those of :class:`MemoryNet`. The state of a layer is h ``[S]``.

    Example:
        >>> features, states = MinGRU(4, 8, conv_width=4)(torch.randn(5, 3, 4))
        >>> features.shape, [list(state.shape) for state in states]
        (torch.Size([5, 3, 8]), [[1, 3, 8], [1, 3, 3, 8]])
    """

    cell_class = "MinGRUCell"


class MinLSTM(MemoryNet):
    """minLSTM blocks, a linear recurrence.

    Each layer is a :class:`recurl.recurrence.MinLSTMCell`, whose arguments this class takes by name, beside
    those of :class:`MemoryNet`. The state of a layer is h ``[S]``.

    Example:
        >>> features, states = MinLSTM(4, 8, state_size=16)(torch.randn(5, 3, 4))
        >>> features.shape, [list(state.shape) for state in states]
        (torch.Size([5, 3, 8]), [[1, 3, 16]])
    """

    cell_class = "MinLSTMCell"


class LRU(MemoryNet):
    """Blocks of linear recurrent units.

    Each layer is a :class:`recurl.recurrence.LRUCell`, whose arguments this class takes by name, beside those
    of :class:`MemoryNet`. The state of a layer is N complex numbers ``[N, 2]``.

    Example:
        >>> features, states = LRU(4, 8, min_radius=0.9)(torch.randn(5, 3, 4))
        >>> features.shape, [list(state.shape) for state in states]
        (torch.Size([5, 3, 8]), [[1, 3, 8, 2]])
    """

    cell_class = "LRUCell"


class S5(MemoryNet):
    """S5 blocks, a linear recurrence.

    Each layer is a :class:`recurl.recurrence.S5Cell`, whose arguments this class takes by name, beside those of
    :class:`MemoryNet`. The state of a layer is N / 2 complex numbers ``[N / 2, 2]``.

    Example:
        >>> features, states = S5(4, 8, num_layers=4)(torch.randn(5, 3, 4))
        >>> features.shape, [list(state.shape) for state in states]
        (torch.Size([5, 3, 8]), [[4, 3, 4, 2]])
    """

    cell_class = "S5Cell"


class RGLRU(MemoryNet):
    """Griffin's residual blocks with an RG-LRU, a linear recurrence.

    Each layer is a :class:`recurl.recurrence.RGLRUCell`, whose arguments this class takes by name, beside those
    of :class:`MemoryNet`. The state of a layer is h ``[S]``.

    Example:
        >>> features, states = RGLRU(4, 8, heads=2)(torch.randn(5, 3, 4))
        >>> features.shape, [list(state.shape) for state in states]
        (torch.Size([5, 3, 8]), [[1, 3, 8]])
    """

    cell_class = "RGLRUCell"


class FFM(MemoryNet):
    """Fast and forgetful memory, a linear recurrence.

    Each layer is a :class:`recurl.recurrence.FFMCell`, whose arguments this class takes by name, beside those
    of :class:`MemoryNet`. The state of a layer is m times c complex numbers ``[m, c, 2]``.

    Example:
        >>> features, states = FFM(4, 8, memory_size=16)(torch.randn(5, 3, 4))
        >>> features.shape, [list(state.shape) for state in states]
        (torch.Size([5, 3, 8]), [[1, 3, 16, 4, 2]])
    """

    cell_class = "FFMCell"


class GTrXL(MemoryNet):
    """Gated Transformer-XL blocks, with attention over the last M inputs.

    Each layer is a :class:`recurl.recurrence.GTrXLCell`, whose arguments this class takes by name, beside those
    of :class:`MemoryNet`. The state of a layer is these inputs ``[M, H + 1]``.

    Example:
        >>> features, states = GTrXL(4, 8, window=16)(torch.randn(5, 3, 4))
        >>> features.shape, [list(state.shape) for state in states]
        (torch.Size([5, 3, 8]), [[1, 3, 16, 9]])
    """

    cell_class = "GTrXLCell"


class MLSTM(MemoryNet):
    """mLSTM blocks of xLSTM, a matrix memory.

    Each layer is a :class:`recurl.recurrence.MLSTMCell`, whose arguments this class takes by name, beside those
    of :class:`MemoryNet`. The states of a layer are C ``[heads, D, D]``, n ``[heads, D]``, m ``[heads]``, and
    the convolution's window.

    Example:
        >>> features, states = MLSTM(4, 8, heads=2)(torch.randn(5, 3, 4))
        >>> features.shape, [list(state.shape) for state in states]
        (torch.Size([5, 3, 8]), [[1, 3, 2, 8, 8], [1, 3, 2, 8], [1, 3, 2], [1, 3, 3, 16]])
    """

    cell_class = "MLSTMCell"


class Mamba2(MemoryNet):
    """Mamba-2 blocks, a matrix memory.

    Each layer is a :class:`recurl.recurrence.Mamba2Cell`, whose arguments this class takes by name, beside
    those of :class:`MemoryNet`. The states of a layer are a matrix per head ``[heads, N, D]``, and the
    convolution's window.

    Example:
        >>> features, states = Mamba2(4, 8, state_size=16)(torch.randn(5, 3, 4))
        >>> features.shape, [list(state.shape) for state in states]
        (torch.Size([5, 3, 8]), [[1, 3, 4, 16, 4], [1, 3, 3, 48]])
    """

    cell_class = "Mamba2Cell"


class GatedDeltaNet(MemoryNet):
    """Gated delta network blocks, a matrix memory.

    Each layer is a :class:`recurl.recurrence.GatedDeltaNetCell`, whose arguments this class takes by name,
    beside those of :class:`MemoryNet`. The states of a layer are a matrix per head ``[heads, K, V]``, and the
    convolution's window.

    Example:
        >>> features, states = GatedDeltaNet(4, 8, heads=2)(torch.randn(5, 3, 4))
        >>> features.shape, [list(state.shape) for state in states]
        (torch.Size([5, 3, 8]), [[1, 3, 2, 4, 4], [1, 3, 3, 24]])
    """

    cell_class = "GatedDeltaNetCell"


class SLSTM(MemoryNet):
    """sLSTM blocks of xLSTM, whose gates see h.

    Each layer is a :class:`recurl.recurrence.SLSTMCell`, whose arguments this class takes by name, beside those
    of :class:`MemoryNet`. The state of a layer is h, c, n and m, each ``[H]``.

    Example:
        >>> features, states = SLSTM(4, 8, heads=2)(torch.randn(5, 3, 4))
        >>> features.shape, [list(state.shape) for state in states]
        (torch.Size([5, 3, 8]), [[1, 3, 8], [1, 3, 8], [1, 3, 8], [1, 3, 8]])
    """

    cell_class = "SLSTMCell"


class SHM(MemoryNet):
    """Stable Hadamard memory, a linear recurrence.

    Each layer is a :class:`recurl.recurrence.SHMCell`, whose arguments this class takes by name, beside those
    of :class:`MemoryNet`. The states of a layer are M ``[K, K]``, and the number of a row ``[1]``.

    Example:
        >>> features, states = SHM(4, 8, memory_size=16)(torch.randn(5, 3, 4))
        >>> features.shape, [list(state.shape) for state in states]
        (torch.Size([5, 3, 8]), [[1, 3, 16, 16], [1, 3, 1]])
    """

    cell_class = "SHMCell"

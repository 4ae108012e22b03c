"""Networks under torch.nn's names: LSTM, GRU and networks of any cell; single cells."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Self

from torch import Tensor, nn

from recurl.modules.recurrent_net import RecurrentNet
from recurl.recurrence import GRU as GRU_CELL
from recurl.recurrence import LSTM as LSTM_CELL
from recurl.recurrence import Cell, check_step


class LSTM(RecurrentNet):
    """``torch.nn.LSTM`` on recurl's backends: same parameters, arguments, shapes and results; ``batch_first=True``.

    Args:
        input_size: I.
        hidden_size: H.
        num_layers: L.
        bias: add biases.
        batch_first: whether input and features are ``[B, T, ...]`` or ``[T, B, ...]``.
        dropout: probability of dropping outputs between layers, in training.
        bidirectional: also run from end to start; D is 2 then, else 1.
        proj_size: P, width of the projected output; 0 for none.
        python_based: step by plain torch operations instead of ATen's cell kernels.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Example:
        >>> import torch
        >>> features, (h, c) = LSTM(4, 8, num_layers=2)(torch.randn(3, 5, 4))
        >>> features.shape, h.shape
        (torch.Size([3, 5, 8]), torch.Size([2, 3, 8]))
    """

    cell = LSTM_CELL

    def forward(self, x: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run ``x``, ``[B, T, I]`` or ``[T, I]``, from ``hx`` (h and c, ``[L * D, B, ...]``; zeros when None)."""
        features, (h, c) = self.evaluate(x, hx)
        return features, (h, c)


class GRU(RecurrentNet):
    """``torch.nn.GRU`` on recurl's backends; see :class:`LSTM` (there is no projection).

    Example:
        >>> import torch
        >>> features, h = GRU(4, 8)(torch.randn(3, 5, 4))
        >>> features.shape, h.shape
        (torch.Size([3, 5, 8]), torch.Size([1, 3, 8]))
    """

    cell = GRU_CELL

    def forward(self, x: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run ``x``, ``[B, T, I]`` or ``[T, I]``, from ``hx`` (``[L * D, B, H]``; zeros when None)."""
        features, (h,) = self.evaluate(x, None if hx is None else (hx,))
        return features, h


class CellNet(RecurrentNet):
    """Layers of any cell, with the arguments of :class:`LSTM` after the cell.

    Args:
        cell: the cell.
        *sizes: positional arguments of :class:`LSTM`.
        **options: named arguments of :class:`LSTM`.

    Raises:
        ArgumentError: the cell has no projection, or no biases to leave out, and was asked for it; or its step, tried
            out on a few rows, breaks the contract of cells.

    Example:
        >>> import torch
        >>> from recurl.recurrence import GRU
        >>> features, (h,) = CellNet(GRU, 4, 8)(torch.randn(3, 5, 4))
        >>> features.shape, h.shape
        (torch.Size([3, 5, 8]), torch.Size([1, 3, 8]))
    """

    def __init__(self, cell: Cell, *sizes: Any, **options: Any) -> None:
        self.cell = cell
        super().__init__(*sizes, **options)
        self._check_steps()

    def forward(self, x: Tensor, hx: tuple[Tensor, ...] | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run ``x``, ``[B, T, I]`` or ``[T, I]``, from ``hx`` (each ``[L * D, B, *shape]``; zeros when None)."""
        return self.evaluate(x, hx)

    def _check_steps(self, *, form_alone: bool = False) -> None:
        for layer, (weights, *_) in enumerate(self.layer_weights()):
            check_step(self.cell, weights, self._sizes(layer), form_alone=form_alone)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        before = self.dtype
        super()._apply(fn, recurse)
        if self.dtype != before:
            with suppress(RuntimeError):  # an operation that isn't there in this dtype here may be where it will run
                self._check_steps(form_alone=True)
        return self


class LSTMCell(nn.LSTMCell):
    """``torch.nn.LSTMCell`` in plain torch operations, so that every transform of torch (vmap, compile) takes it.

    Example:
        >>> import torch
        >>> h, c = LSTMCell(4, 8)(torch.randn(3, 4))
        >>> h.shape, c.shape
        (torch.Size([3, 8]), torch.Size([3, 8]))
    """

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:  # noqa: A002 - torch.nn's name
        """One step: ``input`` ``[B, I]`` or ``[I]``, ``hx`` h and c ``[B, H]`` or ``[H]`` (zeros when None)."""
        zero = input.new_zeros(*input.shape[:-1], self.hidden_size)
        _, (h, c) = LSTM_CELL.step(input, (zero, zero) if hx is None else hx, *_weights(self))
        return h, c


class GRUCell(nn.GRUCell):
    """``torch.nn.GRUCell`` in plain torch operations, so that every transform of torch (vmap, compile) takes it.

    Example:
        >>> import torch
        >>> GRUCell(4, 8)(torch.randn(3, 4)).shape
        torch.Size([3, 8])
    """

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:  # noqa: A002 - torch.nn's name
        """One step: ``input`` ``[B, I]`` or ``[I]``, ``hx`` ``[B, H]`` or ``[H]`` (zeros when None)."""
        zero = input.new_zeros(*input.shape[:-1], self.hidden_size)
        h, _ = GRU_CELL.step(input, (zero if hx is None else hx,), *_weights(self))
        return h


def _weights(cell: nn.RNNCellBase) -> list[Tensor]:
    return [cell.weight_ih, cell.weight_hh, *((cell.bias_ih, cell.bias_hh) if cell.bias else ())]

"""Replacements of torch.nn's LSTM, GRU and their cells, and networks of any cell."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from torch import Tensor, dtype, nn

from recurl import recurrence
from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.core.torch_compat import NotifiedModule
from recurl.nn.recurrent_net import RecurrentNet
from recurl.nn.torch_call import call
from recurl.recurrence import GRU as GRU_CELL
from recurl.recurrence import LSTM as LSTM_CELL
from recurl.recurrence import Cell


class LSTM(RecurrentNet):
    """``torch.nn.LSTM`` on recurl's backends, with resets: same parameters, arguments and results.

    State dicts are interchangeable with those of ``torch.nn.LSTM``. ``"triton"`` runs on CUDA, else ``"cpu"`` if it is
    built, else ``"loop"``; a single step runs without any of them.

    Args:
        input_size: I.
        hidden_size: H.
        num_layers: L.
        bias: add biases.
        batch_first: whether input, resets and features are ``[B, T, ...]`` instead of ``[T, B, ...]``.
        dropout: dropout probability of outputs between layers, in training.
        bidirectional: also run from end to start; D is then 2, else 1.
        proj_size: P, width of the projected output; 0 for none.
        device: device of the parameters.
        dtype: dtype of the parameters.
        python_based: step with plain torch operations instead of ATen's cell kernels.
        recurrent_backend: backend of sequences: ``"fastest"``, or for derivatives of second order and forward mode
            ``"loop"``; others are described [here](../concepts/backends.md).

    Example:
        >>> import torch
        >>> lstm = LSTM(4, 8, num_layers=2)
        >>> x, resets = torch.randn(5, 3, 4), torch.zeros(5, 3, dtype=torch.bool)
        >>> resets[2, 1] = True  # the second row's third step begins an episode
        >>> features, (h, c) = lstm(x, resets=resets)
        >>> features.shape, h.shape
        (torch.Size([5, 3, 8]), torch.Size([2, 3, 8]))
        >>> torch.allclose(features[2:, 1], lstm(x[2:, 1])[0], atol=1e-6)
        True
    """

    cell = LSTM_CELL
    mode = "LSTM"  # as torch.nn's attribute

    def forward(
        self,
        input: Tensor,  # noqa: A002 - torch.nn's name
        hx: tuple[Tensor, Tensor] | None = None,
        resets: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run sequences.

        ``input`` and ``resets`` are ``[T, B, ...]``, with ``batch_first`` ``[B, T, ...]``, or
        ``[T, ...]``; states are ``[L * D, B, ...]``. ``hx`` is h and c, zeros if None.
        """
        features, (h, c) = call(self, input, hx, resets)
        return features, (h, c)


class GRU(RecurrentNet):
    """``torch.nn.GRU`` on recurl's backends, with resets; see :class:`LSTM` (there is no projection).

    Example:
        >>> import torch
        >>> features, h = GRU(4, 8, batch_first=True)(torch.randn(3, 5, 4))
        >>> features.shape, h.shape
        (torch.Size([3, 5, 8]), torch.Size([1, 3, 8]))
    """

    cell = GRU_CELL
    mode = "GRU"

    def forward(
        self,
        input: Tensor,  # noqa: A002 - torch.nn's name
        hx: Tensor | None = None,
        resets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run sequences.

        ``input`` and ``resets`` are ``[T, B, ...]``, with ``batch_first`` ``[B, T, ...]``, or
        ``[T, ...]``; states are ``[L * D, B, ...]``. ``hx`` is h, zeros if None.
        """
        features, (h,) = call(self, input, None if hx is None else (hx,), resets)
        return features, h


class CellNet(NotifiedModule, RecurrentNet):
    """Stacked layers of any cell, with the arguments of :class:`LSTM` after the cell.

    Args:
        cell: an instance or a subclass of :class:`recurl.recurrence.Cell`, or the name of a
            [built-in one](../concepts/cells.md) such as ``"s5"`` or ``"gtrxl(window=16)"``.
        *sizes: positional arguments of :class:`LSTM`.
        **options: named arguments of :class:`LSTM`.

    Raises:
        ArgumentError: a projection or ``bias=False`` is requested that the cell doesn't support; or its step, tried on
            a few rows, breaks the contract of cells.

    Example:
        >>> import torch
        >>> resets = torch.rand(5, 3) < 0.2
        >>> features, (window,) = CellNet("gtrxl(window=16)", 4, 8, num_layers=2)(torch.randn(5, 3, 4), resets=resets)
        >>> features.shape, window.shape
        (torch.Size([5, 3, 8]), torch.Size([2, 3, 16, 9]))
    """

    def __init__(self, cell: Cell | type[Cell] | str, *sizes: Any, **options: Any) -> None:
        self.cell = recurrence.load_cell(cell) if isinstance(cell, str) else recurrence.cell_of(cell)
        super().__init__(*sizes, **options)
        self._check_steps()

    def forward(
        self,
        input: Tensor,  # noqa: A002 - torch.nn's name
        hx: tuple[Tensor, ...] | None = None,
        resets: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run sequences.

        ``input`` and ``resets`` are ``[T, B, ...]``, with ``batch_first`` ``[B, T, ...]``, or
        ``[T, ...]``; states are ``[L * D, B, ...]``. ``hx`` holds all states, zeros if None.
        """
        return call(self, input, hx, resets)

    def _check_steps(self, *, shapes_only: bool = False) -> None:
        for layer, (weights, *_) in enumerate(self.layer_weights()):
            recurrence.check_step(self.cell, weights, self._sizes(layer), shapes_only=shapes_only)

    def __prepare_scriptable__(self) -> nn.Module:
        raise UnsupportedError(
            "torch.jit.script can't compile a CellNet: use torch.export, or recurl.nn.LSTM or GRU, which it replaces "
            "by torch.nn's."
        )

    def on_conversion(self, before: dtype) -> None:
        """Check the cell's step again if the dtype changed."""
        if self.dtype != before:
            with suppress(RuntimeError):  # an operation missing for this dtype here may exist on the target device
                self._check_steps(shapes_only=True)


class LSTMCell(nn.LSTMCell):
    """``torch.nn.LSTMCell`` in plain torch operations, compatible with all torch transforms (vmap, compile).

    Example:
        >>> import torch
        >>> h, c = LSTMCell(4, 8)(torch.randn(3, 4))
        >>> h.shape, c.shape
        (torch.Size([3, 8]), torch.Size([3, 8]))
    """

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:  # noqa: A002 - torch.nn's name
        """Run one step: ``input`` ``[B, I]`` or ``[I]``, ``hx`` h and c ``[B, H]`` or ``[H]`` (zeros if None)."""
        h, c = _states_of(self, input, hx, 2)
        _, (h, c) = LSTM_CELL.step(input, (h, c), *_weights(self))
        return h, c


class GRUCell(nn.GRUCell):
    """``torch.nn.GRUCell`` in plain torch operations, compatible with all torch transforms (vmap, compile).

    Example:
        >>> import torch
        >>> GRUCell(4, 8)(torch.randn(3, 4)).shape
        torch.Size([3, 8])
    """

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:  # noqa: A002 - torch.nn's name
        """Run one step: ``input`` ``[B, I]`` or ``[I]``, ``hx`` ``[B, H]`` or ``[H]`` (zeros if None)."""
        h, _ = GRU_CELL.step(input, _states_of(self, input, None if hx is None else (hx,), 1), *_weights(self))
        return h


def _states_of(cell: nn.RNNCellBase, x: Tensor, given: Any, count: int) -> tuple[Tensor, ...]:
    """Return the states before a step, zeros if none are given; refuse shapes that would broadcast."""
    if x.ndim not in (1, 2) or x.shape[-1] != cell.input_size:
        raise ArgumentError(
            f"The input must be [B, I] or [I] with input_size={cell.input_size}; got shape {list(x.shape)}."
        )
    shape = (*x.shape[:-1], cell.hidden_size)
    if given is None:
        zero = x.new_zeros(shape)
        return (zero,) * count
    states = tuple(given) if isinstance(given, Iterable) else (given,)
    if len(states) != count or any(not isinstance(state, Tensor) or state.shape != shape for state in states):
        kind = "h and c, each" if count == 2 else "h,"
        found = ", ".join(
            str(list(state.shape)) if isinstance(state, Tensor) else type(state).__name__ for state in states
        )
        raise ArgumentError(f"The states must be {kind} of shape {list(shape)} for this input; got {found}.")
    return states


def _weights(cell: nn.RNNCellBase) -> list[Tensor]:
    return [cell.weight_ih, cell.weight_hh, *((cell.bias_ih, cell.bias_hh) if cell.bias else ())]

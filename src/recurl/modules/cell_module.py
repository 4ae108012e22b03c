"""Recurrent module for arbitrary cells."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recurl.core.keys import NestedKey
from recurl.modules.recurrent import RecurrentModule
from recurl.modules.rnn_arguments import RecurrentSettings, check_batch_first, read_keys, written_keys
from recurl.nn.rnn import CellNet
from recurl.recurrence import Cell, cell_of


class CellModule(RecurrentModule):
    """Recurrent layers of any cell, for single environment steps and whole sequences, reset by ``is_init``.

    Works like :class:`~recurl.modules.LSTMModule`, except for the states: those of the cell, each ``[*B, L, *shape]``.
    Modes, boundaries, missing states, primers and outputs are the same for every cell.

    Args:
        cell: a subclass of :class:`recurl.recurrence.Cell`, or an instance of one.
        input_size: I.
        hidden_size: H, the width of the features.
        num_layers: L, number of stacked layers.
        bias: add biases.
        batch_first: must be True; exists for compatibility with ``torch.nn``.
        dropout: dropout probability of the outputs of each layer except the last, in training.
        proj_size: P; if positive, the output is projected to P units. Only for cells with a projection.
        bidirectional: also run each segment from its end to its start.
        python_based: step by the cell's definition, even if it has a fused step. Not with ``bidirectional``.
        recurrent_backend: backend for sequences. ``"loop"``, ``"scan"`` and ``"reference"`` support every cell;
            ``"cpu"`` and ``"triton"`` support LSTM, GRU and cells whose step takes ``time``; ``"pad"`` supports LSTM
            and GRU. ``"auto"`` and ``"fastest"`` select one that supports the cell.
        recurrent_compute_dtype: dtype of the recurrent products' operands under ``"triton"``.
        recurrent_recompute: ``"full"`` saves nothing for the backward pass and reruns the recurrence there.
        recurrent_matmul_precision: precision of float32 products under ``"triton"``.
        in_key: key of the input. A single state gets the key ``"recurrent_state"``, several states
            ``"recurrent_state_<name>"``.
        in_keys: keys of input and states, optionally followed by ``"is_init"``. Exclusive with ``in_key``.
        out_key: key of the features; the states are written to their keys under ``"next"``.
        out_keys: keys of features and states. Exclusive with ``out_key``.
        device: device of the parameters.
        dtype: dtype of the parameters.
        default_recurrent_mode: whether recurrent mode is on where no mode is set; False by default.

    Raises:
        ArgumentError: a value is out of range; key arguments are missing, given twice or too many; a projection or
            ``bias=False`` is requested that the cell doesn't support; or the cell's step, tried on a few rows, breaks
            the contract of cells.
        ArgumentTypeError: an argument has the wrong type; ``cell`` is not a cell.
        UnsupportedError: the backend requested by name doesn't support the cell.

    Example:
        >>> from recurl.recurrence import GRU
        >>> gru = CellModule(GRU, 4, 8, in_key="observation", out_key="features")
        >>> gru.in_keys, gru.out_keys
        (['observation', 'recurrent_state', 'is_init'], ['features', ('next', 'recurrent_state')])
    """

    def __init__(  # noqa: PLR0913 - the signature is LSTMModule's
        self,
        cell: Cell | type[Cell],
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = True,
        dropout: float = 0.0,
        proj_size: int = 0,
        bidirectional: bool = False,
        python_based: bool = False,
        recurrent_backend: str = "auto",
        recurrent_compute_dtype: torch.dtype = torch.float32,
        recurrent_recompute: str = "none",
        recurrent_matmul_precision: str = "auto",
        *,
        in_key: NestedKey | None = None,
        in_keys: Sequence[NestedKey] | None = None,
        out_key: NestedKey | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        default_recurrent_mode: bool | None = None,
    ) -> None:
        settings = RecurrentSettings(
            recurrent_backend, recurrent_compute_dtype, recurrent_recompute, recurrent_matmul_precision
        )
        cell = cell_of(cell)
        check_batch_first(batch_first, type(self).__name__)  # pyright: ignore[reportArgumentType] - tensordict hides it
        net = CellNet(
            cell,
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first=True,
            dropout=dropout,
            bidirectional=bidirectional,
            proj_size=proj_size,
            python_based=python_based,
            device=device,
            dtype=dtype,
        )
        read, written = read_keys(cell, in_key, in_keys), written_keys(cell, out_key, out_keys)
        super().__init__(net, read, written, settings, default_recurrent_mode)

"""LSTM and GRU modules for TensorDicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from recurl.core.keys import NestedKey
from recurl.modules.recurrent import RecurrentModule
from recurl.modules.rnn_arguments import RecurrentSettings, build_net, read_keys, written_keys
from recurl.nn import rnn


class _BatchFirst(rnn.RecurrentNet):
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = True,
        *others: Any,
        **options: Any,
    ) -> None:
        super().__init__(input_size, hidden_size, num_layers, bias, batch_first, *others, **options)


class LSTM(_BatchFirst, rnn.LSTM):
    """:class:`recurl.nn.LSTM` with ``batch_first=True`` by default, as in TorchRL.

    Example:
        >>> features, (h, c) = LSTM(4, 8, num_layers=2)(torch.randn(3, 5, 4))
        >>> features.shape, h.shape
        (torch.Size([3, 5, 8]), torch.Size([2, 3, 8]))
    """


class GRU(_BatchFirst, rnn.GRU):
    """:class:`recurl.nn.GRU` with ``batch_first=True`` by default, as in TorchRL.

    Example:
        >>> features, h = GRU(4, 8)(torch.randn(3, 5, 4))
        >>> features.shape, h.shape
        (torch.Size([3, 5, 8]), torch.Size([1, 3, 8]))
    """


class LSTMModule(RecurrentModule):
    """LSTM for single environment steps and whole sequences, reset by ``is_init``.

    By default it runs **one step**: it reads an input ``[*B, I]``, ``is_init`` (bool ``[*B, 1]`` or ``[*B]``) and the
    states h ``[*B, L, P or H]`` and c ``[*B, L, H]``, and writes features ``[*B, P or H]`` and the next states.
    Where ``is_init`` is true, the incoming state is replaced by zeros.

    Inside :class:`~recurl.modules.set_recurrent_mode` it runs **sequences** along the last batch dimension:
    ``[*B, T, ...]``, where ``[T]`` may be a stream of concatenated slices. A segment starts at the beginning of a row,
    where ``is_init`` is true, and, if ``("collector", "traj_ids")`` is present, where the trajectory changes. It runs
    from the state stored at its first token. The next states are those after every token (``"pad"``: at segment ends
    only).

    If all states are missing, they are zeros. I is ``input_size``, H ``hidden_size``, P ``proj_size``, and L
    ``num_layers`` (times two if bidirectional, which only supports sequences).

    Args:
        input_size: I.
        hidden_size: H.
        num_layers: L, number of stacked layers.
        bias: add biases.
        batch_first: must be True; exists for compatibility with ``torch.nn``.
        dropout: dropout probability of the outputs of each layer except the last, in training.
        proj_size: P; if positive, h is projected to P units.
        bidirectional: also run each segment from its end to its start.
        python_based: run plain torch operations, step by step, instead of torch.nn's kernels: ``"pad"`` then means
            ``"loop"``. Not with ``bidirectional``.
        recurrent_backend: backend for sequences: ``"pad"`` (torch.nn's kernels), ``"scan"`` (for ``torch.compile``),
            ``"triton"`` (CUDA kernels), ``"loop"`` (a step loop with fast resets, on any device), ``"cpu"`` (compiled
            C++ tiles), ``"reference"`` (slow and simple), ``"auto"`` (``"pad"``, or ``"scan"`` when compiling) or
            ``"fastest"`` (``"triton"`` on CUDA, else ``"cpu"`` if it is built, else ``"loop"``). Unsupported
            configurations raise; there is no silent fallback to another backend.
        recurrent_compute_dtype: dtype of the recurrent products' operands under ``"triton"``: ``torch.float32`` or
            ``torch.bfloat16``.
        recurrent_recompute: ``"full"`` saves no gates for the backward pass and recomputes them there: less memory,
            more computation. Not with ``"pad"`` and ``"auto"``.
        recurrent_matmul_precision: precision of float32 products under ``"triton"``, see
            :func:`~recurl.modules.set_recurrent_matmul_precision`; the other backends are never less precise.
        in_key: key of the input; the states get the keys ``"recurrent_state_h"`` and ``"recurrent_state_c"``.
        in_keys: keys of input, h and c, optionally followed by ``"is_init"``. Exclusive with ``in_key``.
        out_key: key of the features; the states are written to ``("next", "recurrent_state_h")`` and ``_c``.
        out_keys: keys of features, h and c. Exclusive with ``out_key``.
        device: device of the parameters.
        dtype: dtype of the parameters.
        lstm: a ``torch.nn.LSTM`` (``batch_first=True``) whose Parameters are adopted; exclusive with sizes and options.
        default_recurrent_mode: whether recurrent mode is on where no mode is set; False by default.

    Raises:
        ArgumentError: a value is out of range; key arguments are missing, given twice or too many.
        ArgumentTypeError: an argument has the wrong type.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from recurl.modules import set_recurrent_mode
        >>> lstm = LSTMModule(4, 8, in_key="observation", out_key="features")
        >>> is_init = torch.tensor([[True, False, False], [True, False, True]])
        >>> batch = TensorDict({"observation": torch.randn(2, 3, 4), "is_init": is_init}, [2, 3])
        >>> with set_recurrent_mode("recurrent"):
        ...     batch = lstm(batch)
        >>> batch["features"].shape, batch["next", "recurrent_state_h"].shape
        (torch.Size([2, 3, 8]), torch.Size([2, 3, 1, 8]))
    """

    def __init__(  # noqa: PLR0913 - the signature is TorchRL's
        self,
        input_size: int | None = None,
        hidden_size: int | None = None,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = True,
        dropout: float = 0.0,
        proj_size: int = 0,
        bidirectional: bool = False,
        python_based: bool = False,
        recurrent_backend: str = "pad",
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
        lstm: nn.LSTM | rnn.LSTM | None = None,
        default_recurrent_mode: bool | None = None,
    ) -> None:
        settings = RecurrentSettings(
            recurrent_backend, recurrent_compute_dtype, recurrent_recompute, recurrent_matmul_precision
        )
        options = {
            "num_layers": num_layers,
            "bias": bias,
            "batch_first": batch_first,
            "dropout": dropout,
            "proj_size": proj_size,
            "bidirectional": bidirectional,
            "python_based": python_based,
            "device": device,
            "dtype": dtype,
        }
        net = build_net(LSTM, nn.LSTM, input_size, hidden_size, options, lstm)
        read, written = read_keys(net.cell, in_key, in_keys), written_keys(net.cell, out_key, out_keys)
        super().__init__(net, read, written, settings, default_recurrent_mode)


class GRUModule(RecurrentModule):
    """GRU for single environment steps and whole sequences, reset by ``is_init``.

    Works like :class:`LSTMModule`, with a single state ``[*B, L, H]`` and no projection.

    Args:
        input_size: I.
        hidden_size: H.
        num_layers: L, number of stacked layers.
        bias: add biases.
        batch_first: must be True; exists for compatibility with ``torch.nn``.
        dropout: dropout probability of the outputs of each layer except the last, in training.
        bidirectional: also run each segment from its end to its start.
        python_based: as in :class:`LSTMModule`, like the next four.
        recurrent_backend: backend for sequences.
        recurrent_compute_dtype: dtype of the recurrent products' operands under ``"triton"``.
        recurrent_recompute: ``"none"`` or ``"full"``.
        recurrent_matmul_precision: precision of float32 products under ``"triton"``.
        in_key: key of the input; the state gets the key ``"recurrent_state"``.
        in_keys: keys of input and state, optionally followed by ``"is_init"``. Exclusive with ``in_key``.
        out_key: key of the features; the state is written to ``("next", "recurrent_state")``.
        out_keys: keys of features and state. Exclusive with ``out_key``.
        device: device of the parameters.
        dtype: dtype of the parameters.
        gru: a ``torch.nn.GRU`` (``batch_first=True``) whose Parameters are adopted; exclusive with sizes and options.
        default_recurrent_mode: whether recurrent mode is on where no mode is set; False by default.

    Raises:
        ArgumentError: a value is out of range; key arguments are missing, given twice or too many.
        ArgumentTypeError: an argument has the wrong type.

    Example:
        >>> import torch
        >>> gru = GRUModule(4, 8, in_keys=["observation", "rs"], out_keys=["features", ("next", "rs")])
        >>> features, state = gru(observation=torch.randn(3, 4), is_init=torch.ones(3, 1, dtype=torch.bool))
        >>> features.shape, state.shape
        (torch.Size([3, 8]), torch.Size([3, 1, 8]))
    """

    def __init__(  # noqa: PLR0913 - the signature is TorchRL's
        self,
        input_size: int | None = None,
        hidden_size: int | None = None,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = True,
        dropout: float = 0.0,
        bidirectional: bool = False,
        python_based: bool = False,
        recurrent_backend: str = "pad",
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
        gru: nn.GRU | rnn.GRU | None = None,
        default_recurrent_mode: bool | None = None,
    ) -> None:
        settings = RecurrentSettings(
            recurrent_backend, recurrent_compute_dtype, recurrent_recompute, recurrent_matmul_precision
        )
        options = {
            "num_layers": num_layers,
            "bias": bias,
            "batch_first": batch_first,
            "dropout": dropout,
            "bidirectional": bidirectional,
            "python_based": python_based,
            "device": device,
            "dtype": dtype,
        }
        net = build_net(GRU, nn.GRU, input_size, hidden_size, options, gru)
        read, written = read_keys(net.cell, in_key, in_keys), written_keys(net.cell, out_key, out_keys)
        super().__init__(net, read, written, settings, default_recurrent_mode)

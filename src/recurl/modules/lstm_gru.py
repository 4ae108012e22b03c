"""LSTMModule and GRUModule: the recurrent module with one cell or the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from recurl.keys import NestedKey
from recurl.modules.python_rnn import GRU, LSTM
from recurl.modules.recurrent import RecurrentModule
from recurl.modules.rnn_arguments import RecurrentSettings, build_net, read_keys, written_keys


class LSTMModule(RecurrentModule):
    """An LSTM that steps in an environment and replays whole sequences, reset by ``is_init``.

    By default it runs **one step**: it reads a value ``[*B, I]``, ``is_init`` (bool ``[*B, 1]`` or ``[*B]``) and the
    states h ``[*B, L, P or H]`` and c ``[*B, L, H]``, and writes features ``[*B, P or H]`` and the next states.
    Where ``is_init`` is true the incoming state counts as zero.

    Inside :class:`~recurl.modules.set_recurrent_mode` it runs **sequences** along the last batch dimension:
    ``[*B, T, ...]``, where ``[T]`` may be a stream of concatenated slices. Rows, true ``is_init`` and, when
    ``("collector", "traj_ids")`` is there, changes of trajectory start a segment; a segment runs from the state
    stored at its first token. The next states are those after every token (``"pad"``: at segment ends only).

    Missing states (all of them) count as zeros. I is ``input_size``, H ``hidden_size``, P ``proj_size``, L
    ``num_layers`` (times two when bidirectional, which can only run sequences).

    Args:
        input_size: I.
        hidden_size: H.
        num_layers: L; each layer feeds the next.
        bias: add biases.
        batch_first: must be True; there for the sake of ``torch.nn``'s signature.
        dropout: probability of dropping each output of each layer but the last, in training.
        proj_size: P; when positive, h is projected to P units.
        bidirectional: also run each segment from its end to its start.
        python_based: evaluate in plain torch operations, step by step, instead of torch.nn's kernels: ``"pad"`` then
            means ``"loop"``. Not with ``bidirectional``.
        recurrent_backend: who runs sequences: ``"pad"`` (torch.nn's kernels), ``"scan"`` (for
            ``torch.compile``), ``"triton"`` (CUDA kernels), ``"loop"`` (a step loop with fast resets, anywhere),
            ``"cpu"`` (compiled tiles), ``"reference"`` (slow and obvious), ``"auto"`` (``"pad"``, or ``"scan"`` when
            compiling) or ``"fastest"`` (``"triton"`` on CUDA, else ``"cpu"`` where it is built, else ``"loop"``).
            What a backend can't do raises; none falls back to another.
        recurrent_compute_dtype: dtype of the recurrent products' operands under ``"triton"``: ``torch.float32`` or
            ``torch.bfloat16``.
        recurrent_recompute: ``"full"`` keeps no gates for the backward pass and computes them again there: less
            memory, more work. Not with ``"pad"`` and ``"auto"``.
        recurrent_matmul_precision: precision of float32 products under ``"triton"``, see
            :func:`~recurl.modules.set_recurrent_matmul_precision`; the other backends are never less precise.
        in_key: key of the value; the states get the keys ``"recurrent_state_h"`` and ``"recurrent_state_c"``.
        in_keys: keys of value, h and c; ``"is_init"`` may follow. Exclusive with ``in_key``.
        out_key: key of the features; the states go to ``("next", "recurrent_state_h")`` and ``_c``.
        out_keys: keys of features, h and c. Exclusive with ``out_key``.
        device: device of the parameters.
        dtype: dtype of the parameters.
        lstm: a ``torch.nn.LSTM`` (``batch_first=True``) that gives its Parameters; exclusive with sizes and options.
        default_recurrent_mode: the mode where none is set; False if not given.

    Raises:
        ArgumentError: a value is out of range, key arguments are missing, doubled or too many.
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

    def __init__(  # noqa: PLR0913 - the signature is the field's
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
        lstm: nn.LSTM | LSTM | None = None,
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
    """A GRU that steps in an environment and replays whole sequences, reset by ``is_init``.

    All is as in :class:`LSTMModule`, with one state ``[*B, L, H]`` instead of two and no projection.

    Args:
        input_size: I.
        hidden_size: H.
        num_layers: L; each layer feeds the next.
        bias: add biases.
        batch_first: must be True; there for the sake of ``torch.nn``'s signature.
        dropout: probability of dropping each output of each layer but the last, in training.
        bidirectional: also run each segment from its end to its start.
        python_based: as in :class:`LSTMModule`, and so are the next four.
        recurrent_backend: who runs sequences.
        recurrent_compute_dtype: dtype of the recurrent products' operands under ``"triton"``.
        recurrent_recompute: ``"none"`` or ``"full"``.
        recurrent_matmul_precision: precision of float32 products under ``"triton"``.
        in_key: key of the value; the state gets the key ``"recurrent_state"``.
        in_keys: keys of value and state; ``"is_init"`` may follow. Exclusive with ``in_key``.
        out_key: key of the features; the state goes to ``("next", "recurrent_state")``.
        out_keys: keys of features and state. Exclusive with ``out_key``.
        device: device of the parameters.
        dtype: dtype of the parameters.
        gru: a ``torch.nn.GRU`` (``batch_first=True``) that gives its Parameters; exclusive with sizes and options.
        default_recurrent_mode: the mode where none is set; False if not given.

    Raises:
        ArgumentError: a value is out of range, key arguments are missing, doubled or too many.
        ArgumentTypeError: an argument has the wrong type.

    Example:
        >>> import torch
        >>> gru = GRUModule(4, 8, in_keys=["observation", "rs"], out_keys=["features", ("next", "rs")])
        >>> features, state = gru(observation=torch.randn(3, 4), is_init=torch.ones(3, 1, dtype=torch.bool))
        >>> features.shape, state.shape
        (torch.Size([3, 8]), torch.Size([3, 1, 8]))
    """

    def __init__(  # noqa: PLR0913 - the signature is the field's
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
        gru: nn.GRU | GRU | None = None,
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

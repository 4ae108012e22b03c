"""``gated_matrix_recurrence``, and the operation "matrix" of kernels with a backward pass."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import cast

from torch import Tensor

from recurl.core.errors import ArgumentError
from recurl.core.torch_compat import is_compiling
from recurl.recurrence.backend import LayerCall, OperatorSupport, record_run, without_autocast
from recurl.recurrence.built_in import MATRIX, OPERATIONS
from recurl.recurrence.cells import States, remember
from recurl.recurrence.matrix.chunked import ChunkedMatrix
from recurl.recurrence.matrix.kernels import COMPUTED, MatrixInputs, MatrixKernels
from recurl.recurrence.operation import run_operation
from recurl.recurrence.operators import OperatorCell, OperatorLayer, check_types
from recurl.sequences.index import Boundaries
from recurl.sequences.stored import is_sparse, stored_everywhere

__all__ = ["gated_matrix_recurrence"]


def gated_matrix_recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    states: Tensor | None,
    boundaries: Boundaries,
    recurrent_backend: str = "fastest",
    *,
    delta: bool = False,
    after: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Write values into a matrix of each head, and read it, over the segments of a stream of N tokens.

    The state is ``S = a S + b k v^T``, or with ``delta`` ``S = a (I - b k k^T) S + b k v^T``, which first takes out
    what the state holds for the key; the result is ``S^T q``. Where a segment starts, the state stored at that token
    replaces the previous one. It is selected, not blended in, so NaN and infinities of other segments, and of states
    that aren't read, don't propagate.

    Without ``delta`` this is the recurrence of Mamba-2's SSD (Dao and Gu, "Transformers are SSMs", 2024) and of mLSTM
    (Beck et al., "xLSTM", 2024), with it that of Yang et al., "Gated delta networks" (2025).

    Args:
        query: q, ``[*B, heads, K]`` with N rows in all; scaled by the caller.
        key: k, ``[*B, heads, K]``.
        value: v, ``[*B, heads, V]``; float32, float64, bfloat16 or float16, like query and key.
        log_decay: logarithm of a, ``[*B, heads]``, usually at most 0; float32, or float64 if the values are.
        rate: b, ``[*B, heads]``, of the same dtype.
        states: stored states ``[*B, heads, K, V]`` of the same dtype, read only at the first token of each segment; or
            ``[N / S, heads, K, V]``, of every S-th token, where S divides T: segments that start elsewhere start from
            zeros. None for zeros.
        boundaries: the segments of the N tokens.
        recurrent_backend: ``"reference"``, ``"loop"``, ``"chunked"``, ``"cpu"``, ``"auto"`` (``loop``, or ``chunked``
            under ``torch.compile``) or ``"fastest"``.
        delta: whether what the state holds for a key is taken out before the value is written.
        after: whether states are returned.

    Returns:
        The results ``[*B, heads, V]``, of the values' dtype; and the states after the last token of each segment, zero
        at all other tokens, ``[*B, heads, K, V]``, or None.

    Raises:
        ArgumentTypeError: an argument isn't a tensor, or boundaries aren't :class:`Boundaries`.
        ArgumentError: shapes, dtypes or devices don't match, or there is no such backend.
        UnsupportedError: the backend can't run this call; the message states the reason.

    Example:
        >>> import torch
        >>> from recurl.recurrence import Boundaries
        >>> boundaries = Boundaries.from_is_init(torch.tensor([True, False, True]))
        >>> one = torch.ones(3, 1, 1)
        >>> half = torch.full((3, 1), 0.5)
        >>> result, after = gated_matrix_recurrence(one, one, one, half.log(), half, None, boundaries)
        >>> result.flatten().tolist(), after.flatten().tolist()
        ([0.5, 0.75, 0.5], [0.0, 0.75, 0.5])
    """
    optional = {} if states is None else {"states": states}
    check_types(boundaries, query=query, key=key, value=value, log_decay=log_decay, rate=rate, **optional)
    batch = value.shape[:-2]
    _check(query, key, value, log_decay, rate, states, boundaries)
    support = OperatorSupport(value.device, value.dtype, is_compiling(), key.shape[-1], value.shape[-1])
    kernels = MATRIX.choose(recurrent_backend, support)
    tokens, state_shape = boundaries.num_tokens, (value.shape[-2], key.shape[-1], value.shape[-1])
    if value.numel() == 0 or key.numel() == 0:
        empty = log_decay.new_zeros(*batch, *state_shape)
        return value * 0, empty if after else None

    def flat(part: Tensor) -> Tensor:
        return part.reshape(tokens, *part.shape[len(batch) :])

    stored = None if states is None else states.reshape(-1, *state_shape)
    if stored is not None and after:
        stored = stored_everywhere(stored, tokens)  # as large as the states after segments
    streams = (flat(query), flat(key), flat(value), flat(log_decay), flat(rate))
    result, *final = _run(kernels, MatrixInputs(*streams, stored, boundaries, delta, after))
    return result.reshape(value.shape), final[0].reshape(*batch, *state_shape) if after else None


def _check(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, rate: Tensor, states: Tensor | None, at: Boundaries
) -> None:
    if value.dtype not in COMPUTED or not query.dtype == key.dtype == value.dtype:
        served = ", ".join(str(dtype).removeprefix("torch.") for dtype in COMPUTED)
        raise ArgumentError(
            f"query, key and value of a matrix recurrence must have the same dtype, one of {served}; got "
            f"{query.dtype}, {key.dtype} and {value.dtype}. Convert them."
        )
    wide = [part for part in (log_decay, rate, states) if part is not None]
    if any(part.dtype != COMPUTED[value.dtype] for part in wide):
        raise ArgumentError(
            f"For values of {value.dtype}, log_decay, rate and states must be {COMPUTED[value.dtype]}; "
            f"got {', '.join(str(part.dtype) for part in wide)}. Convert them."
        )
    batch, heads = value.shape[:-2], value.shape[-2:-1]
    if value.ndim < 3 or math.prod(batch) != at.num_tokens:  # Size.numel() would fix dynamic sizes
        raise ArgumentError(
            f"value must be [*B, heads, V] with the N={at.num_tokens} tokens of the boundaries; got "
            f"{list(value.shape)}."
        )
    if len(batch) == len(at.batch_shape) and batch != at.batch_shape:
        raise ArgumentError(
            f"The boundaries are of {list(at.batch_shape)} tokens, the value {list(value.shape)} has {list(batch)}: "
            "transpose one of them, the last dimension is time."
        )
    if key.shape[:-1] != (*batch, *heads) or query.shape != key.shape:
        raise ArgumentError(
            f"For values of shape {list(value.shape)}, query and key must be {[*batch, *heads, 'K']}; got "
            f"{list(query.shape)} and {list(key.shape)}."
        )
    if not log_decay.shape == rate.shape == value.shape[:-1]:
        raise ArgumentError(
            f"log_decay and rate must have one number per token and head, {list(value.shape[:-1])}; got "
            f"{list(log_decay.shape)} and {list(rate.shape)}."
        )
    state_shape = (*key.shape[-2:], value.shape[-1])
    if states is not None and states.shape != (*batch, *state_shape) and not is_sparse(states, at, state_shape):
        raise ArgumentError(
            f"states must be [*B, heads, K, V], {[*batch, *state_shape]}, or [N / S, heads, K, V] where S divides the "
            f"T={at.batch_shape[-1]} tokens of a row; got {list(states.shape)}."
        )
    devices = {part.device for part in (query, key, value, *wide)} | {at.device}
    if len(devices) > 1:
        raise ArgumentError(
            f"All inputs and the boundaries must be on one device; got {', '.join(sorted(map(str, devices)))}."
        )


def _run(kernels: MatrixKernels, inputs: MatrixInputs) -> States:
    operation = OPERATIONS.get(f"matrix_{kernels.name}")
    if operation is not None:
        return run_operation(operation, _layer_call(inputs))
    if not is_compiling():
        record_run(kernels.name)
    with without_autocast(inputs.value.device):
        return kernels.forward(inputs, keep=False)[0]


@dataclass(frozen=True)
class _Matrix(OperatorCell, name="matrix recurrence"):
    """The recurrence: query is the input, and the other tensors are states, those with the shapes of results first.

    Attributes:
        delta: as in :class:`MatrixInputs`.
        stored: whether there are stored states; else zeros take their place.
        after: whether the states after segments are results.
    """

    delta: bool = False
    stored: bool = False
    after: bool = False
    fields, x, streams = MatrixInputs._fields[:6], "query", ("value", "states", "key", "log_decay", "rate")

    @property
    def state_names(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride] - by options
        return ("result", "after") if self.after else ("result",)


_CELLS = {flags: _Matrix(*flags) for flags in product((False, True), repeat=3)}
for _cell in _CELLS.values():
    remember(_cell)  # for programs that another process traced


def _layer_call(inputs: MatrixInputs) -> LayerCall:
    cell = _CELLS[inputs.delta, inputs.states is not None, inputs.after]
    if inputs.states is None:
        shape = (*inputs.key.shape, inputs.value.shape[-1])
        zeros = inputs.value.new_zeros((1,) * len(shape), dtype=COMPUTED[inputs.value.dtype]).expand(shape)
        inputs = inputs._replace(states=zeros)
    return cell.call(inputs[:6], inputs.boundaries)


class LayerKernels(OperatorLayer):
    """Kernels of matrix recurrences in the form of an :class:`~recurl.recurrence.operation.Operation`."""

    def inputs_of(self, call: LayerCall) -> MatrixInputs:
        """Return the inputs of a call."""
        cell = cast(_Matrix, call.cell)
        inputs = MatrixInputs._make((*cell.separated(call), call.boundaries, cell.delta, cell.after))
        return inputs if cell.stored else inputs._replace(states=None)

    def differentiable(self, call: LayerCall) -> States:
        """Return the results by operations of torch, on every device."""
        return ChunkedMatrix().forward(self.inputs_of(call), keep=False)[0]

"""``windowed_attention``, and the operation "attention" with its derivatives."""

from __future__ import annotations

from torch import Tensor

from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.core.precision import CONCRETE
from recurl.core.torch_compat import is_compiling
from recurl.recurrence.attention.chunked import attend
from recurl.recurrence.attention.kernels import DTYPES, AttentionInputs
from recurl.recurrence.backend import LayerCall, OperatorSupport, Options, record_run
from recurl.recurrence.built_in import ATTENTION, OPERATIONS
from recurl.recurrence.cells import States
from recurl.recurrence.operation import run_operation
from recurl.recurrence.operators import OperatorCell, OperatorLayer, check_types
from recurl.sequences.index import Boundaries
from recurl.sequences.stored import is_sparse

__all__ = ["windowed_attention"]


def windowed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor,
    boundaries: Boundaries,
    windows: Tensor | None = None,
    to_key: Tensor | None = None,
    to_value: Tensor | None = None,
    recurrent_backend: str = "fastest",
    precision: str = "ieee",
) -> Tensor:
    """Attend from each token of a flat stream to itself and the M tokens before it in its segment.

    The weights are the softmax of ``query * key`` plus the score of the distance, and the result is the weighted sum of
    values. The first M tokens of a segment also attend to the inputs stored where it starts, as far as these lie at
    most M steps back. A reset costs nothing, and the number of operations depends on N alone. Numbers that aren't
    finite reach only tokens that attend to them, and gradients that aren't finite only tokens that were attended to.

    Scores and sums are at least float32. Results are deterministic: the same inputs give the same bits.

    Args:
        query: ``[N, heads, D]``, scaled.
        key: ``[N, heads, D]``.
        value: ``[N, heads, D]``.
        position: scores of the distances 0 (the token itself) to M, ``[N, heads, M + 1]``; zeros for none. To leave out
            a distance, give it a finite score far below the others, such as -1e9: -inf isn't finite.
        boundaries: the segments of the N tokens.
        windows: the M inputs before each token, oldest first, ``[N, M, E]``, read only at the first token of each
            segment; or ``[N / S, M, E]``, those of every S-th token, where S divides the length of rows. The last
            number of an input is 1, or 0 where there is none.
        to_key: map from stored inputs to their keys, ``[heads, D, E]``.
        to_value: map from stored inputs to their values, ``[heads, D, E]``.
        recurrent_backend: ``"reference"``, ``"chunked"``, ``"triton"``, ``"auto"`` (``chunked``) or ``"fastest"``
            (``triton`` if supported, else ``chunked``). ``"loop"``, ``"scan"`` and ``"cpu"`` are other names of
            ``chunked``, so that every operator accepts them.
        precision: precision of products in float32 by ``triton``: ``"ieee"``, ``"tf32"`` or ``"tf32x3"``. The other
            backends follow ``torch.set_float32_matmul_precision``.

    Returns:
        ``[N, heads, D]``, differentiable in all tensors; by ``chunked`` also in forward mode, and to any order in eager
        mode.

    Raises:
        ArgumentTypeError: an argument isn't a tensor, or boundaries aren't :class:`Boundaries`.
        ArgumentError: shapes, dtypes or devices don't match, or there is no such backend.
        UnsupportedError: the backend can't run this call; the message states the reason.

    Example:
        >>> import torch
        >>> from recurl.recurrence import Boundaries
        >>> boundaries = Boundaries.from_is_init(torch.tensor([True, False, True, False]))
        >>> value = torch.tensor([1.0, 3.0, 10.0, 20.0]).reshape(4, 1, 1)
        >>> zeros = torch.zeros_like(value)
        >>> windowed_attention(zeros, zeros, value, torch.zeros(4, 1, 6), boundaries).flatten().tolist()
        [1.0, 2.0, 10.0, 15.0]
    """
    optional = {"windows": windows, "to_key": to_key, "to_value": to_value}
    given = {name: one for name, one in optional.items() if one is not None}
    check_types(boundaries, query=query, key=key, value=value, position=position, **given)
    _check_query(query, key, value, position, boundaries)
    if windows is None:
        if given:
            raise ArgumentError("to_key and to_value map stored windows: pass windows too, or leave all three out.")
        windows = query.new_zeros(query.shape[0], position.shape[-1] - 1, 0)
    inputs = AttentionInputs(query, key, value, position, windows, to_key, to_value, boundaries, precision)
    _check(inputs)
    support = OperatorSupport(query.device, query.dtype, is_compiling(), query.shape[-1], windows.shape[-1])
    kernels = ATTENTION.choose(recurrent_backend, support)
    if query.numel() == 0:
        return query.clone()
    if kernels.name != "reference":
        return run_operation(OPERATIONS[f"attention_{kernels.name}"], layer_call(inputs))[0]
    if is_compiling():
        raise UnsupportedError("The backend 'reference' loops over tokens on the host; under tracing use 'auto'.")
    record_run(kernels.name)
    return kernels.forward(inputs, keep=False)[0][0]


def _check_query(query: Tensor, key: Tensor, value: Tensor, position: Tensor, boundaries: Boundaries) -> None:
    if query.ndim != 3 or query.shape[0] != boundaries.num_tokens or not key.shape == value.shape == query.shape:
        raise ArgumentError(
            f"query, key and value must be [N, heads, D] with the N={boundaries.num_tokens} tokens of the boundaries; "
            f"got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}. Flatten a batch [*B, T, heads, D] "
            "into one stream; split a width that the heads divide by unflatten(-1, (heads, -1))."
        )
    if position.ndim != 3 or position.shape[:2] != query.shape[:2] or position.shape[2] < 2:
        raise ArgumentError(
            f"position must be [N, heads, M + 1] with M at least 1, for a query of shape {tuple(query.shape)}; "
            f"got {tuple(position.shape)}. Without scores of distances, pass zeros, which may be expanded."
        )


def _check(inputs: AttentionInputs) -> None:
    query, _, _, _, windows, to_key, to_value, boundaries, precision = inputs
    if precision not in CONCRETE:
        raise ArgumentError(f"precision must be one of {', '.join(CONCRETE)}; got {precision!r}.")
    past, (tokens, heads, size) = inputs.past, query.shape
    if windows.ndim != 3 or not is_sparse(windows, boundaries, (past, windows.shape[2])):
        raise ArgumentError(
            f"windows must be [N, M, E] with N={tokens} and M={past}, one less than the scores of position, or "
            f"[N / S, M, E] where S divides the T={boundaries.batch_shape[-1]} tokens of a row; "
            f"got {tuple(windows.shape)}."
        )
    width = windows.shape[2]
    maps = {name: one for name, one in (("to_key", to_key), ("to_value", to_value)) if one is not None}
    if width and (len(maps) < 2 or any(one.shape != (heads, size, width) for one in maps.values())):
        given = ", ".join(f"{name} {tuple(one.shape)}" for name, one in maps.items()) or "none"
        raise ArgumentError(
            f"to_key and to_value must map windows of width E={width} to keys and values, each "
            f"({heads}, {size}, {width}); got {given}."
        )
    tensors = [one for one in inputs.tensors if one is not None]
    if query.dtype not in DTYPES or any(one.dtype != query.dtype for one in tensors):
        served = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ArgumentError(
            f"All tensors of windowed attention must have the same dtype, one of {served}; "
            f"got {', '.join(sorted({str(one.dtype) for one in tensors}))}. Convert them."
        )
    if any(one.device != boundaries.device for one in tensors):
        raise ArgumentError(
            "All tensors of windowed attention and the boundaries must be on one device; "
            f"got {', '.join(sorted({str(one.device) for one in [*tensors, boundaries]}))}."
        )


class _Attention(OperatorCell, name="windowed attention"):
    """Attention: queries are the input, maps the weights, and all other tensors states."""

    state_names, parameter_names = ("attended",), ("to_key", "to_value")
    fields, x, streams = AttentionInputs._fields[:7], "query", ("key", "value", "position", "windows")


_CELL = _Attention()


def layer_call(inputs: AttentionInputs) -> LayerCall:
    """Return the inputs as a call of :class:`LayerKernels`."""
    return _CELL.call(inputs.tensors, inputs.boundaries, Options(precision=inputs.precision))


class LayerKernels(OperatorLayer):
    """Kernels of windowed attention in the form of an :class:`~recurl.recurrence.operation.Operation`."""

    def inputs_of(self, call: LayerCall) -> AttentionInputs:
        """Return the inputs of a call."""
        return AttentionInputs._make((*_CELL.separated(call), call.boundaries, call.options.precision))

    def differentiable(self, call: LayerCall) -> States:
        """Return the result by operations of torch, on every device."""
        return (attend(self.inputs_of(call)),)

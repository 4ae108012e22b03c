"""The call of torch.nn's recurrent layers, with resets: rows of sequences as one stream, or as a single step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import LSTM
from torch.nn.utils.rnn import PackedSequence

from recurl.core.devices import is_autocast_on
from recurl.core.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from recurl.core.precision import resolve_precision
from recurl.nn.plain import is_of_onnx, is_tracing, plain_layer
from recurl.nn.recurrent_net import RecurrentNet
from recurl.recurrence import Options
from recurl.sequences.index import Boundaries

__all__ = ["call", "call_padded"]

States = tuple[Tensor, ...]


def call(net: RecurrentNet, x: Any, initial: Any, resets: Any) -> tuple[Tensor, States]:
    """Run whole rows as ``torch.nn`` does, from zeros again at every step with a reset.

    Args:
        net: the network.
        x: ``[T, B, I]``, with ``batch_first`` ``[B, T, I]``; or ``[T, I]``.
        initial: states before the first step, each ``[L * D, B, *shape]`` (for ``[T, I]`` without B); zeros if None.
            That of a row isn't read if the row's first step has a reset.
        resets: bool, the shape of x without I: steps that begin a new episode. None for no resets.

    Returns:
        Features, x's shape with D * (P or H) in the place of I, and the states after the last step, like ``initial``.
        They share no memory.

    Raises:
        ArgumentError: shapes, dtypes or devices don't fit; resets of a bidirectional network together with states.
        ArgumentTypeError: x is packed; an argument isn't a tensor.
        UnsupportedError: traced by ``torch.jit`` with resets, or with a cell that torch.nn doesn't have.
    """
    if is_tracing() or (resets is None and is_of_onnx(net)):
        return _traced(net, x, initial, resets)
    _check_input(net, x)
    if resets is not None:
        _check_resets(net, x, resets)
    states = None if initial is None else _checked_states(net, x, initial)
    if x.ndim == 2:
        x = x.unsqueeze(0)
        resets = None if resets is None else resets.unsqueeze(0)
        states = None if states is None else tuple(state.unsqueeze(1) for state in states)
        features, final = _run(net, x, states, resets)
        return _own(features.squeeze(0)), tuple(state.squeeze(1) for state in final)
    if net.batch_first:
        features, final = _run(net, x, states, resets)
        return _own(features), final
    features, final = _run(net, x.transpose(0, 1), states, None if resets is None else resets.transpose(0, 1))
    return _own(features.transpose(0, 1)), final


def call_padded(net: RecurrentNet, x: Tensor, initial: Any, masks: Tensor) -> Tensor:
    """Run the steps of padded sequences, without the padding.

    Args:
        net: the network, of one direction and without ``batch_first``.
        x: ``[T, S, I]``.
        initial: states before the first step of each sequence, each ``[L, S, *shape]``.
        masks: bool ``[T, S]``, true at the first steps of each sequence, of which it has at least one.

    Returns:
        Features ``[N, P or H]`` of the N steps, sequence after sequence.
    """
    _check_input(net, x)
    states, flags = _checked_states(net, x, initial), masks.transpose(0, 1)
    tokens = x.transpose(0, 1)[flags]
    lengths = flags.sum(1)
    ends, total = lengths.cumsum(0), tokens.shape[0]
    starts = ends - lengths
    stored = tuple(
        one.new_zeros(total, *(one.shape[:1] + one.shape[2:])).index_copy(0, starts, one.transpose(0, 1))
        for one in states
    )
    cuts = Boundaries.from_cu_seqlens(torch.cat([starts[:1], ends]), total)
    features, _ = net.run(tokens, stored, cuts, net.recurrent_backend, _options(x)._replace(after=False))
    return _own(features)


def _traced(net: RecurrentNet, x: Tensor, initial: Any, resets: Any) -> tuple[Tensor, States]:
    """Record torch's own operations."""
    if resets is not None:
        raise UnsupportedError("torch.jit.trace can't record resets: use torch.export, or trace without resets=.")
    layer = plain_layer(net)
    pair = isinstance(layer, LSTM)
    features, final = layer(x, initial if pair or initial is None else initial[0])
    return features, final if pair else (final,)


def _options(x: Tensor) -> Options:
    return Options(precision=resolve_precision("auto", x.device) if x.is_cuda else "ieee")


def _own(features: Tensor) -> Tensor:
    """Return contiguous features; a copy if backward reads them, which edits in place, as of activations, may reach."""
    return features.clone(memory_format=torch.contiguous_format) if features.requires_grad else features.contiguous()


def _run(net: RecurrentNet, x: Tensor, states: States | None, resets: Tensor | None) -> tuple[Tensor, States]:
    """Run rows ``[B, T, I]``."""
    batch, time = x.shape[:2]
    rows = None if states is None else tuple(state.transpose(0, 1) for state in states)
    first = None if resets is None else resets[:, 0].clone()  # the caller may reuse the memory before backward
    options = _options(x)
    if time == 1 and not net.bidirectional:
        step, after = net.step(x[:, 0], rows, first, options)
        features = step.unsqueeze(1)
    else:
        stored, boundaries = _cut(net, x, rows, first, resets)
        tokens = x.reshape(batch * time, x.shape[-1])
        features, every = net.run(tokens, stored, boundaries, net.recurrent_backend, options)
        features = features.unflatten(0, (batch, time))
        after = tuple(state.unflatten(0, (batch, time))[:, -1] for state in every)
    # Copies: a view would keep the states of all steps alive, or be memory of the features.
    return features, tuple(state.transpose(0, 1).clone(memory_format=torch.contiguous_format) for state in after)


def _cut(
    net: RecurrentNet, x: Tensor, rows: States | None, first: Tensor | None, resets: Tensor | None
) -> tuple[States | None, Boundaries]:
    """Return the states of the first step of each row, as stored in the stream of all rows, and its segments."""
    batch, time = x.shape[:2]
    if resets is None or first is None:
        return rows, Boundaries.of_rows((batch, time), x.device)
    cuts = Boundaries.from_is_init(resets, batch_shape=resets.shape)
    if rows is None:
        return None, cuts
    if net.bidirectional:
        raise ArgumentError(
            "With resets a bidirectional network runs every segment from zeros in both directions: leave out the "
            "states, or the resets."
        )
    zeroed = (torch.where(first.reshape(batch, *(1,) * (one.ndim - 1)), 0, one) for one in rows)
    return tuple(zeroed), cuts


def _check_input(net: RecurrentNet, x: Any) -> None:
    if isinstance(x, PackedSequence):
        raise ArgumentTypeError(
            "Packed sequences aren't supported. Pad them (torch.nn.utils.rnn.pad_packed_sequence), or join several "
            "in one row and pass resets=, true where each begins."
        )
    if not isinstance(x, Tensor):
        raise ArgumentTypeError(f"The input must be a tensor, got {type(x).__name__}.")
    layout = "[B, T, I]" if net.batch_first else "[T, B, I]"
    if x.ndim not in (2, 3) or x.shape[-1] != net.input_size:
        raise ArgumentError(
            f"The input must have 2 dimensions, [T, I], or 3, {layout}, and end in input_size={net.input_size}; "
            f"got shape {list(x.shape)}."
        )
    if x.shape[1 if net.batch_first and x.ndim == 3 else 0] == 0:
        raise ArgumentError(f"A sequence must have at least one step, as in torch.nn; got shape {list(x.shape)}.")
    _check_kind(net, x, "The input")


def _check_kind(net: RecurrentNet, value: Tensor, what: str) -> None:
    if value.device != net.device:
        raise ArgumentError(f"{what} is on {value.device} but the parameters on {net.device}: move one with .to().")
    cast = value.is_floating_point() and is_autocast_on(net.device)
    if value.dtype != net.dtype and not cast:
        raise ArgumentError(f"{what} has dtype {value.dtype} but the parameters {net.dtype}: convert one with .to().")


def _check_resets(net: RecurrentNet, x: Tensor, resets: Any) -> None:
    if not isinstance(resets, Tensor):
        raise ArgumentTypeError(f"resets must be a bool tensor, got {type(resets).__name__}: use torch.as_tensor.")
    expected = x.shape[:-1]
    if resets.dtype != torch.bool or resets.shape != expected:
        advice = "Flags of another dtype are converted by .bool()."
        if resets.dtype == torch.bool:
            advice = "They lie as the input does: [B, T] with batch_first=True, else [T, B], and [T] for one row."
        raise ArgumentError(
            f"resets must be bool and have the input's shape without its last dimension, {list(expected)}; got "
            f"{list(resets.shape)} and {resets.dtype}. {advice}"
        )
    if resets.device != x.device:
        raise ArgumentError(f"resets are on {resets.device} but the input on {x.device}: move one with .to().")


def _checked_states(net: RecurrentNet, x: Tensor, initial: Any) -> States:
    names, several = ", ".join(net.cell.state_names), len(net.state_shapes) > 1
    tupled = several or isinstance(initial, Tensor)  # a GRU's state comes here in a tuple
    kind = f"a tuple of tensors ({names}{'' if several else ','})" if tupled else f"a tensor ({names})"
    if not isinstance(initial, tuple | list) or not all(isinstance(state, Tensor) for state in initial):
        raise ArgumentTypeError(
            f"The second argument must be the states before the first step, {kind}, or None for zeros; got "
            f"{type(initial).__name__}. Flags are passed by name, resets=."
        )
    batch = x.shape[: x.ndim - 2] if net.batch_first else x.shape[1:-1]
    slots = net.num_layers * net.num_directions
    expected = [[slots, *batch, *shape] for shape in net.state_shapes]
    if [list(state.shape) for state in initial] != expected:
        layout = "layers x directions, batch, ..." if batch else "layers x directions, ..."
        raise ArgumentError(
            f"The states ({names}) must have the shapes {expected} ({layout}), with layers before the batch also where "
            f"batch_first=True; got {[list(state.shape) for state in initial]}."
        )
    for name, state in zip(net.cell.state_names, initial, strict=True):
        _check_kind(net, state, f"The state {name}")
    return tuple(initial)

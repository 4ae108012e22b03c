"""Stacks of layers and directions with dropout between layers, shared by all backends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from recurl.core.autograd import custom_backward_allowed
from recurl.core.devices import is_autocast_on
from recurl.core.errors import ArgumentError
from recurl.core.torch_compat import is_compiling
from recurl.native.library import can_call
from recurl.recurrence.backend import DEFAULT_OPTIONS, Backend, LayerCall, Options
from recurl.recurrence.cells import Cell, Shape, States
from recurl.recurrence.cells import Weights as OneLayer
from recurl.recurrence.cpu.step import step as cpu_step
from recurl.sequences.index import Boundaries
from recurl.sequences.stored import stored_everywhere

Weights = Sequence[Sequence[OneLayer]]
"""Weights by layer, then by direction."""


def dropout_masks(num_layers: int, shape: Sequence[int], p: float, like: Tensor) -> list[Tensor] | None:
    """Sample the dropout masks between layers: ``num_layers - 1`` tensors of ``shape`` with values 0 or 1 / (1 - p).

    Returns None if nothing is dropped (p = 0 or a single layer).
    """
    if p == 0.0 or num_layers == 1:
        return None
    ones = torch.ones(tuple(shape), dtype=like.dtype, device=like.device)
    return [F.dropout(ones, p) for _ in range(num_layers - 1)]


def run_stack(
    backend: Backend,
    cell: Cell,
    weights: Weights,
    x: Tensor,
    states: States | None,
    boundaries: Boundaries,
    masks: Sequence[Tensor] | None = None,
    options: Options = DEFAULT_OPTIONS,
    shapes: Sequence[Shape] = (),
) -> tuple[Tensor, States]:
    """Run all layers and directions over the tokens of a batch.

    Args:
        backend: backend that runs each layer.
        cell: the cell.
        weights: weights by layer, then by direction; L layers, D directions.
        x: input ``[*B, I]``, N tokens in row-major order.
        states: stored states, each ``[*B, L * D, *shape]``, in the layer order of ``torch.nn``, read only at segment
            starts; or with T / S in place of T, those of every S-th step. None means zeros.
        boundaries: the segments.
        masks: result of :func:`dropout_masks` for ``[N, D * (P or H)]``, multiplied into the input of layers 2 to L.
        options: computation options.
        shapes: shape of each state, used if ``states`` is None.

    Returns:
        Features ``[*B, D * (P or H)]`` and the states after every token, each ``[*B, L * D, *shape]``. The reverse
        direction starts at the last token of a segment from the state stored at its first token. Its final state is
        returned at the last token, with zeros elsewhere. No states if ``options.after`` is false.

    Under autocast, every backend casts x and the states to the dtype of the weights and computes in it, since rounding
    errors of a recurrence accumulate over time.
    """
    if is_autocast_on(x.device):
        dtype = _dtype_of(weights)
        with torch.autocast(x.device.type, enabled=False):
            cast = None if states is None else tuple(state.to(dtype) for state in states)
            return run_stack(backend, cell, weights, x.to(dtype), cast, boundaries, masks, options, shapes)
    batch, slots = x.shape[:-1], sum(map(len, weights))
    reads_sparse = getattr(backend, "reads_sparse_states", False)
    after: list[States] = []
    features = x.reshape(boundaries.num_tokens, x.shape[-1])
    for depth, layer in enumerate(weights):
        if depth and masks is not None:
            features = features * masks[depth - 1]
        outputs: list[Tensor] = []
        for direction, direction_weights in enumerate(layer):
            index = depth * len(layer) + direction
            sparse = cell.read_at_starts if reads_sparse and not direction else ()
            stored = _stored(features, states, index, slots, len(batch), shapes)
            stored = _spread(stored, [name in sparse for name in cell.state_names], features.shape[0])
            run = _run_reversed if direction else _run_forward
            output, final = run(backend, LayerCall(cell, direction_weights, features, stored, boundaries, options))
            outputs.append(output)
            after.append(final if options.after else ())
        features = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
    if not options.after:
        return features.reshape(*batch, features.shape[-1]), ()
    if slots == 1:
        features = _apart(features)
        finals = tuple([state.reshape(*batch, 1, *state.shape[1:]) for state in after[0]])
    else:
        stacks = [torch.stack(state, 1) for state in zip(*after, strict=True)]
        finals = tuple([state.reshape(*batch, *state.shape[1:]) for state in stacks])
    return features.reshape(*batch, features.shape[-1]), finals


def _apart(features: Tensor) -> Tensor:
    """Return features that share no memory with the states, so that an in-place edit leaves the states alone.

    Where the features of sequences require a gradient, such an edit raises an error instead.
    """
    return features if features.requires_grad else features.clone()


def _dtype_of(weights: Weights) -> torch.dtype:
    return next(weight for weight in weights[0][0] if weight is not None).dtype


def _stored(x: Tensor, states: States | None, index: int, slots: int, lead: int, shapes: Sequence[Shape]) -> States:
    """Return one layer and direction of the states, each ``[N / S, *shape]``, as views if possible.

    ``lead`` is the number of batch dimensions.
    """
    if states is not None:
        of_slot = states if slots == 1 else [state.select(lead, index) for state in states]
        first = lead + (slots == 1)
        return tuple([state.reshape(math.prod(state.shape[:lead]), *state.shape[first:]) for state in of_slot])
    # A separate zero for each state: a compiled scan doesn't accept tensors that share memory.
    return tuple(x.new_zeros((1,) * (1 + len(shape))).expand(x.shape[0], *shape) for shape in _require_shapes(shapes))


def _spread(stored: States, sparse: Sequence[bool], tokens: int) -> States:
    """Return the states of every token, except those that may be sparse."""
    each = zip(stored, sparse, strict=True)
    return tuple([one if kept else stored_everywhere(one, tokens) for one, kept in each])


def _require_shapes(shapes: Sequence[Shape]) -> Sequence[Shape]:
    if not shapes:
        raise ArgumentError("states=None means zeros of the shapes in shapes=, which is empty: pass either of the two.")
    return shapes


def _run_forward(backend: Backend, call: LayerCall) -> tuple[Tensor, States]:
    if call.x.shape[0] > 0:
        return backend.run(call)
    return call.cell.step(call.x, call.states, *call.weights)  # no rows, but still attached to the autograd graph


def _run_reversed(backend: Backend, call: LayerCall) -> tuple[Tensor, States]:
    boundaries = call.boundaries
    start = boundaries.start_index
    stored = tuple(state.index_select(0, start).flip(0) for state in call.states)
    flipped = replace(call, x=call.x.flip(0), states=stored, boundaries=boundaries.flipped)
    features, after = _run_forward(backend, flipped)
    if not call.options.after:
        return features.flip(0), ()
    final = tuple(at_ends(boundaries.ends, state.flip(0).index_select(0, start)) for state in after)
    return features.flip(0), final


def at_ends(ends: Tensor, state: Tensor) -> Tensor:
    """Return states ``[N, ...]`` at the tokens ``ends``, bool ``[N]``, and zeros elsewhere."""
    return torch.where(ends.reshape(-1, *(1,) * (state.ndim - 1)), state, 0)


def step_stack(
    cell: Cell,
    weights: Weights,
    x: Tensor,
    states: States | None,
    masks: Sequence[Tensor] | None = None,
    fused: bool = True,
    is_init: Tensor | None = None,
    shapes: Sequence[Shape] = (),
    options: Options = DEFAULT_OPTIONS,
) -> tuple[Tensor, States]:
    """Run one step of all layers (one direction): x ``[B, I]``, states ``[B, L, *shape]`` -> features, states after.

    Args:
        cell: the cell.
        weights: weights by layer, of one direction.
        x: input ``[B, I]``.
        states: states before the step, each ``[B, L, *shape]``, or None for zeros.
        masks: result of :func:`dropout_masks` for ``[B, P or H]``.
        fused: use the kernels of the cpu and triton backends or the cell's fused step instead of its definition.
        is_init: bool ``[B]`` or ``[B, 1]``: rows that start from zero, whatever ``states`` hold.
        shapes: shape of each state, used if ``states`` is None.
        options: computation options for the step kernel of the triton backend.

    Autocast is handled as in :func:`run_stack`.
    """
    if is_autocast_on(x.device):
        dtype = _dtype_of(weights)
        with torch.autocast(x.device.type, enabled=False):
            cast = None if states is None else tuple(state.to(dtype) for state in states)
            return step_stack(cell, weights, x.to(dtype), cast, masks, fused, is_init, shapes, options)
    if fused and masks is None:
        result = _step_by_kernels(cell, weights, x, states, is_init, options)
        if result is not None:
            return result
    if states is None:
        states = tuple(x.new_zeros(x.shape[0], len(weights), *shape) for shape in _require_shapes(shapes))
    elif is_init is not None:
        states = tuple(state.masked_fill(is_init.reshape(-1, *(1,) * (state.ndim - 1)), 0) for state in states)
    # torch can't vmap ATen's fused kernels, nor propagate tangents through them on every device.
    # On a GPU, Inductor fuses the definition into one kernel but can't see into the fused operation.
    known = not x.is_cuda if is_compiling() else custom_backward_allowed()
    step = _fused_step(cell, x) if fused and known else cell.step
    after: list[States] = []
    features = x
    for depth, (layer,) in enumerate(weights):
        if depth and masks is not None:
            features = features * masks[depth - 1]
        features, state_after = step(features, tuple(state[:, depth] for state in states), *layer)
        after.append(state_after)
    if len(after) == 1:  # windows and matrices are large: only the features are copied
        return features.clone(), tuple(state.unsqueeze(1) for state in after[0])
    return features, tuple(torch.stack(state, 1) for state in zip(*after, strict=True))


def _step_by_kernels(
    cell: Cell, weights: Weights, x: Tensor, states: States | None, is_init: Tensor | None, options: Options
) -> tuple[Tensor, States] | None:
    if _is_on_gpu(x):
        from recurl.recurrence.cuda.step import operation as triton  # noqa: PLC0415 - needed only on a GPU

        if triton.can_step_on(x):
            return triton.step(cell, weights, x, states, is_init, options)
    return cpu_step(cell, weights, x, states, is_init) if can_call() else None


def _fused_step(cell: Cell, x: Tensor) -> Callable[..., tuple[Tensor, States]]:
    """Return the cell's fused step, or on a GPU its step with kernels for what accesses past steps."""
    if not (cell.takes_time and _is_on_gpu(x) and type(cell).fused_step is Cell.fused_step):
        return cell.fused_step
    from recurl.recurrence.cuda.kernel_step import KERNEL_STEP  # noqa: PLC0415 - needed only on a GPU

    return partial(cell.step, time=KERNEL_STEP)


def _is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda

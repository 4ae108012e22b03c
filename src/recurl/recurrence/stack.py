"""Layers, directions and dropout between layers, written once for all backends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from recurl.autograd import first_derivatives_do
from recurl.recurrence.backend import DEFAULT_OPTIONS, Backend, LayerCall, Options
from recurl.recurrence.boundaries import Boundaries
from recurl.recurrence.cells import Cell, LayerWeights, States
from recurl.recurrence.cpu.step import can_step
from recurl.recurrence.cpu.step import step as cpu_step

Weights = Sequence[Sequence[LayerWeights]]
"""Weights by layer, then by direction."""


def dropout_masks(num_layers: int, shape: Sequence[int], p: float, like: Tensor) -> list[Tensor] | None:
    """Draw the masks between layers: ``num_layers - 1`` tensors of ``shape`` holding 0 or 1 / (1 - p).

    None when nothing is dropped (p = 0 or a single layer).
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
) -> tuple[Tensor, States]:
    """Run all layers and directions over a flat stream.

    Args:
        backend: who runs each layer.
        cell: the cell.
        weights: by layer, then by direction; L layers, D directions.
        x: input ``[N, I]``.
        states: stored states, each ``[N, L * D, P or H]`` (or H), in the layer order of ``torch.nn``; read at segment
            starts only. None stands for zeros.
        boundaries: the segments.
        masks: what :func:`dropout_masks` returns for ``[N, D * (P or H)]``, multiplied into the input of layers 2 to L.
        options: how to compute.

    Returns:
        Features ``[N, D * (P or H)]`` and the states after every token, each ``[N, L * D, ...]``. A reverse direction
        starts at a segment's last token from the state stored at its first; its final state stands at the segment's
        last token, with zeros elsewhere.

    Under autocast everything is computed in the dtype of the weights, by every backend, to which x and the states are
    cast: rounding in a recurrence adds up over time.
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = weights[0][0].w_ih.dtype
        with torch.autocast(x.device.type, enabled=False):
            cast = None if states is None else tuple(state.to(dtype) for state in states)
            return run_stack(backend, cell, weights, x.to(dtype), cast, boundaries, masks, options)
    after: list[States] = []
    features = x
    for depth, layer in enumerate(weights):
        if depth and masks is not None:
            features = features * masks[depth - 1]
        outputs: list[Tensor] = []
        for direction, direction_weights in enumerate(layer):
            index = depth * len(layer) + direction
            stored = _stored(cell, direction_weights, features, states, index)
            run = _run_reversed if direction else _run_forward
            output, final = run(backend, LayerCall(cell, direction_weights, features, stored, boundaries, options))
            outputs.append(output)
            after.append(final)
        features = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
    if len(after) == 1:
        if not torch.is_grad_enabled():  # else autograd refuses what would change features and states at once
            features = features.clone()
        return features, tuple(state.unsqueeze(1) for state in after[0])
    return features, tuple(torch.stack(state, 1) for state in zip(*after, strict=True))


def _stored(cell: Cell, weights: LayerWeights, x: Tensor, states: States | None, index: int) -> States:
    if states is not None:
        return tuple(state[:, index] for state in states)
    # A zero for each: a compiled scan takes no tensors that share memory.
    return tuple(x.new_zeros(1, 1).expand(x.shape[0], size) for size in weights.state_sizes(cell))


def _run_forward(backend: Backend, call: LayerCall) -> tuple[Tensor, States]:
    if call.x.shape[0] > 0:
        return backend.run(call)
    after = call.weights.step(call.cell, call.x, call.states)  # no rows, but a gradient for all that it depends on
    return after[0], after


def _run_reversed(backend: Backend, call: LayerCall) -> tuple[Tensor, States]:
    boundaries = call.boundaries
    start = boundaries.start_index
    stored = tuple(state.index_select(0, start).flip(0) for state in call.states)
    flipped = replace(call, x=call.x.flip(0), states=stored, boundaries=boundaries.flipped)
    features, after = _run_forward(backend, flipped)
    ends = boundaries.ends.unsqueeze(-1)
    final = tuple(torch.where(ends, state.flip(0).index_select(0, start), 0) for state in after)
    return features.flip(0), final


def step_stack(
    cell: Cell,
    weights: Weights,
    x: Tensor,
    states: States | None,
    masks: Sequence[Tensor] | None = None,
    fused: bool = True,
    is_init: Tensor | None = None,
) -> tuple[Tensor, States]:
    """Run one step of all layers (one direction): x ``[B, I]``, states ``[B, L, ...]`` -> features, states after.

    Args:
        cell: the cell.
        weights: by layer, of one direction.
        x: input ``[B, I]``.
        states: ``[B, L, P or H]`` (and ``[B, L, H]``), or None for zeros.
        masks: what :func:`dropout_masks` returns for ``[B, P or H]``.
        fused: by the cpu backend's or ATen's cell kernels; otherwise from the definition.
        is_init: bool ``[B]`` or ``[B, 1]``: rows that start from zero, whatever ``states`` hold.

    Under autocast as :func:`run_stack`.
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = weights[0][0].w_ih.dtype
        with torch.autocast(x.device.type, enabled=False):
            cast = None if states is None else tuple(state.to(dtype) for state in states)
            return step_stack(cell, weights, x.to(dtype), cast, masks, fused, is_init)
    if fused and masks is None and can_step():
        result = cpu_step(cell, weights, x, states, is_init)
        if result is not None:
            return result
    if states is None:
        states = tuple(x.new_zeros(x.shape[0], len(weights), size) for size in weights[0][0].state_sizes(cell))
    elif is_init is not None:
        states = tuple(state.masked_fill(is_init.reshape(-1, 1, 1), 0) for state in states)
    # Torch can neither map ATen's kernels nor, on every device, carry tangents through them.
    kernel = fused and (torch.compiler.is_compiling() or first_derivatives_do())
    after: list[States] = []
    features = x
    for depth, (layer,) in enumerate(weights):
        if depth and masks is not None:
            features = features * masks[depth - 1]
        step = layer.fast_step if kernel else layer.step
        after.append(step(cell, features, tuple(state[:, depth] for state in states)))
        features = after[-1][0]
    return features, tuple(torch.stack(state, 1) for state in zip(*after, strict=True))

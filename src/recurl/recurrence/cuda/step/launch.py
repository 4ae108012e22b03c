"""Launches of the step kernel, on tensors. Imported only if Triton is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from recurl.recurrence.cells import States
from recurl.recurrence.cells.gated import LayerWeights
from recurl.recurrence.cuda.launch import on, processors_of, start
from recurl.recurrence.cuda.step.config import StepTile, tile_for_step
from recurl.recurrence.cuda.step.kernel import step_kernel


def run_step(
    layers: Sequence[LayerWeights],
    x: Tensor,
    states: States,
    is_init: Tensor | None,
    precision: str,
    tile_for: Callable[[int, int, int], StepTile] = tile_for_step,
) -> tuple[Tensor, States]:
    """Return the features ``[B, H]`` and the states ``[B, L, H]`` after a step of all layers, one kernel per layer.

    Args:
        layers: weights by layer.
        x: ``[B, I]``.
        states: each ``[B, L, H]``.
        is_init: bool ``[B]`` or ``[B, 1]``, or None if no row starts from zero.
        precision: ``"ieee"`` (accurate to float32), ``"tf32"`` or ``"bf16"``.
        tile_for: rule for the tile.
    """
    rows, hidden = x.shape[0], layers[0].hidden_size
    features = x.new_empty(rows, hidden)
    after = tuple(x.new_empty(rows, len(layers), hidden) for _ in states)
    if rows == 0:
        return features, after
    tile = tile_for(rows, hidden, processors_of(x.device))
    flags = None if is_init is None else is_init.reshape(rows).contiguous().view(torch.uint8)
    states = tuple(_unit_stride(state) for state in states)
    launch = start(step_kernel, -(-rows // tile.rows) * -(-hidden // tile.units))
    x = _unit_stride(x)
    with on(x.device):
        for depth, w in enumerate(layers):
            h, c = states[0][:, depth], states[-1][:, depth]
            h_after, c_after = after[0][:, depth], after[-1][:, depth]
            w_ih, w_hh = w.w_ih.contiguous(), w.w_hh.contiguous()
            b_ih, b_hh = (w_ih if bias is None else bias.contiguous() for bias in (w.b_ih, w.b_hh))
            launch(
                *(x, x.stride(0), h, h.stride(0), c, c.stride(0), w_ih, w_hh, b_ih, b_hh),
                *(x if flags is None else flags, features, h_after, c_after, h_after.stride(0)),
                *(rows, x.shape[1], hidden),
                LSTM=len(states) == 2,
                IN_BIAS=w.b_ih is not None,
                HIDDEN_BIAS=w.b_hh is not None,
                RESETS=flags is not None,
                FEATURES=depth == len(layers) - 1,
                PRECISION=precision,
                ROWS=tile.rows,
                UNITS=tile.units,
                DEPTH=tile.depth,
                STAGES=tile.stages,
                num_warps=tile.warps,
            )
            x = h_after
    return features, after


def _unit_stride(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

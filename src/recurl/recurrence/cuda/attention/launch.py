"""Launches of the attention kernels, on tensors. Imported only if Triton is installed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recurl.recurrence.attention.kernels import AttentionInputs, Gradients, Needs
from recurl.recurrence.cells.attention import Attention
from recurl.recurrence.cuda.attention.config import Tiles, aligned, padded
from recurl.recurrence.cuda.attention.kernels import forward_kernel, keys_kernel, queries_kernel
from recurl.recurrence.cuda.attention.step import step_kernel
from recurl.recurrence.cuda.attention.stored import read_backward_kernel, read_kernel
from recurl.recurrence.cuda.hardware import ALL_REGISTERS
from recurl.recurrence.cuda.launch import on
from recurl.recurrence.cuda.prepared import prepared
from recurl.sequences.stored import spacing_of

_MANY_HEADS = 32  # see Tiles: products of more rows by few warps only
_PRECISIONS = {"ieee": "tf32x3", "tf32x3": "tf32x3", "tf32": "tf32"}  # three products are accurate to float32


def run_forward(inputs: AttentionInputs, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Return the result, and the logarithms (base 2) of the sums of exponentials, float32 ``[N, heads]``."""
    query, key, value, position = _contiguous(inputs)
    tokens, heads, _ = query.shape
    result = torch.empty_like(query)
    totals = query.new_empty(tokens, heads, dtype=torch.float32)
    start = inputs.boundaries.start_index
    with on(query.device):
        run = prepared(forward_kernel, -(-tokens // tiles.held), heads, **constants_of(inputs, tiles))
        run(query, key, value, position, start, result, totals, tokens)
        if inputs.to_key is not None and inputs.to_value is not None:
            windows, maps = _windows(inputs), (inputs.to_key.contiguous(), inputs.to_value.contiguous())
            read = prepared(read_kernel, -(-tokens // tiles.readers), heads, **stored_constants_of(inputs, tiles))
            read(query, position, start, *windows, *maps, result, totals, tokens)
    return result, totals


def run_backward(
    inputs: AttentionInputs, result: Tensor, totals: Tensor, grad: Tensor, needs: Needs, tiles: Tiles
) -> Gradients:
    """Return the gradients of all inputs, with None for the windows."""
    query, key, value, position = _contiguous(inputs)
    grad, (tokens, heads, _), width = grad.contiguous(), query.shape, inputs.windows.shape[-1]
    start, flags = inputs.boundaries.start_index, inputs.boundaries.flags
    to_query, to_key, to_value = (torch.empty_like(query) for _ in range(3))
    to_position, deltas = torch.empty_like(position), torch.empty_like(totals)
    to_maps: tuple[Tensor | None, Tensor | None] = (None, None)
    programs = -(-tokens // tiles.held)
    with on(query.device):
        run = prepared(queries_kernel, programs, heads, **constants_of(inputs, tiles))
        run(query, key, value, position, start, result, totals, grad, to_query, to_position, deltas, tokens)
        if needs[1] or needs[2]:
            run = prepared(keys_kernel, programs, heads, **keys_constants_of(inputs, tiles))
            run(query, key, value, position, flags, totals, grad, deltas, to_key, to_value, tokens)
        if inputs.to_key is not None and inputs.to_value is not None:
            windows, maps = _windows(inputs), (inputs.to_key.contiguous(), inputs.to_value.contiguous())
            constants = {**stored_constants_of(inputs, tiles), "SPAN": aligned(width)}
            to_readers, sums = (query.new_zeros(tokens, heads, constants["SPAN"]) for _ in range(2))
            read = prepared(read_backward_kernel, -(-tokens // tiles.readers), heads, **constants)
            given = (query, position, start, *windows, *maps, totals, grad, deltas)
            read(*given, to_query, to_position, to_readers, sums, tokens)
            # The rows of sick tokens are NaN if they read a window, and zero times NaN would be NaN if they don't.
            sick = ~deltas.isfinite().unsqueeze(-1)
            queries, grads = (torch.where(sick, 0, one) for one in (query, grad))
            to_maps = (
                _product(queries, to_readers, width) if needs[5] else None,
                _product(grads, sums, width) if needs[6] else None,
            )
    found = (to_query, to_key, to_value, to_position, None)
    return *(one if need else None for one, need in zip(found, needs[:5], strict=True)), *to_maps


def run_step(attention: Attention, inputs: Tensor, before: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """Return the result of one step of R rows, ``[R, heads, D]``, and the windows after it."""
    query, key, value, position, to_key, to_value = (one.contiguous() for one in attention)
    (rows, heads, size), (_, past, width) = query.shape, before.shape
    before = before if before.stride(2) == 1 else before.contiguous()
    readers = torch.einsum("rhd,hde->rhe", query, to_key).contiguous()
    own, sums, after = query.new_empty(rows, heads, 1), torch.empty_like(readers), query.new_empty(before.shape)
    with on(query.device):
        run = prepared(step_kernel, rows, **step_constants(heads, size, past, width, precision))
        run(query, key, readers, position, before, *before.stride()[:2], inputs.contiguous(), own, sums, after)
    return torch.einsum("rhe,hde->rhd", sums, to_value) + own * value, after


def step_constants(heads: int, size: int, past: int, width: int, precision: str) -> dict[str, Any]:
    """Return the constants and options of the kernel of one step."""
    return {
        "HEADS": heads,
        "HEADS_PADDED": padded(heads),
        "PAST": past,
        "WIDTH": size,
        "PADDED": padded(size),
        "WIDE": width - 1,
        "WIDE_PADDED": padded(width - 1),
        "STORED": 32 if width <= 513 else 16,
        "PRECISION": _PRECISIONS[precision],
        "num_warps": 4 if heads <= _MANY_HEADS else 2,
        "num_stages": 2,
        "maxnreg": ALL_REGISTERS,
    }


def _product(rows: Tensor, wide: Tensor, width: int) -> Tensor:
    """Return the sum over tokens of outer products, of the numbers before the padding."""
    return torch.einsum("nhd,nhe->hde", rows, wide)[..., :width].contiguous()


def _contiguous(inputs: AttentionInputs) -> tuple[Tensor, ...]:
    return tuple(one.contiguous() for one in inputs[:4])


def _windows(inputs: AttentionInputs) -> tuple[Tensor, int, int, int]:
    """Return windows whose inputs are contiguous, the strides of windows and inputs, and their spacing."""
    windows = inputs.windows if inputs.windows.stride(2) == 1 else inputs.windows.contiguous()
    return windows, windows.stride(0), windows.stride(1), spacing_of(windows, inputs.query.shape[0])


def constants_of(inputs: AttentionInputs, tiles: Tiles) -> dict[str, Any]:
    """Return the constants and options of the kernels that hold queries and walk over keys."""
    _, heads, width = inputs.query.shape
    return {
        "HEADS": heads,
        "WINDOW": inputs.past,
        "WIDTH": width,
        "PADDED": padded(width),
        "QUERIES": tiles.held,
        "KEYS": tiles.walked,
        "PRECISION": _PRECISIONS[inputs.precision],
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }


def keys_constants_of(inputs: AttentionInputs, tiles: Tiles) -> dict[str, Any]:
    """Return the constants and options of the kernel that holds keys and walks over queries."""
    others = {"WINDOW_PADDED": padded(inputs.past), "QUERIES": tiles.walked, "KEYS": tiles.held}
    options = {"num_stages": tiles.keys_stages, "maxnreg": tiles.keys_registers}
    return {**constants_of(inputs, tiles), **others, **options}


def stored_constants_of(inputs: AttentionInputs, tiles: Tiles) -> dict[str, Any]:
    """Return the constants and options of the kernels that read windows."""
    _, heads, width = inputs.query.shape
    wide = inputs.windows.shape[-1] - 1
    return {
        "HEADS": heads,
        "PAST": inputs.past,
        "PAST_PADDED": padded(inputs.past),
        "WIDTH": width,
        "PIECE": 32 if padded(wide) <= 512 and padded(width) >= 32 else 16,
        "WIDE": wide,
        "WIDE_PADDED": padded(wide),
        "READERS": tiles.readers,
        "STORED": tiles.stored,
        "PRECISION": _PRECISIONS[inputs.precision],
        "num_warps": tiles.reading_warps,
        "num_stages": 1,
        "maxnreg": tiles.reading_registers,
    }

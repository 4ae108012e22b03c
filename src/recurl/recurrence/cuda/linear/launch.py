"""Launches of the linear recurrence kernels, on tensors. Imported only if Triton is installed."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from recurl.recurrence.cuda.launch import on, start
from recurl.recurrence.cuda.linear.config import Chunk
from recurl.recurrence.cuda.linear.kernels import backward_kernel, forward_kernel
from recurl.recurrence.cuda.linear.parts import EMPTY
from recurl.recurrence.cuda.pointwise import sums_kernel
from recurl.recurrence.cuda.prepared import prepared
from recurl.recurrence.linear.kernels import ACCUMULATED, Gradients, LinearInputs, Needs

_SUMMED_COLUMNS = 4
_SUMMED = {"ROWS": 256, "COLUMNS": _SUMMED_COLUMNS, "num_warps": 8}
_KINDS = {torch.complex64: "packed", torch.complex128: "pairs"}


def run_forward(inputs: LinearInputs, chunk: Chunk) -> Tensor:
    """Return h."""
    a, b, states, boundaries = inputs
    h = torch.empty_like(b, memory_format=torch.contiguous_format)
    grid = _Grid(chunk, b)
    with on(b.device):
        start(forward_kernel, grid.programs)(
            *(_raw(a.contiguous()), _raw(b.contiguous()), *_rows(states)),
            *(boundaries.flags, _raw(h), *grid.arguments),
            **{"CONSTANT": a.ndim == 1, **grid.constants},
        )
    return h


def run_backward(inputs: LinearInputs, h: Tensor, grad: Tensor, needs: Needs, chunk: Chunk) -> Gradients:
    """Return the gradients of a, b and states."""
    a, _, states, boundaries = inputs
    constant, grid = a.ndim == 1, _Grid(chunk, h)
    made = zip((a, h, h), needs, strict=True)
    grad_a, grad_b, grad_states = (h.new_empty(like.shape if need else 0) for like, need in made)
    to_a = _raw(grad_a)
    if constant and needs[0]:
        to_a = _reals(h.new_empty(grid.chunks, *a.shape, dtype=ACCUMULATED[h.dtype]))
    with on(h.device):
        start(backward_kernel, grid.programs)(
            *(_raw(a.contiguous()), _raw(h.contiguous()), _raw(grad.contiguous()), *_rows(states)),
            *(boundaries.flags, to_a, _raw(grad_b), _raw(grad_states), *grid.arguments),
            **{"CONSTANT": constant, "TO_A": needs[0], "TO_B": needs[1], "TO_STATES": needs[2], **grid.constants},
        )
        if constant and needs[0]:
            total = _reals(grad_a)
            columns = total.numel()
            sums = prepared(sums_kernel, 1, -(-columns // _SUMMED_COLUMNS), **_SUMMED)
            sums(to_a, total, grid.chunks, grid.chunks, columns)
    return grad_a if needs[0] else None, grad_b if needs[1] else None, grad_states if needs[2] else None


class _Grid:
    """Division of a stream into chunks, and the board on which they publish."""

    def __init__(self, chunk: Chunk, stream: Tensor) -> None:
        tokens, width = stream.shape
        words = 2 if stream.is_complex() else 1
        blocks = -(-width // chunk.columns)
        self.chunks = -(-tokens // (chunk.steps * chunk.rows))
        groups = -(-self.chunks // chunk.group)
        self.programs = self.chunks * blocks
        size = (2 * self.chunks + groups) * words * width
        board = torch.full((size,), EMPTY, dtype=torch.int64, device=stream.device)
        self.arguments = (board, 2 * self.chunks * words * width, tokens)
        wide = ACCUMULATED[stream.dtype]
        self.constants: dict[str, Any] = {
            "WIDTH": width,
            "BLOCKS": blocks,
            "KIND": _KINDS.get(stream.dtype, "real"),
            "ACC": tl.float32 if wide == torch.float32 else tl.float64,
            "STEPS": chunk.steps,
            "ROWS": chunk.rows,
            "COLUMNS": chunk.columns,
            "GROUP": chunk.group,
            "maxnreg": chunk.registers,
        }


def _raw(tensor: Tensor) -> Tensor:
    """Return a tensor as kernels read it: complex64 as words, complex128 as float64; strides count complex numbers."""
    if tensor.is_complex():
        tensor = tensor.resolve_conj()
        return tensor.view(torch.int64) if tensor.dtype == torch.complex64 else torch.view_as_real(tensor)
    return tensor.resolve_neg()


def _reals(tensor: Tensor) -> Tensor:
    """Return a tensor of real numbers: of real and imaginary parts."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _rows(states: Tensor) -> tuple[Tensor, int]:
    """Return rows, which may all be the same one, and their stride."""
    if states.stride(1) != 1:
        states = states.contiguous()
    return _raw(states), states.stride(0)

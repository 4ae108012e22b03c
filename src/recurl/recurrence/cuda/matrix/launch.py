"""Launches of the matrix recurrence kernels, on tensors. Imported only if Triton is installed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recurl.recurrence.cells import States
from recurl.recurrence.cuda.launch import on, processors_of
from recurl.recurrence.cuda.matrix.backward import backward_kernel
from recurl.recurrence.cuda.matrix.config import Plan, Tile, padded, step_tile_for
from recurl.recurrence.cuda.matrix.forward import forward_kernel
from recurl.recurrence.cuda.matrix.pieces import carry_kernel, maps_kernel
from recurl.recurrence.cuda.matrix.solve import solve_kernel
from recurl.recurrence.cuda.matrix.step import step_kernel
from recurl.recurrence.cuda.prepared import prepared
from recurl.recurrence.matrix.kernels import MatrixInputs
from recurl.sequences.stored import spacing_of


class _Call:
    """Inputs as kernels read them, and the layout of chunks and pieces."""

    def __init__(self, inputs: MatrixInputs, plan: Plan, precision: str) -> None:
        query, key, value = (_unit_stride(one) for one in inputs[:3])
        self.inputs, self.plan, self.delta = inputs, plan, inputs.delta
        self.tokens, self.heads, self.keys = key.shape
        self.values, self.device = value.shape[-1], key.device
        self.length = inputs.boundaries.batch_shape[-1]
        self.rows = self.tokens // self.length
        self.chunks = -(-self.length // plan.chunk)
        self.pieces = -(-self.chunks // plan.piece)
        self.maps = self.rows * (self.pieces - 1) * self.heads
        self.start_index = inputs.boundaries.start_index
        decay, rate = inputs.log_decay.contiguous(), inputs.rate.contiguous()
        states = decay if inputs.states is None else inputs.states
        strides = (*states.stride(), spacing_of(states, self.tokens)) if inputs.states is not None else (0, 0, 0, 0, 1)
        self.stored = (states, *strides)
        self.pair = (query, *query.stride()[:2], key, *key.stride()[:2])
        self.value = (value, *value.stride()[:2])
        self.scalars = (decay, rate)
        self.precision = {torch.bfloat16: "bf16", torch.float16: "tf32"}.get(key.dtype, precision)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def operand(self, *shape: int) -> Tensor:
        """Return empty memory for numbers that are as precise as operands of products."""
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
        return torch.empty(shape, dtype=dtype, device=self.device)

    def before_chunks(self, keep: bool = True) -> Tensor:
        """Return empty memory for the states before chunks, none unless ``keep``."""
        return self.operand(keep * self.rows * (self.chunks - 1), self.heads, self.keys, self.values)

    def constants(self, tile: Tile, **others: Any) -> dict[str, Any]:
        sizes = {"K": self.keys, "V": self.values, "BLOCK_K": padded(self.keys), "BLOCK_V": self.columns(tile)}
        options = {"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers}
        return {**sizes, "PRECISION": self.precision, **others, **options}

    def columns(self, tile: Tile) -> int:
        return min(tile.columns, padded(self.values))

    def blocks(self, tile: Tile) -> int:
        return -(-self.values // tile.columns)

    def solved(self, keep: bool) -> tuple[Tensor, ...]:
        """Return empty memory for what :meth:`solve` finds: X if ``keep``, y_key, y_value, and what pieces need."""
        tokens, rows = (self.delta * (self.pieces > 1) * size for size in (self.tokens, self.rows))
        return (
            self.empty(self.tokens, self.heads, self.delta * keep * self.plan.chunk),
            self.operand(self.tokens, self.heads, self.delta * self.keys),
            self.operand(self.tokens, self.heads, self.delta * self.values),
            self.empty(tokens, self.heads),
            self.empty(rows, self.chunks, self.heads),
        )

    def solve(self, to: tuple[Tensor, ...], keep: bool) -> None:
        """Solve all chunks of the delta rule."""
        flags = {"CHUNK": self.plan.chunk, "KEEP": keep, "MAPS": self.pieces > 1}
        constants = self.constants(self.plan.solve, **flags) | {"BLOCK_V": padded(self.values)}
        launch = prepared(solve_kernel, self.rows * self.chunks * self.heads, **constants)
        launch(*self.pair[3:], *self.value, *self.scalars, self.start_index, *to, self.heads, self.length, self.chunks)

    def carry(self, added: Tensor, transfer: Tensor, to: Tensor, reverse: bool) -> None:
        """Carry states, or their gradients in reverse, from piece to piece."""
        tile, piece_tokens = self.plan.carry, self.plan.piece * self.plan.chunk
        constants = self.constants(tile, DELTA=self.delta, REVERSE=reverse, STAGES=tile.stages)
        launch = prepared(carry_kernel, self.rows * self.heads * self.blocks(tile), **constants)
        launch(added, transfer, self.start_index, to, self.heads, self.length, self.pieces, piece_tokens)


def saved_like(inputs: MatrixInputs, plan: Plan, precision: str) -> States:
    """Return empty tensors like those that :func:`run_forward` saves."""
    call = _Call(inputs, plan, precision)
    carried = call.before_chunks()
    transfer = call.empty(call.maps, *((call.keys, call.keys) if call.delta else ()))
    solved = torch.empty_like(inputs.value) if call.delta else inputs.value.new_empty(0)
    return carried, solved, transfer, *call.solved(keep=True)[:2]


def run_forward(inputs: MatrixInputs, keep: bool, plan: Plan, precision: str) -> tuple[States, States]:
    """Return the results, and what :func:`run_backward` reads if ``keep``.

    Saved are the states before chunks, the solved values of the delta rule, the maps of the pieces, X and y_key.
    """
    call = _Call(inputs, plan, precision)
    heads, pieces = call.heads, call.pieces
    like, after = inputs.value, inputs.after
    output = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    solved = torch.empty_like(output) if keep and call.delta else output
    shape = (call.tokens, heads, call.keys, call.values)
    ended = torch.zeros(shape, dtype=torch.float32, device=call.device) if after else output
    carried = call.before_chunks(keep)
    transfer = call.empty(call.maps, *((call.keys, call.keys) if call.delta else ()))
    added, arriving = (call.empty(call.maps, call.keys, call.values) for _ in range(2))
    found = call.solved(keep)
    solvers, solved_key, solved_value, exit_weights, exit_decays = found
    values = (solved_value, *solved_value.stride()[:2]) if call.delta else call.value
    flags = {"CHUNK": plan.chunk, "DELTA": call.delta, "HAS_STATES": inputs.states is not None}

    def find_maps() -> None:
        blocks = call.blocks(plan.maps) + (-(-call.keys // call.columns(plan.maps)) if call.delta else 0)
        constants = call.constants(plan.maps, **flags, BLOCKS=blocks)
        prepared(maps_kernel, call.maps * blocks, **constants)(
            *(*call.pair[3:], *values, call.scalars[0], exit_weights if call.delta else call.scalars[1], *call.stored),
            *(call.start_index, solved_key, exit_decays, added, transfer),
            *(heads, call.length, call.chunks, pieces - 1, plan.piece),
        )

    with on(call.device):
        if call.delta:
            call.solve(found, keep)
        if pieces > 1:
            find_maps()
            call.carry(added, transfer, arriving, reverse=False)
        blocks = call.blocks(plan.forward)
        constants = call.constants(plan.forward, **flags, BLOCKS=blocks, AFTER=after, KEEP=keep)
        prepared(forward_kernel, call.rows * pieces * heads * blocks, **constants)(
            *(*call.pair, *values, *call.scalars, *call.stored, call.start_index, solved_key),
            *(output, solved, ended, carried, arriving),
            *(heads, call.length, call.chunks, pieces, plan.piece),
        )
    saved = (carried, solved if call.delta else output.new_empty(0), transfer, solvers, solved_key) if keep else ()
    return (output, ended) if after else (output,), saved


def run_backward(
    inputs: MatrixInputs,
    saved: States,
    grads: States,
    to_states: bool,
    plan: Plan,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of query, key, value, log_decay, rate and, if ``to_states``, states."""
    call = _Call(inputs, plan, precision)
    grad_output, grad_after = grads if inputs.after else (grads[0], None)
    heads, pieces, tokens = call.heads, call.pieces, call.tokens
    carried, solved, transfer, solvers, solved_key = saved
    read = (solved, *solved.stride()[:2]) if call.delta else call.value
    blocks = call.blocks(plan.backward)
    of_keys = torch.float32 if blocks > 1 else inputs.key.dtype
    to_keys = [torch.empty(blocks, tokens, heads, call.keys, dtype=of_keys, device=call.device) for _ in range(2)]
    to_value = torch.empty(inputs.value.shape, dtype=inputs.value.dtype, device=call.device)
    to_scalars = [call.empty(blocks, tokens, heads) for _ in range(2)]
    to_states = to_states and inputs.states is not None
    to_stored = to_value
    if to_states:
        to_stored = torch.zeros(tokens, heads, call.keys, call.values, dtype=torch.float32, device=call.device)
    ended = (to_value, 0, 0, 0, 0) if grad_after is None else (grad_after, *grad_after.stride())
    added, arriving = (call.empty(call.maps, call.keys, call.values) for _ in range(2))
    flags = {"CHUNK": plan.chunk, "DELTA": call.delta, "HAS_STATES": inputs.states is not None}

    def launch(maps: bool) -> None:
        only = {"MAPS": maps, "AFTER": grad_after is not None, "TO_STATES": to_states and not maps}
        constants = call.constants(plan.backward, **flags, **only)
        prepared(backward_kernel, call.rows * (pieces - maps) * heads * blocks, **constants)(
            *(*call.pair, *read, *call.scalars, *call.stored, call.start_index),
            *(solvers, solved_key, carried, grad_output.contiguous(), *ended, arriving),
            *(*to_keys, to_value, *to_scalars, to_stored, added),
            *(tokens, heads, call.length, call.chunks, pieces, int(maps), plan.piece),
        )

    with on(call.device):
        if pieces > 1:
            launch(maps=True)
            call.carry(added, transfer, arriving, reverse=True)
        launch(maps=False)
    to_query, to_key = ((one.sum(0) if blocks > 1 else one[0]).to(inputs.key.dtype) for one in to_keys)
    to_decay, to_rate = (one.sum(0) if blocks > 1 else one[0] for one in to_scalars)
    return to_query, to_key, to_value, to_decay, to_rate, to_stored if to_states else None


def run_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    states: Tensor | None,
    is_init: Tensor | None,
    delta: bool,
    in_place: bool,
) -> tuple[Tensor, Tensor]:
    """Return the outputs ``[B, heads, V]`` of one token and the states after it, ``[B, heads, K, V]``."""
    rows, heads, keys = key.shape
    values = value.shape[-1]
    output = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    if states is not None and in_place:
        after = states
    else:
        after = torch.empty(rows, heads, keys, values, dtype=log_decay.dtype, device=value.device)
    if rows == 0:
        return output, after
    query, key, value = (_unit_stride(one) for one in (query, key, value))
    tile = step_tile_for(rows, heads, keys, values, processors_of(value.device))
    flags = None if is_init is None else is_init.reshape(rows).contiguous().view(torch.uint8)
    columns = min(tile.columns, padded(values))
    launch = prepared(
        step_kernel,
        rows * heads * -(-values // columns),
        K=keys,
        V=values,
        BLOCK_K=padded(keys),
        BLOCK_V=columns,
        DELTA=delta,
        HAS_STATES=states is not None,
        RESETS=flags is not None,
        num_warps=tile.warps,
    )
    given = after if states is None else states
    with on(value.device):
        launch(
            *(query, *query.stride()[:2], key, *key.stride()[:2], value, *value.stride()[:2]),
            *(log_decay.contiguous(), rate.contiguous(), given, *given.stride()),
            *(log_decay if flags is None else flags, output, after, *after.stride()[:2], heads),
        )
    return output, after


def _unit_stride(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

"""Division of matrix recurrences among the programs of a GPU, by rule: no tuning at run time."""

from __future__ import annotations

from dataclasses import dataclass

from recurl.recurrence.cuda.hardware import ALL_REGISTERS

LARGEST = 256
"""Size of the largest keys and values that the kernels support."""


@dataclass(frozen=True)
class Tile:
    """Work of one program.

    Attributes:
        columns: columns of the state, a power of two.
        warps: warps per program.
        stages: loads in flight in loops that the compiler pipelines.
        registers: most registers per thread, or None to let the compiler choose.
    """

    columns: int
    warps: int
    stages: int
    registers: int | None = None


@dataclass(frozen=True)
class Plan:
    """Division of a call; the same for both passes of it.

    Attributes:
        chunk: tokens that are processed at once: 16, 32 or 64.
        piece: chunks of a row that one program processes one after another. Rows of more chunks are cut into pieces.
        maps: programs of the forward pass that find what pieces do to states.
        forward: programs of the forward pass.
        backward: programs of the backward pass.
        carry: programs that carry states from piece to piece.
        solve: programs that solve a chunk of the delta rule each.
    """

    chunk: int
    piece: int
    maps: Tile
    forward: Tile
    backward: Tile
    carry: Tile
    solve: Tile


@dataclass(frozen=True)
class Sizes:
    """What a plan depends on.

    Attributes:
        rows: rows of the batch.
        length: tokens per row.
        heads: heads.
        keys: K.
        values: V.
        bits: of a number of the products' operands, 16 or 32.
        delta: whether the recurrence has the delta rule.
        processors: multiprocessors of the GPU.
    """

    rows: int
    length: int
    heads: int
    keys: int
    values: int
    bits: int
    delta: bool
    processors: int


_LONG = 16  # chunks of a row that may be cut into pieces
_SHORTEST_PIECE = 8
_WIDE, _NARROW = 64, 16
_THREE_PROGRAMS, _FOUR_PROGRAMS = 168, 128  # registers per thread: as many programs of 4 warps fit on a multiprocessor


def padded(size: int) -> int:
    """Return a size as matrix products need it: a power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def plan_for(sizes: Sizes) -> Plan:
    """Return the division of a call.

    A program holds a state, or in the backward pass a state and its gradient, in registers. Rows are cut where the GPU
    would otherwise be idle: each pass walks over a row in pieces twice. Chunks and tiles are those with the fewest
    compiled instructions per token among those that spill little and leave room for two programs on a multiprocessor of
    compute capability 9.0; those in bfloat16 of at most 64 numbers are the fastest of several on an H200.
    """
    wide = sizes.keys > _WIDE or sizes.values > _WIDE
    registers = ALL_REGISTERS if sizes.bits > _NARROW and sizes.keys > 2 * _WIDE else None
    chunk = min(padded(sizes.length), 16 if sizes.bits > _NARROW else 32)
    keys, values = padded(sizes.keys), padded(sizes.values)
    columns = min(values, max(16, 4096 // keys))
    light = sizes.bits == _NARROW and not wide
    stages = 2 if light else 1
    heads, blocks = sizes.rows * sizes.heads, -(-sizes.values // columns)
    chunks = -(-sizes.length // chunk)
    # What a chunk writes doesn't wait for its state: two warps per program are faster if there are programs enough.
    independent = light and (not sizes.delta or chunks == 1)
    piece = _piece(chunks, heads * blocks, 2 * sizes.processors)
    if independent and piece < chunks:
        piece = _piece(chunks, heads * blocks, 4 * sizes.processors)
    pieces = -(-chunks // piece)
    forward = maps = Tile(columns, 4, stages, registers)
    if independent and heads * blocks * pieces >= 3 * sizes.processors:
        forward = Tile(columns, 2, 1)
    if light and sizes.delta:
        many = heads * (pieces - 1) * (blocks + -(-sizes.keys // columns)) > 3 * sizes.processors
        maps = Tile(columns, 4, 1, _FOUR_PROGRAMS) if many else Tile(columns, 4, stages, _THREE_PROGRAMS)
    backward = Tile(columns, 8 if wide else 4, 1, registers)
    carry = Tile(min(values, 16), 8 if keys == 2 * _WIDE else 4, 1 if keys > _WIDE else 3)
    solve = Tile(values, max(1, max(keys, values) // _WIDE), 1)
    return Plan(chunk, piece, maps, forward, backward, carry, solve)


def _piece(chunks: int, programs: int, wanted: int) -> int:
    """Return the chunks of pieces that make as many programs as wanted of those that take a row each."""
    if chunks < _LONG:
        return chunks
    return min(chunks, max(_SHORTEST_PIECE, -(-chunks * programs // wanted)))


def step_tile_for(rows: int, heads: int, keys: int, values: int, processors: int) -> Tile:
    """Return the programs of a step: whole states, or narrow parts of few."""
    keys, values = padded(keys), padded(values)
    columns = min(values, max(16, 4096 // keys))
    while columns > 16 and rows * heads * -(-values // columns) < 4 * processors:
        columns //= 2
    return Tile(columns, 4, 1)

"""Choice of kernels and tiles for a layer, by table: no tuning at run time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

_ROWS = 16


@dataclass(frozen=True)
class Tile:
    """Tile sizes of a plain recurrence kernel.

    Attributes:
        rows: slots that a group of programs processes together.
        units: hidden units of one program.
        members: programs of a group; together they hold all hidden units.
        block_k: rows of the recurrent weights in one product.
        resident: whether the weights are loaded once, before the first step.
        warps: warps per program.
    """

    rows: int
    units: int
    members: int
    block_k: int
    resident: bool
    warps: int


_UNITS = 64  # most units of a program: eight warps with eight units each
# Registers per thread that resident weights may take: the backward pass needs more of them for other values.
_WEIGHT_REGISTERS = {"forward": 128, "backward": 48}
_BLOCK_K = {"bf16": 32, "tf32": 32, "tf32x3": 16, "ieee": 16}


def padded(hidden: int) -> int:
    """Return the smallest power of two, at least 16, that holds ``hidden`` units."""
    return max(16, 1 << (hidden - 1).bit_length())


def tile_for(direction: str, hidden: int, num_gates: int, precision: str) -> Tile:
    """Return the tile of a plain kernel for H = ``hidden``.

    Args:
        direction: ``"forward"`` or ``"backward"``.
        hidden: H.
        num_gates: G.
        precision: precision of the recurrent products: ``"ieee"``, ``"tf32"``, ``"tf32x3"`` or ``"bf16"``.
    """
    return _tile(direction, hidden, num_gates, precision)


@lru_cache(maxsize=256)
def _tile(direction: str, hidden: int, num_gates: int, precision: str) -> Tile:
    # A separate function, because torch 2.11 can't compile calls of an attribute that is a cached function.
    width = padded(hidden)
    units = min(width, _UNITS)
    registers = width * num_gates // (8 if precision == "bf16" else 4)
    resident = precision in ("tf32", "bf16") and registers <= _WEIGHT_REGISTERS[direction]
    return Tile(_ROWS, units, width // units, width if resident else _BLOCK_K[precision], resident, max(4, units // 8))


@dataclass(frozen=True)
class Resident:
    """Gluon kernels that keep the recurrent weights on the chip.

    Attributes:
        forward_shared: gates whose weights are in shared memory instead of registers in the forward pass.
        ahead: number of steps that the forward pass prefetches input gates.
        backward_shared: as ``forward_shared``, in the backward pass.
        programs: programs per multiprocessor.
        units: units of one program, where a group of programs holds all units; 0 if one program holds them all.
        rows: slots that a group processes together.
        across: warps that share these slots, with 16 units each.
    """

    forward_shared: int
    ahead: int
    backward_shared: int
    programs: int
    units: int = 0
    rows: int = 8
    across: int = 1
    walks: ClassVar[int] = 1

    def members_for(self, width: int) -> int:
        """Return the number of programs of a group."""
        return width // self.units if self.units else 1


@dataclass(frozen=True)
class Wide:
    """Gluon kernels with a matrix product per step.

    Attributes:
        rows: slots that a group processes together.
        units: hidden units of one program.
        stages: blocks of operands in flight or in use.
        shares: most programs that share the columns of a product (backward pass).
        walks: groups that a program serves, each with its own warps; for weights that stay in shared memory.
        across: warps that share 16 slots.
    """

    rows: int
    units: int
    stages: int
    shares: int = 1
    walks: int = 1
    across: int = 1
    programs: ClassVar[int] = 1

    @property
    def warps(self) -> int:
        """Warps per group that a program serves."""
        return self.rows // 16 * self.across

    def members_for(self, width: int) -> int:
        """Return the number of programs of a group."""
        return width // self.units

    def shares_for(self, width: int, blocks: int) -> int:
        """Return how many programs share the ``blocks`` of columns of a product; it divides them evenly."""
        return math.gcd(self.shares, self.members_for(width), blocks)

    def pages_for(self, columns: int, weights: int, parts: int) -> int:
        """Return the number of pages of the weights: one for each of ``columns`` blocks (``weights`` rows) if they fit.

        Each page has ``parts`` parts, as have the pages of the rows.
        """
        held = 128 * parts * (self.walks * self.stages * self.rows + columns * weights)
        return columns if held <= _SHARED_BYTES else self.stages

    def blocks_at_once(self, pages: int, blocks: int) -> int:
        """Return the blocks multiplied at a time: a third of the stages, or one where the weights are streamed too."""
        return math.gcd(self.stages // 3, blocks) if pages == blocks else 1


@dataclass(frozen=True)
class Single:
    """Gluon kernels with one slot per program.

    Attributes:
        units: the power of two that holds all hidden units.
        warps: warps per program.
        held: blocks of 16 columns of the weights in registers; the others are in shared memory.
        programs: programs per multiprocessor.
    """

    units: int
    warps: int
    held: int
    programs: int
    rows: ClassVar[int] = 1
    walks: ClassVar[int] = 1
    ring: ClassVar[int] = 8

    def members_for(self, width: int) -> int:
        """Return the number of programs of a group."""
        return 1


@dataclass(frozen=True)
class Quartered:
    """CUDA C++ kernels with one slot per CTA: four threads for each hidden unit.

    Attributes:
        programs: CTAs per multiprocessor.
    """

    programs: int
    rows: ClassVar[int] = 1
    walks: ClassVar[int] = 1

    def members_for(self, width: int) -> int:
        """Return the number of CTAs of a group."""
        return 1

    def threads_for(self, width: int) -> int:
        """Return the threads of a CTA."""
        return 4 * width

    def shared_for(self, width: int, exact: bool) -> int:
        """Return the bytes of dynamic shared memory."""
        return 0

    def numbers(self) -> dict[str, int]:
        """Return the macros that depend on this configuration."""
        return {"PROGRAMS": self.programs}


@dataclass(frozen=True)
class Clustered:
    """CUDA C++ kernels with a cluster of CTAs: a warp for eight hidden units.

    Attributes:
        members: CTAs of a cluster.
        groups: clusters that fit on the GPU at once.
    """

    members: int
    groups: int
    rows: ClassVar[int] = 8
    held: ClassVar[int] = 32  # blocks of 16 x 16 weights that a warp has in registers
    programs: ClassVar[int] = 1
    walks: ClassVar[int] = 1

    def members_for(self, width: int) -> int:
        """Return the number of CTAs of a cluster."""
        return self.members

    def threads_for(self, width: int) -> int:
        """Return the threads of a CTA."""
        return 4 * width // self.members

    def shared_for(self, width: int, exact: bool) -> int:
        """Return the bytes of dynamic shared memory, for the weights that don't fit in registers."""
        blocks = width // 8 * (2 if exact else 1)
        return 16 * self.threads_for(width) * max(blocks - self.held, 0)

    def numbers(self) -> dict[str, int]:
        """Return the macros that depend on this configuration."""
        return {"MEMBERS": self.members, "HELD": self.held}

    def fits(self, width: int, exact: bool) -> bool:
        """Return whether these weights and the exchange buffers of the backward pass fit in shared memory."""
        exchanged = 64 * width + self.threads_for(width) * (32 if exact else 16) + 1024
        return self.shared_for(width, exact) + exchanged <= _MOST_SHARED


CLUSTERS = 2, 4, 8  # supported cluster sizes
KernelConfig = Single | Resident | Wide | Quartered | Clustered
_MOST_SHARED = 227 * 1024  # of one CTA
_SHARED_BYTES = 224 * 1024  # the same, without the memory of a reduction

# By cell, largest W and precision: as many weights in registers as fit without spilling.
_RESIDENT = {
    ("lstm", 64, "tf32"): Resident(1, 2, 1, 2),
    ("lstm", 96, "tf32"): Resident(2, 1, 2, 1),
    ("lstm", 128, "tf32"): Resident(2, 1, 3, 1),
    ("lstm", 64, "bf16"): Resident(0, 2, 0, 2),
    ("lstm", 96, "bf16"): Resident(0, 2, 1, 1),
    ("lstm", 128, "bf16"): Resident(1, 2, 2, 1),
    ("gru", 64, "tf32"): Resident(0, 2, 0, 2),
    ("gru", 96, "tf32"): Resident(0, 2, 0, 1),
    ("gru", 128, "tf32"): Resident(1, 2, 1, 1),
    ("gru", 64, "bf16"): Resident(0, 2, 0, 2),
    ("gru", 96, "bf16"): Resident(0, 2, 0, 1),
    ("gru", 128, "bf16"): Resident(0, 2, 1, 1),
    ("lstm", 256, "tf32"): Resident(4, 2, 4, 1, 32, 16, 2),
    ("gru", 256, "tf32"): Resident(3, 2, 3, 1, 64, 8),
    ("lstm", 256, "bf16"): Resident(4, 1, 4, 1, 32, 16, 2),
    ("gru", 256, "bf16"): Resident(3, 2, 3, 1, 32, 16, 2),
    ("lstm", 256, "ieee"): Resident(4, 1, 4, 1, 32, 16, 2),
    ("gru", 256, "ieee"): Resident(3, 2, 3, 1, 64, 8),
    ("gru", 512, "tf32"): Resident(3, 1, 3, 1, 16, 16, 2),
    ("lstm", 512, "bf16"): Resident(4, 1, 4, 1, 32, 16, 2),
    ("gru", 512, "bf16"): Resident(3, 1, 3, 1, 64, 8),
}
_SMALL = Resident(0, 2, 0, 4)
_RESIDENT_MULTIPLE = 32  # W of the resident kernels is a multiple of this above 64
_WIDE_MULTIPLE = {"bf16": 64}  # W of the wide kernels is a multiple of this, else of 32
GLUON_CAPABILITY = (9, 0)
_EXACT = ("ieee", "tf32x3")
_CLUSTERED_UNITS = range(65, 513)
_QUARTERED_WIDTH = 96  # largest W whose weights fit in registers


@dataclass(frozen=True)
class KernelChoice:
    """Kernels of a layer on sm_90.

    Attributes:
        width: W, the padded number of units.
        forward: configuration of the forward pass.
        backward: configuration of the backward pass.
    """

    width: int
    forward: KernelConfig
    backward: KernelConfig


_SINGLE_UNITS = 128
_STREAM = 4  # batches with fewer rows are streams with an unknown number of segments
_SINGLE_HELD = {"lstm": 5, "gru": 8}  # blocks of 16 columns that fit in the registers of 256 threads for 128 units
# By units: warps, programs per multiprocessor, the same for batches with fewer rows than multiprocessors (a row is
# fastest alone on one), and the rows per multiprocessor up to which these kernels are fastest in tf32.
_SINGLE = {16: (2, 4, 4, 4), 32: (4, 4, 1, 4), 64: (4, 2, 1, 2), 128: (8, 1, 1, 1)}


def single_for(cell: str, hidden: int, few: bool) -> Single:
    """Return the kernels with one slot per program: four threads for each unit, or for two if there are many.

    ``few``: whether the batch has fewer rows than the GPU has multiprocessors, and isn't a stream.
    """
    units = padded(hidden)
    warps, many_programs, few_programs, _ = _SINGLE[units]
    return Single(units, warps, _SINGLE_HELD[cell], few_programs if few else many_programs)


def _single_is_fastest(hidden: int, precision: str, batch_rows: int, processors: int) -> bool:
    """Return whether the kernels with one slot per program are fastest."""
    if precision == "bf16" or hidden > _SINGLE_UNITS:
        return False
    return precision in _EXACT or _STREAM <= batch_rows <= _SINGLE[padded(hidden)][3] * processors


@lru_cache(maxsize=256)
def chosen_for(
    capability: tuple[int, int],
    processors: int,
    cell: str,
    hidden: int,
    precision: str,
    batch_rows: int,
    clusters: tuple[int, ...] = (),
) -> KernelChoice | None:
    """Return the sm_90 kernels for a layer, or None if the plain ones are used.

    Kernels with one slot per program are fastest per step. Clusters and the resident kernels process more rows at once,
    the wide kernels most.

    Args:
        capability: compute capability of the GPU.
        processors: its multiprocessors.
        cell: name of the cell.
        hidden: H.
        precision: precision of the recurrent products.
        batch_rows: rows of the batch, each with at least one segment.
        clusters: number of clusters of each size in :data:`CLUSTERS` that fit on the GPU at once; empty if cluster
            kernels can't be compiled.
    """
    if capability != GLUON_CAPABILITY:
        return None
    if clusters:
        by_cuda = _quartered(hidden, precision, batch_rows, processors) or _clustered(
            cell, hidden, precision, batch_rows, processors, clusters
        )
        if by_cuda is not None:
            return by_cuda
    if _single_is_fastest(hidden, precision, batch_rows, processors):
        single = single_for(cell, hidden, _STREAM <= batch_rows <= processors)
        return KernelChoice(-(-hidden // 16) * 16, single, single)
    width, resident = _resident_for(cell, hidden, precision)
    if resident is not None:
        groups = processors // resident.members_for(width)
        if resident.units == 0 or batch_rows <= groups * resident.rows:
            return KernelChoice(width, resident, resident) if groups else None
    multiple = _WIDE_MULTIPLE.get(precision, 32)
    width = -(-hidden // multiple) * multiple
    table = _WIDE_EXACT if precision in _EXACT else _WIDE
    tiles = next(tiles for largest, tiles in table.items() if width <= largest)
    fitting = [pair for pair in tiles if pair[0].members_for(width) <= processors]
    enough = [pair for pair in fitting if batch_rows <= _slots(pair[0], width, processors)]
    best = (enough or fitting[-1:])[:1]
    return KernelChoice(width, *best[0]) if best else None


def _quartered(hidden: int, precision: str, batch_rows: int, processors: int) -> KernelChoice | None:
    """Return the kernels with one slot per CTA and four threads per unit if they are fastest, as measured.

    A multiprocessor gets as many CTAs as its rows require, and as their weights fit in its registers.
    """
    width, exact = -(-hidden // 16) * 16, precision in _EXACT
    if width > _QUARTERED_WIDTH or precision == "bf16" or (batch_rows < _STREAM and not exact):
        return None
    most = 4 if width <= 32 else 2 if width <= 64 else 1
    rows = -(-batch_rows // processors)
    if rows > (4 if width <= 48 else 2) and (not exact or width > 64):
        return None
    programs = most if batch_rows < _STREAM else min(most, 1 << (rows - 1).bit_length())
    config = Quartered(programs)
    return KernelChoice(width, config, config)


def _clustered(
    cell: str, hidden: int, precision: str, batch_rows: int, processors: int, clusters: tuple[int, ...]
) -> KernelChoice | None:
    """Return the cluster kernels with at most 64 units per CTA if they hold the weights and are fastest."""
    members = padded(hidden) // 64
    if hidden not in _CLUSTERED_UNITS:
        return None
    config, multiple = Clustered(members, clusters[CLUSTERS.index(members)]), max(32, 8 * members)
    width, exact = -(-hidden // multiple) * multiple, precision in _EXACT
    if config.groups == 0 or not config.fits(width, exact):
        return None
    fastest = _clusters_are_fastest(cell, hidden, precision, batch_rows, processors, config.groups * config.rows)
    return KernelChoice(width, config, config) if fastest else None


def _clusters_are_fastest(
    cell: str, hidden: int, precision: str, batch_rows: int, processors: int, at_once: int
) -> bool:
    """Measured rule, with ``at_once`` rows at once; below 129 units a row alone on a multiprocessor is often faster."""
    if hidden > 256:
        return precision in _EXACT or batch_rows <= 2 * at_once
    if hidden > 128:
        return True
    few = batch_rows <= processors
    if precision in _EXACT:
        return not few or (cell == "lstm" and hidden > 112)
    if precision == "bf16":
        return few and (cell == "lstm" or hidden > 96)
    if cell == "lstm":
        return batch_rows <= at_once
    return hidden > 96 and not few and batch_rows <= at_once


def _resident_for(cell: str, hidden: int, precision: str) -> tuple[int, Resident | None]:
    """Return W and the resident kernels of the smallest size that holds it, or None."""
    width = -(-hidden // _RESIDENT_MULTIPLE) * _RESIDENT_MULTIPLE if hidden > 64 else padded(hidden)
    if width <= 32:
        return width, _SMALL
    name = "ieee" if precision in _EXACT else precision
    largest = next((size for size in (64, 96, 128, 256, 512) if width <= size), 0)
    found = _RESIDENT.get((cell, largest, name))
    if found is not None and found.units:
        width = -(-hidden // found.units) * found.units
    return width, found


def groups_on(processors: int, config: KernelConfig, width: int) -> int:
    """Return the number of groups that run at once."""
    return config.groups if isinstance(config, Clustered) else processors // config.members_for(width)


def _slots(wide: Wide, width: int, processors: int) -> int:
    """Return the number of rows processed at once."""
    return processors // wide.members_for(width) * wide.rows * wide.walks


# Forward and backward pass by largest W: the first that processes all rows of the batch at once, else the last.
_WIDE = {
    256: ((Wide(64, 16, 8), Wide(64, 16, 8, shares=4)),),
    512: (
        (Wide(64, 16, 12), Wide(64, 16, 12, shares=4)),
        (Wide(64, 16, 6, walks=2), Wide(64, 16, 6, shares=4, walks=2)),
    ),
    math.inf: (
        (Wide(64, 16, 8), Wide(64, 16, 8, shares=4)),
        (Wide(64, 32, 8), Wide(64, 32, 8, shares=4, across=2)),
        (Wide(128, 32, 6), Wide(128, 32, 6, shares=4)),
    ),
}
# The same accurate to float32, with pages of two parts.
_WIDE_EXACT = {
    256: ((Wide(64, 16, 6), Wide(64, 16, 6, shares=4)),),
    math.inf: (
        (Wide(64, 16, 6), Wide(64, 16, 6, shares=4)),
        (Wide(64, 32, 4, across=2), Wide(64, 32, 4, shares=4, across=2)),
    ),
}

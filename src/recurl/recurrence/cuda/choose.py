"""Choice of the kernels of a layer, by rules from measurements: no tuning at run time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from recurl.recurrence.cuda.cluster.config import CLUSTERS, Cluster
from recurl.recurrence.cuda.family import Family
from recurl.recurrence.cuda.layout import padded
from recurl.recurrence.cuda.precision import PRECISIONS
from recurl.recurrence.cuda.resident.config import Resident
from recurl.recurrence.cuda.rows.config import Rows
from recurl.recurrence.cuda.single.config import Single
from recurl.recurrence.cuda.tables import RESIDENT, SINGLE, SINGLE_HELD, SMALL_RESIDENT, TILES, TILES_EXACT

__all__ = ["GLUON_CAPABILITY", "KernelChoice", "chosen_for", "single_for"]

GLUON_CAPABILITY = (9, 0)
_RESIDENT_MULTIPLE = 32  # W of the resident kernels is a multiple of this above 64
_TILES_MULTIPLE = {"bf16": 64}  # W of the tiles is a multiple of this, else of 32
_CLUSTERED_UNITS = range(65, 513)
_ROWS_WIDTH = 96  # largest W whose weights fit in registers
_SINGLE_UNITS = 128
_STREAM = 4  # batches with fewer rows are streams with an unknown number of segments


@dataclass(frozen=True)
class KernelChoice:
    """Kernels of a layer on sm_90.

    Attributes:
        width: W, the padded number of units.
        forward: configuration of the forward pass.
        backward: configuration of the backward pass.
    """

    width: int
    forward: Family
    backward: Family


def single_for(cell: str, hidden: int, few: bool) -> Single:
    """Return the kernels with one slot per program: four threads for each unit, or for two if there are many.

    ``few``: whether the batch has fewer rows than the GPU has multiprocessors, and isn't a stream.
    """
    units = padded(hidden)
    warps, many_programs, few_programs, _ = SINGLE[units]
    return Single(units, warps, SINGLE_HELD[cell], few_programs if few else many_programs)


def _single_is_fastest(hidden: int, precision: str, batch_rows: int, processors: int) -> bool:
    """Return whether the kernels with one slot per program are fastest."""
    if precision == "bf16" or hidden > _SINGLE_UNITS:
        return False
    return PRECISIONS[precision].exact or _STREAM <= batch_rows <= SINGLE[padded(hidden)][3] * processors


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
        by_cuda = _rows(hidden, precision, batch_rows, processors) or _cluster(
            cell, hidden, precision, batch_rows, processors, clusters
        )
        if by_cuda is not None:
            return by_cuda
    if _single_is_fastest(hidden, precision, batch_rows, processors):
        single = single_for(cell, hidden, _STREAM <= batch_rows <= processors)
        return KernelChoice(-(-hidden // 16) * 16, single, single)
    width, resident = _resident_for(cell, hidden, precision)
    if resident is not None:
        groups = resident.groups_on(processors, width)
        if resident.units == 0 or batch_rows <= groups * resident.rows:
            return KernelChoice(width, resident, resident) if groups else None
    multiple = _TILES_MULTIPLE.get(precision, 32)
    width = -(-hidden // multiple) * multiple
    table = TILES_EXACT if PRECISIONS[precision].exact else TILES
    tiles = next(tiles for largest, tiles in table.items() if width <= largest)
    fitting = [pair for pair in tiles if pair[0].members_for(width) <= processors]
    enough = [pair for pair in fitting if batch_rows <= pair[0].slots_on(processors, width)]
    best = (enough or fitting[-1:])[:1]
    return KernelChoice(width, *best[0]) if best else None


def _rows(hidden: int, precision: str, batch_rows: int, processors: int) -> KernelChoice | None:
    """Return the kernels with one slot per CTA and four threads per unit if they are fastest, as measured.

    A multiprocessor gets as many CTAs as its rows require, and as their weights fit in its registers.
    """
    width, exact = -(-hidden // 16) * 16, PRECISIONS[precision].exact
    if width > _ROWS_WIDTH or precision == "bf16" or (batch_rows < _STREAM and not exact):
        return None
    most = 4 if width <= 32 else 2 if width <= 64 else 1
    rows = -(-batch_rows // processors)
    if rows > (4 if width <= 48 else 2) and (not exact or width > 64):
        return None
    programs = most if batch_rows < _STREAM else min(most, 1 << (rows - 1).bit_length())
    config = Rows(programs)
    return KernelChoice(width, config, config)


def _cluster(
    cell: str, hidden: int, precision: str, batch_rows: int, processors: int, clusters: tuple[int, ...]
) -> KernelChoice | None:
    """Return the cluster kernels with at most 64 units per CTA if they hold the weights and are fastest."""
    members = padded(hidden) // 64
    if hidden not in _CLUSTERED_UNITS:
        return None
    config, multiple = Cluster(members, clusters[CLUSTERS.index(members)]), max(32, 8 * members)
    width, exact = -(-hidden // multiple) * multiple, PRECISIONS[precision].exact
    if config.groups == 0 or not config.fits(width, exact):
        return None
    fastest = _clusters_are_fastest(cell, hidden, precision, batch_rows, processors, config.groups * config.rows)
    return KernelChoice(width, config, config) if fastest else None


def _clusters_are_fastest(
    cell: str, hidden: int, precision: str, batch_rows: int, processors: int, at_once: int
) -> bool:
    """Measured rule, with ``at_once`` rows at once; below 129 units a row alone on a multiprocessor is often faster."""
    if hidden > 256:
        return PRECISIONS[precision].exact or batch_rows <= 2 * at_once
    if hidden > 128:
        return True
    few = batch_rows <= processors
    if PRECISIONS[precision].exact:
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
        return width, SMALL_RESIDENT
    name = "ieee" if PRECISIONS[precision].exact else precision
    largest = next((size for size in (64, 96, 128, 256, 512) if width <= size), 0)
    found = RESIDENT.get((cell, largest, name))
    if found is not None and found.units:
        width = -(-hidden // found.units) * found.units
    return width, found

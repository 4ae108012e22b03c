"""Choice of the kernels of a layer: as tuned for this GPU, else by rules from measurements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from recurl.recurrence.cuda import tuned
from recurl.recurrence.cuda.cluster.config import CLUSTERS, Cluster
from recurl.recurrence.cuda.family import Family
from recurl.recurrence.cuda.hardware import Hardware
from recurl.recurrence.cuda.layout import padded
from recurl.recurrence.cuda.precision import PRECISIONS
from recurl.recurrence.cuda.resident.config import Resident
from recurl.recurrence.cuda.rows.config import Rows
from recurl.recurrence.cuda.tables import RESIDENT, SMALL_RESIDENT, TILES, TILES_EXACT

__all__ = ["GLUON_CAPABILITY", "KernelChoice", "Layer", "chosen_for", "fitting_for"]

GLUON_CAPABILITY = (9, 0)
_RESIDENT_MULTIPLE = 32  # W of the resident kernels is a multiple of this above 64
_TILES_MULTIPLE = {"bf16": 64}  # W of the tiles is a multiple of this, else of 32
_CLUSTERED_UNITS = range(65, 513)
_HELD = 30, 32  # blocks of weights in registers; the fewer are faster where shared memory holds the others
_ROWS_WIDTH = {"lstm": 96, "gru": 128}  # largest W whose weights fit in registers
_TILES_UNITS = 129  # fewer units are not a tile for every product
_PORTABLE = "portable"
_STREAM = 4  # batches with fewer rows are streams with an unknown number of segments


@dataclass(frozen=True)
class KernelChoice:
    """Kernels of a layer.

    Attributes:
        width: W, the padded number of units.
        forward: configuration of the forward pass.
        backward: configuration of the backward pass.
    """

    width: int
    forward: Family
    backward: Family


class Layer(NamedTuple):
    """What the choice of kernels depends on.

    Attributes:
        hardware: the GPU.
        cell: name of the cell.
        hidden: H.
        precision: precision of the recurrent products.
        rows: rows of the batch, each with at least one segment.
    """

    hardware: Hardware
    cell: str
    hidden: int
    precision: str
    rows: int

    @property
    def exact(self) -> bool:
        """Whether results are accurate to float32."""
        return PRECISIONS[self.precision].exact


def chosen_for(layer: Layer) -> KernelChoice | None:
    """Return the kernels for a layer, or None for the portable ones.

    They are those that ``recurl bench rnn --tune`` found fastest on this GPU, else those of the rule for sm_90. Other
    chips were not measured: there the portable kernels are the rule.
    """
    fitting = fitting_for(layer)
    name = tuned.best(*layer)
    return fitting.get(name if name in (*fitting, _PORTABLE) else _fastest(layer, fitting))


def fitting_for(layer: Layer) -> dict[str, KernelChoice]:
    """Return the families whose kernels can run a layer, by name, each in its best configuration."""
    found: dict[str, KernelChoice | None] = {}
    if layer.hardware.nvrtc:
        found = {"rows": _rows(layer), "cluster": _cluster(layer)}
    if layer.hardware.capability == GLUON_CAPABILITY:
        found |= {"resident": _resident(layer), "tiles": _tiles(layer)}
    return {name: choice for name, choice in found.items() if choice is not None}


def _fastest(layer: Layer, fitting: dict[str, KernelChoice]) -> str:
    """Return the fastest family, as measured on sm_90.

    Kernels with one slot per CTA are fastest per step. Clusters and the resident kernels process more rows at once,
    the tiles most.
    """
    if layer.hardware.capability != GLUON_CAPABILITY:
        return _PORTABLE
    rules = {"rows": _rows_are_fastest, "cluster": _clusters_are_fastest, "resident": _resident_is_fastest}
    return next((name for name, rule in rules.items() if name in fitting and rule(layer, fitting[name])), "tiles")


def _rows(layer: Layer) -> KernelChoice | None:
    """Return the kernels with one slot per CTA and four threads per unit, if the weights fit in registers.

    A multiprocessor gets as many CTAs as its rows require, and as their weights fit in its registers.
    """
    width = -(-layer.hidden // 16) * 16
    if width > _ROWS_WIDTH[layer.cell] or layer.precision == "bf16":
        return None
    most = 4 if width <= 32 else 2 if width <= 64 else 1
    rows = -(-layer.rows // layer.hardware.processors)
    config = Rows(most if layer.rows < _STREAM else min(most, 1 << (rows - 1).bit_length()))
    return KernelChoice(width, config, config)


def _rows_are_fastest(layer: Layer, choice: KernelChoice) -> bool:
    if layer.rows < _STREAM and not layer.exact:
        return False
    rows = -(-layer.rows // layer.hardware.processors)
    if choice.width > 96:
        return rows == 1 and (layer.exact or choice.width <= 112)
    return rows <= (4 if choice.width <= 48 else 2) or (layer.exact and choice.width <= 64)


def _cluster(layer: Layer) -> KernelChoice | None:
    """Return the cluster kernels with at most 64 units per CTA, if they hold the weights."""
    if layer.hidden not in _CLUSTERED_UNITS:
        return None
    members = padded(layer.hidden) // 64
    groups, multiple = layer.hardware.clusters[CLUSTERS.index(members)], max(32, 8 * members)
    width = -(-layer.hidden // multiple) * multiple
    for held in _HELD:
        config = Cluster(members, groups, held=held)
        if groups > 0 and config.fits(width, layer.exact, layer.hardware.shared):
            return KernelChoice(width, config, config)
    return None


def _clusters_are_fastest(layer: Layer, choice: KernelChoice) -> bool:
    """Below 129 units a row alone on a multiprocessor is often faster."""
    hidden, rows = layer.hidden, layer.rows
    at_once = choice.forward.groups_on(layer.hardware.processors, choice.width) * choice.forward.rows
    if hidden > 256:
        return layer.exact or rows <= 2 * at_once
    if hidden > 128:
        return True
    lstm = layer.cell == "lstm"
    if layer.precision == "bf16":
        return rows <= layer.hardware.processors and (lstm or hidden > 96)
    return layer.exact or (rows <= at_once and (lstm or (hidden > 96 and rows >= _STREAM)))


def _resident(layer: Layer) -> KernelChoice | None:
    """Return the resident kernels of the smallest size that holds the layer, if there are any."""
    width, config = _resident_for(layer.cell, layer.hidden, "ieee" if layer.exact else layer.precision)
    return None if config is None else KernelChoice(width, config, config)


def _resident_is_fastest(layer: Layer, choice: KernelChoice) -> bool:
    groups = choice.forward.groups_on(layer.hardware.processors, choice.width)
    return choice.forward.members_for(choice.width) == 1 or layer.rows <= groups * choice.forward.rows


def _tiles(layer: Layer) -> KernelChoice | None:
    """Return the tiles that process all rows of the batch at once, else the largest ones, if they fit on the GPU."""
    if layer.hidden < _TILES_UNITS:
        return None
    processors, multiple = layer.hardware.processors, _TILES_MULTIPLE.get(layer.precision, 32)
    width = -(-layer.hidden // multiple) * multiple
    tiles = next(t for largest, t in (TILES_EXACT if layer.exact else TILES).items() if width <= largest)
    fitting = [pair for pair in tiles if pair[0].members_for(width) <= processors]
    enough = [pair for pair in fitting if layer.rows <= pair[0].slots_on(processors, width)]
    best = (enough or fitting[-1:])[:1]
    return KernelChoice(width, *best[0]) if best else None


def _resident_for(cell: str, hidden: int, precision: str) -> tuple[int, Resident | None]:
    """Return W and the configuration."""
    width = -(-hidden // _RESIDENT_MULTIPLE) * _RESIDENT_MULTIPLE if hidden > 64 else padded(hidden)
    if width <= 32:
        return width, SMALL_RESIDENT
    largest = next((size for size in (64, 96, 128, 256, 512) if width <= size), 0)
    found = RESIDENT.get((cell, largest, precision))
    if found is not None and found.units:
        width = -(-hidden // found.units) * found.units
    return width, found

"""Execution plan of a layer, which depends on its sizes, its precision and the GPU only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from recurl.recurrence.cuda.choose import KernelChoice, chosen_for
from recurl.recurrence.cuda.layout import GateLayout
from recurl.recurrence.cuda.precision import PRECISIONS, Precision


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """Execution plan of a layer. Plans are unique objects, so that they can be used as cache keys.

    Attributes:
        layout: layout of the gates.
        precision: precision of the recurrent products, with the dtypes that follow from it.
        chosen: kernels for sm_90, or None for the portable ones.
    """

    layout: GateLayout
    precision: Precision
    chosen: KernelChoice | None


@lru_cache(maxsize=256)
def plan_for(
    hardware: tuple[tuple[int, int], int, tuple[int, ...]] | None, cell: str, hidden: int, precision: str, rows: int
) -> LayerPlan:
    """Return the execution plan of a layer.

    Args:
        hardware: compute capability of the GPU, its multiprocessors and clusters of each size, or None without a GPU.
        cell: name of the cell.
        hidden: H.
        precision: precision of the recurrent products.
        rows: rows of the batch.
    """
    chosen = None
    if hardware:
        capability, processors, clusters = hardware
        chosen = chosen_for(capability, processors, cell, hidden, precision, rows, clusters)
    layout = GateLayout(cell == "lstm", hidden, chosen.width if chosen else hidden, chosen is not None)
    return LayerPlan(layout, PRECISIONS[precision], chosen)

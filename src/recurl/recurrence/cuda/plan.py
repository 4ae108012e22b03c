"""Execution plan of a layer, which depends on its sizes, its precision and the GPU only."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

from recurl.recurrence.cuda.choose import GLUON_CAPABILITY, KernelChoice, Layer, chosen_for, fitting_for
from recurl.recurrence.cuda.hardware import Hardware
from recurl.recurrence.cuda.layout import GateLayout
from recurl.recurrence.cuda.precision import PRECISIONS, Precision


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """Execution plan of a layer. Plans are unique objects, so that they can be used as cache keys.

    Attributes:
        layout: layout of the gates.
        precision: precision of the recurrent products, with the dtypes that follow from it.
        chosen: the kernels, or None for the portable ones.
        large_products: whether our own kernel can run large products: it needs sm_90 and a padded layout.
    """

    layout: GateLayout
    precision: Precision
    chosen: KernelChoice | None
    large_products: bool


@lru_cache(maxsize=256)
def plan_for(hardware: Hardware | None, cell: str, hidden: int, precision: str, rows: int) -> LayerPlan:
    """Return the execution plan of a layer.

    Args:
        hardware: the GPU, or None without one.
        cell: name of the cell.
        hidden: H.
        precision: precision of the recurrent products.
        rows: rows of the batch.
    """
    chosen = None
    if hardware is not None:
        layer = Layer(hardware, cell, hidden, PRECISIONS[precision].name, rows)
        chosen = chosen_for(layer) if _only is None else fitting_for(layer).get(_only)
    layout = GateLayout(cell == "lstm", hidden, chosen.width if chosen else hidden, chosen is not None)
    large = hardware is not None and hardware.capability == GLUON_CAPABILITY and chosen is not None
    return LayerPlan(layout, PRECISIONS[precision], chosen, large)


@contextmanager
def only(family: str) -> Generator[None]:
    """Inside a ``with`` block, run layers with the kernels of this family, or with the portable ones if it can't.

    The setting holds for the process. Afterwards choices are made anew.
    """
    global _only
    before, _only = _only, family
    plan_for.cache_clear()
    try:
        yield
    finally:
        _only = before
        plan_for.cache_clear()


_only: str | None = None

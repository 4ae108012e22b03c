"""Execution plan of a layer, which depends on its sizes, its precision and the GPU only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from recurl.recurrence.triton.config import KernelChoice, chosen_for
from recurl.recurrence.triton.layout import GateLayout


@dataclass(frozen=True, eq=False)
class Form:
    """Execution plan of a layer. Plans are unique objects, so that they can be used as cache keys.

    Attributes:
        layout: layout of the gates.
        precision: precision of the recurrent products.
        chosen: kernels for sm_90, or None for the plain ones.
        dtype: dtype of the operands of large products.
        kept_dtype: dtype of the gates kept for the backward pass. Gates are bounded: float16 keeps three more bits than
            bfloat16, and as many as tf32.
    """

    layout: GateLayout
    precision: str
    chosen: KernelChoice | None
    dtype: torch.dtype
    kept_dtype: torch.dtype


@lru_cache(maxsize=256)
def form_for(
    hardware: tuple[tuple[int, int], int, tuple[int, ...]] | None, cell: str, hidden: int, precision: str, rows: int
) -> Form:
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
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    kept_dtype = torch.float16 if precision in ("bf16", "tf32") else torch.float32
    return Form(layout, precision, chosen, dtype, kept_dtype)

"""Precisions of the recurrent product, and the dtypes that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["PRECISIONS", "Precision"]


@dataclass(frozen=True)
class Precision:
    """Precision of a layer's kernels.

    Attributes:
        name: ``"ieee"``, ``"tf32"`` or ``"bf16"``.
        exact: whether results are accurate to float32.
        operands: dtype of the operands of large products.
        kept: dtype of the gates kept for the backward pass. Gates are bounded: float16 keeps three more bits than
            bfloat16, and as many as tf32.
    """

    name: str
    exact: bool
    operands: torch.dtype
    kept: torch.dtype

    @property
    def bits(self) -> int:
        """Bits of an operand."""
        return 8 * self.operands.itemsize


PRECISIONS = {
    "ieee": Precision("ieee", True, torch.float32, torch.float32),
    "tf32": Precision("tf32", False, torch.float32, torch.float16),
    "bf16": Precision("bf16", False, torch.bfloat16, torch.float16),
}
PRECISIONS["tf32x3"] = PRECISIONS["ieee"]

"""Configuration of the kernels with a matrix product per step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from recurl.recurrence.cuda.family import Direction, GluonFamily, lazy_import
from recurl.recurrence.cuda.layout import GateLayout
from recurl.recurrence.cuda.precision import Precision

__all__ = ["Tiles"]

_SHARED_BYTES = 224 * 1024  # of one CTA, without the memory of a reduction


@dataclass(frozen=True)
class Tiles(GluonFamily):
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
    programs: int = 1
    folder: ClassVar[str] = "tiles"

    @property
    def warps(self) -> int:
        """Warps per group that a program serves."""
        return self.rows // 16 * self.across

    def members_for(self, width: int) -> int:
        """Return the number of programs of a group."""
        return width // self.units

    def slots_on(self, processors: int, width: int) -> int:
        """Return the number of rows processed at once."""
        return self.groups_on(processors, width) * self.rows * self.walks

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

    def operands(self, direction: Direction, layout: GateLayout, precision: Precision) -> torch.dtype:
        """Return the dtype of the operands of the recurrent product.

        Weights and h are small numbers, for which float16 has all bits of tf32 in half the bytes.
        """
        half = precision.name == "tf32" and direction == "forward" and layout.width % 64 == 0
        return torch.float16 if half else precision.operands

    def numbers(self, direction: Direction, layout: GateLayout, precision: Precision) -> dict[str, Any]:
        """Return the compile-time arguments that only this family has."""
        dtype = self.operands(direction, layout, precision)
        found = {"BITS": 8 * dtype.itemsize, "ROWS": self.rows, "UNITS": self.units, "STAGES": self.stages}
        blocks, weights = layout.width * dtype.itemsize // 128, layout.num_gates * self.units
        if direction == "backward":
            found["SHARES"] = shares = self._shares(layout, precision)
            blocks, weights = layout.num_gates * blocks // shares, shares * self.units
        pages = self.pages_for(blocks, weights, 2 if precision.exact else 1)
        taken = 1 if precision.exact else self.blocks_at_once(pages, blocks)
        return {**found, "TAKEN": taken, "PAGES": pages, "WALKS": self.walks, "WARPS": self.warps}

    def weights(self, direction: Direction, w_hh: Tensor, layout: GateLayout, precision: Precision) -> Tensor:
        """Return the recurrent weights in pages; see ``arrange.pack_kernel``."""
        dtype = self.operands(direction, layout, precision)
        return lazy_import("weights").packed(direction, w_hh, layout, dtype, precision.exact)

    def mail(
        self, direction: Direction, layout: GateLayout, precision: Precision, groups: int, like: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the buffers of operands and of partial sums, and the arrival counters."""
        members, forward = self.members_for(layout.width), direction == "forward"
        if members == 1:
            return like, like  # neither read nor written
        shape = (groups, 2 if forward else 8, self.rows, (2 if precision.exact else 1) * layout.width)
        mail = like.new_empty(shape, dtype=self.operands(direction, layout, precision))
        if forward:
            return mail, torch.zeros(groups, dtype=torch.int32, device=like.device)
        shares = self._shares(layout, precision)
        flags = torch.zeros(groups * (1 + members // shares), dtype=torch.int32, device=like.device)
        sums = (groups, layout.width, self.rows, shares if shares > 1 else 0)
        return mail, flags, torch.empty(sums, dtype=torch.float32, device=like.device)

    def _shares(self, layout: GateLayout, precision: Precision) -> int:
        """Return how many programs share a product of the backward pass."""
        return self.shares_for(layout.width, layout.num_gates * layout.width * precision.operands.itemsize // 128)

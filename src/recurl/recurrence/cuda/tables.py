"""Configurations of the families' kernels for sm_90, as measured."""

from __future__ import annotations

import math

from recurl.recurrence.cuda.resident.config import Resident
from recurl.recurrence.cuda.tiles.config import Tiles

__all__ = ["RESIDENT", "SMALL_RESIDENT", "TILES", "TILES_EXACT"]

# By cell, largest W and precision: as many weights in registers as fit without spilling.
RESIDENT = {
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
SMALL_RESIDENT = Resident(0, 2, 0, 4)

# Forward and backward pass by largest W: the first that processes all rows of the batch at once, else the last.
TILES = {
    256: ((Tiles(64, 16, 8), Tiles(64, 16, 8, shares=4)),),
    512: (
        (Tiles(64, 16, 12), Tiles(64, 16, 12, shares=4)),
        (Tiles(64, 16, 6, walks=2), Tiles(64, 16, 6, shares=4, walks=2)),
    ),
    math.inf: (
        (Tiles(64, 16, 8), Tiles(64, 16, 8, shares=4)),
        (Tiles(64, 32, 8), Tiles(64, 32, 8, shares=4, across=2)),
        (Tiles(128, 32, 6), Tiles(128, 32, 6, shares=4)),
    ),
}
# The same accurate to float32, with pages of two parts.
TILES_EXACT = {
    256: ((Tiles(64, 16, 6), Tiles(64, 16, 6, shares=4)),),
    math.inf: (
        (Tiles(64, 16, 6), Tiles(64, 16, 6, shares=4)),
        (Tiles(64, 32, 4, across=2), Tiles(64, 32, 4, shares=4, across=2)),
    ),
}

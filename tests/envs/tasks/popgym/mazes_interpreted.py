"""Compare mazes that the GPU kernel carves, in Triton's interpreter (TRITON_INTERPRET=1), with their definition.

Prints one line per number of cells per side: ``side: squares that differ``.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from tests.recurrence.interpreter import allow_bounds, patch_once
from tests.recurrence.kernel_tests import print_checks

from recurl.envs.tasks.popgym import hunt_and_kill, hunt_and_kill_gpu

allow_bounds()
patch_once()


def differences(side: int) -> int:
    rng, rows = np.random.default_rng(side), 2
    starts, chances = rng.integers(side**2, size=rows), rng.random((3 * (side**2 - 1), rows))
    chances[1::3, 0] = 1 - 1e-13  # the luck of hunts that run out of trials
    expected = hunt_and_kill.carve(starts, chances, side)
    assert 0 < (expected[:, 0] == 0).sum() < 2 * side**2 - 1
    found = hunt_and_kill_gpu.carve(torch.from_numpy(starts), torch.from_numpy(chances), side)
    return int((found.numpy() != expected).sum())


if __name__ == "__main__":
    print_checks({str(side): partial(differences, side) for side in (3, 9)})

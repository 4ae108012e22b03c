"""What the tests of GPU kernels share: scripts run in separate processes, and the core that stays in ``make test``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
FALLBACK = 32  # registers that ptxas 12.8 gives kernels that need many more, unless they name a limit


def run(
    module: str,
    *arguments: str,
    start: Callable[..., Any] = subprocess.run,
    package: str = "tests.recurrence",
    **environment: str,
) -> dict[str, list[str]]:
    """Return the lines that a module prints, keyed by all words except the last ``numbers``."""
    command = [sys.executable, "-m", f"{package}.{module}", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = start(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return {line.split(":")[0]: line.split(":")[1].split() for line in done.stdout.splitlines()}


def print_checks(checks: dict[str, Callable[[], float]]) -> None:
    """Print ``name: result`` of the checks named on the command line, or of all; memory that nobody wrote is NaN."""
    torch.use_deterministic_algorithms(True)
    for name in sys.argv[1:] or checks:
        print(f"{name}: {checks[name]()}", flush=True)  # noqa: T201 - read by run


def core_and_rest(core: Collection[str], every: Iterable[str]) -> list[Any]:
    """Parametrize a test with the cases that run in ``make test``, and all others, which run in ``make kernels``."""
    rest = [name for name in every if name not in core]
    return [pytest.param([*core], id="core"), pytest.param(rest, id="rest", marks=pytest.mark.kernels)]


def but_first(cases: Iterable[Sequence[Any]]) -> list[Any]:
    """Mark all cases but the first, which runs in ``make test``, as tests of ``make kernels``."""
    return [pytest.param(*case, marks=[pytest.mark.kernels] * (index > 0)) for index, case in enumerate(cases)]


def opposites(sizes: Iterable[Any]) -> list[tuple[str, str, Any]]:
    """Return two of the four pairs of direction and cell for each size, in turn: each size has both of either.

    >>> opposites([1, 2])
    [('forward', 'lstm', 1), ('backward', 'gru', 1), ('forward', 'gru', 2), ('backward', 'lstm', 2)]
    """
    cells = ("lstm", "gru")
    return [
        (direction, cells[(index + place) % 2], size)
        for index, size in enumerate(sizes)
        for place, direction in enumerate(("forward", "backward"))
    ]

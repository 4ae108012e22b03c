"""Schedules: factors that decay from 1 to 0 over a run."""

from __future__ import annotations

import math
from collections.abc import Callable

from recurl.trainers.config import Schedule

SCHEDULES: dict[Schedule, Callable[[float], float]] = {
    "constant": lambda remaining: 1.0,
    "linear": lambda remaining: remaining,
    "cosine": lambda remaining: (1.0 - math.cos(math.pi * remaining)) / 2.0,
}
"""Factor as a function of the remaining fraction of the run, by name of the schedule.

Example:
    >>> [round(SCHEDULES["cosine"](remaining), 3) for remaining in (1.0, 0.75, 0.5, 0.0)]
    [1.0, 0.854, 0.5, 0.0]
"""

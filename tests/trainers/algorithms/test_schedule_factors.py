"""Factors of the schedules, as functions of the remaining fraction of a run."""

import math

import pytest

from recurl.trainers.algorithms.schedules import SCHEDULES

REMAINING = [1.0, 0.75, 0.5, 0.25, 0.0]


@pytest.mark.parametrize(
    ("name", "factors"),
    [
        ("constant", [1.0] * 5),
        ("linear", REMAINING),
        ("cosine", [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0.0]),
    ],
)
def test_factors(name: str, factors: list[float]) -> None:
    assert [SCHEDULES[name](remaining) for remaining in REMAINING] == pytest.approx(factors)

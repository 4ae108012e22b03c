"""Factors of the schedules, as functions of the remaining fraction of a run."""

import math

import pytest
import torch

from recurl.trainers.algorithms.schedules import SCHEDULES, adapted_rate

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


def test_an_adaptive_rate_follows_a_sequence_of_divergences_computed_by_hand() -> None:
    """Thresholds are 0.02 and 0.005; the rate stays between 1e-5 and 1e-2, and NaN changes nothing."""
    rate, found = torch.tensor(1e-3, dtype=torch.float64), []
    for kl in (0.03, 0.02, 0.01, 0.005, 0.004, 0.0, math.nan, *[1.0] * 14, *[1e-4] * 18):
        rate = adapted_rate(rate, torch.tensor(kl, dtype=torch.float64), 0.01)
        found.append(rate.item())
    down = 1e-3 / 1.5
    assert found[:7] == pytest.approx([down, down, down, down, 1e-3, 1.5e-3, 1.5e-3])
    assert found[7:21] == pytest.approx([max(1.5e-3 / 1.5**n, 1e-5) for n in range(1, 15)])
    assert found[20] == 1e-5
    assert found[21:] == pytest.approx([min(1e-5 * 1.5**n, 1e-2) for n in range(1, 19)])
    assert found[-1] == 1e-2

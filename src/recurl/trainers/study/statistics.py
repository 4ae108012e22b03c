"""Interquartile means of runs, and their bootstrap intervals.

Source: Agarwal et al., "Deep reinforcement learning at the edge of the statistical precipice" (2021).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from recurl.seeding import derive_seed

Array: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
_RESAMPLES = 2_000
_PERCENTILES = (2.5, 97.5)


def interquartile_mean(values: Array) -> Array:
    """Return the mean of the middle half of the runs: a quarter of them, rounded down, is left out at each end.

    Args:
        values: ``[*B, runs]``.

    Example:
        >>> float(interquartile_mean(np.array([0.0, 1.0, 2.0, 3.0, 100.0])))
        2.0
    """
    runs = values.shape[-1]
    cut = runs // 4
    return np.sort(values, axis=-1)[..., cut : runs - cut].mean(axis=-1)


def bootstrap_interval(values: Array) -> tuple[Array, Array]:
    """Return the ends of a 95 % interval of the interquartile mean: percentiles over runs drawn with replacement.

    The same values give the same interval. That of one run has no width.

    Args:
        values: ``[*B, runs]``; the same draws of runs are taken everywhere.

    Example:
        >>> low, high = bootstrap_interval(np.array([1.0, 2.0, 3.0, 4.0]))
        >>> bool(1.0 <= low < 2.5 < high <= 4.0)
        True
    """
    runs = values.shape[-1]
    drawn = np.random.default_rng(derive_seed(0, "bootstrap")).integers(runs, size=(_RESAMPLES, runs))
    resampled = np.stack([interquartile_mean(values[..., one]) for one in drawn])
    low, high = np.percentile(resampled, _PERCENTILES, axis=0)
    return low, high

"""Interquartile means of runs, aggregates over tasks, and bootstrap confidence intervals.

Source: Agarwal et al., "Deep reinforcement learning at the edge of the statistical precipice" (2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from recurl.core.seeding import derive_seed

Array: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
AGGREGATES = ("IQM", "median", "mean", "optimality gap")
_RESAMPLES = 2_000
_PERCENTILES = (2.5, 97.5)


def interquartile_mean(values: Array) -> Array:
    """Return the mean of the middle half of the runs; a quarter of the runs, rounded down, is discarded at each end.

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
    """Return the bounds of a 95% percentile bootstrap interval of the interquartile mean.

    The same values give the same interval. The interval of a single run has zero width.

    Args:
        values: ``[*B, runs]``; all batch elements use the same resampled runs.

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


def aggregates(scores: Sequence[Array]) -> Array:
    """Return the :data:`AGGREGATES` of normalized scores over several tasks, ``[*B, 4]``.

    They match the rliable library: the interquartile mean over all runs of all tasks; median and mean over tasks of the
    mean over runs; and the optimality gap, the average shortfall of runs below 1. The last three weight tasks equally.

    Args:
        scores: ``[*B, runs]`` per task; tasks may have different numbers of runs.

    Example:
        >>> aggregates([np.array([0.5, 0.7]), np.array([1.2, 1.0])]).round(3).tolist()
        [0.85, 0.85, 0.85, 0.2]
    """
    means = np.stack([one.mean(axis=-1) for one in scores], axis=-1)
    gaps = np.stack([np.maximum(1.0 - one, 0.0).mean(axis=-1) for one in scores], axis=-1)
    iqm = interquartile_mean(np.concatenate(scores, axis=-1))
    return np.stack([iqm, np.median(means, axis=-1), means.mean(axis=-1), gaps.mean(axis=-1)], axis=-1)


def stratified_intervals(scores: Sequence[Array]) -> tuple[Array, Array]:
    """Return the bounds of 95% stratified bootstrap intervals of :func:`aggregates`, ``[4]`` each.

    Runs are resampled with replacement within each task. The same scores give the same intervals.

    Args:
        scores: ``[runs]`` per task.

    Example:
        >>> low, high = stratified_intervals([np.array([0.0, 1.0]), np.array([0.5, 0.5])])
        >>> float(low[2]), float(high[2])
        (0.25, 0.75)
    """
    random = np.random.default_rng(derive_seed(0, "stratified bootstrap"))
    drawn = [one[random.integers(len(one), size=(_RESAMPLES, len(one)))] for one in scores]
    low, high = np.percentile(aggregates(drawn), _PERCENTILES, axis=0)
    return low, high


def hierarchical_interval(scores: Sequence[Array]) -> tuple[float, float]:
    """Return the bounds of a 95% bootstrap interval of the mean over tasks of the mean over runs.

    Tasks are resampled with replacement, and the runs of each resampled task too: the interval is about other tasks of
    this kind, that of :func:`stratified_intervals` about other seeds of these tasks. The same scores give the same
    interval.

    Args:
        scores: ``[runs]`` per task.

    Example:
        >>> low, high = hierarchical_interval([np.array([0.0, 0.0]), np.array([1.0, 1.0])])
        >>> low, high
        (0.0, 1.0)
    """
    random = np.random.default_rng(derive_seed(0, "hierarchical bootstrap"))
    total = np.zeros(_RESAMPLES)
    for _ in scores:
        tasks = random.integers(len(scores), size=_RESAMPLES)
        for task, one in enumerate(scores):
            drawn = np.flatnonzero(tasks == task)
            total[drawn] += one[random.integers(len(one), size=(len(drawn), len(one)))].mean(axis=-1)
    low, high = np.percentile(total / len(scores), _PERCENTILES)
    return float(low), float(high)

"""Learning curve of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from recurl.trainers.report.figure import Line, draw_returns
from recurl.trainers.report.metrics import EVALUATION, MAX_RETURN, RETURN, SPREAD, Array, read_curve

_WINDOWS = 50  # smoothing windows across the figure
_MAX_POINTS = 2_000  # points drawn per curve


def plot_learning_curve(
    metrics: Path, picture: Path, *, title: str, evaluations: Path | None = None, references: Mapping[str, float]
) -> None:
    """Draw smoothed training returns and evaluation returns over environment steps, with standard deviations.

    Args:
        metrics: ``metrics.csv`` of a run.
        picture: file to write; its suffix determines the format.
        title: title of the figure.
        evaluations: ``evaluations.csv``, if there is one.
        references: heights of dashed lines, by name.

    Raises:
        StorageError: the picture can't be written.
    """
    lines = [_line("training return", metrics, RETURN, SPREAD, smooth=True)]
    if evaluations is not None:
        lines.append(_line("evaluation return", evaluations, EVALUATION, f"{EVALUATION}_std", smooth=False))
    lines = [line for line in lines if len(line.steps)]
    draw_returns(picture, lines, title=title, ylabel="return, mean and standard deviation", references=references)


def _line(label: str, file: Path, mean: str, spread: str, *, smooth: bool) -> Line:
    steps, *columns = read_curve(file, mean, spread)
    means, spreads = (np.clip(column, -MAX_RETURN, MAX_RETURN) for column in columns)
    window = max(1, len(steps) // _WINDOWS) if smooth else 1
    means, bands = smoothed(means, window), smoothed(np.nan_to_num(spreads, nan=0.0), window)
    shown = np.unique(np.linspace(0, max(len(steps) - 1, 0), min(len(steps), _MAX_POINTS), dtype=int))
    low, high = ((means + sign * bands)[shown].tolist() for sign in (-1, 1))
    return Line(label, steps[shown].tolist(), means[shown].tolist(), low, high, points=not smooth)


def smoothed(values: Array, window: int) -> Array:
    """Return the moving average over the last ``window`` values, ``[rows]`` like the values.

    Example:
        >>> smoothed(np.array([0.0, 2.0, 4.0, 6.0]), 2).tolist()
        [0.0, 1.0, 3.0, 5.0]
    """
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(ends - window, 0)
    return (sums[ends] - sums[begins]) / (ends - begins)

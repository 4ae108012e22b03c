"""Learning curve of a run, drawn from its metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from recurl.trainers.report.figure import Line, draw_returns
from recurl.trainers.report.metrics import EVALUATION, RETURN, SPREAD, read_metrics

_SMOOTHED = 50  # of the width of the figure


def plot_learning_curve(
    metrics: Path, picture: Path, *, title: str, evaluations: Path | None = None, references: Mapping[str, float]
) -> None:
    """Draw returns over environment steps: of training episodes, smoothed, and of evaluations, each with its spread.

    Args:
        metrics: ``metrics.csv`` of a run.
        picture: file to write; its suffix decides the format.
        title: heading.
        evaluations: ``evaluations.csv``, if there is one.
        references: heights of dashed lines, by name.

    Raises:
        StorageError: the picture can't be written.
    """
    lines = [_line("training return", read_metrics(metrics)[1], RETURN, SPREAD, smooth=True)]
    if evaluations is not None:
        rows = read_metrics(evaluations, EVALUATION)[1]
        lines.append(_line("evaluation return", rows, EVALUATION, f"{EVALUATION}_std", smooth=False))
    lines = [line for line in lines if len(line.steps)]
    draw_returns(picture, lines, title=title, ylabel="return, mean and standard deviation", references=references)


def _line(label: str, rows: Sequence[Mapping[str, str]], mean: str, spread: str, *, smooth: bool) -> Line:
    numbers = [(int(row["env_steps"]), float(row[mean]), float(row.get(spread) or "nan")) for row in rows]
    known = [row for row in numbers if math.isfinite(row[1])]
    window = max(1, len(known) // _SMOOTHED) if smooth else 1
    means, spreads = (smoothed([row[place] for row in known], window) for place in (1, 2))
    bands = [0.0 if math.isnan(value) else value for value in spreads]
    low, high = ([value + sign * band for value, band in zip(means, bands, strict=True)] for sign in (-1, 1))
    return Line(label, [row[0] for row in known], means, low, high, points=not smooth)


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Return means over the last ``window`` values.

    Example:
        >>> smoothed([0.0, 2.0, 4.0, 6.0], 2)
        [0.0, 1.0, 3.0, 5.0]
    """
    return [sum(last) / len(last) for end in range(1, len(values) + 1) if (last := values[max(0, end - window) : end])]

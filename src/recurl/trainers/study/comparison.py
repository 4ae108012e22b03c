"""Comparison of runs: scores and learning curves of groups of seeds, with intervals."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from recurl.errors import ArgumentError
from recurl.trainers.files.durable import write_whole
from recurl.trainers.report.figure import FORMATS, Line, draw_returns
from recurl.trainers.report.references import reference_returns
from recurl.trainers.study.curves import Curve, Metric, find_runs, group, read_curves
from recurl.trainers.study.statistics import Array, bootstrap_interval, interquartile_mean

_POINTS = 200
_COLUMNS = ("runs", "steps", "IQM", "95 % interval", "least", "most")


class Group(NamedTuple):
    """Runs that differ in the seed only.

    Each curve has 2 to 200 steps. A run that ended earlier than others counts with its last return from there on.
    """

    label: str
    scores: list[float]
    """Last return of each run."""
    iqm: float
    interval: tuple[float, float] | None
    """None for one run."""
    steps: Array
    curve: Array
    """Interquartile means at ``steps``."""
    band: tuple[Array, Array]


class Comparison(NamedTuple):
    """Groups of runs of one task."""

    task: str
    metric: Metric
    groups: list[Group]
    references: dict[str, float]

    def table(self) -> str:
        """Return the scores as text, one line per group."""
        rows = [("", *_COLUMNS), *(_row(group) for group in self.groups)]
        widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        ]
        what = "last 20 training episodes" if self.metric == "training" else "last evaluation"
        known = "".join(f"; {name} {value:.4g}" for name, value in self.references.items())
        return "\n".join([f"{self.task}: return of the {what}{known}", *(line.rstrip() for line in lines)])

    def write(self, picture: Path) -> list[Path]:
        """Write the learning curves as a picture and as CSV beside it, and the scores of all runs as another CSV.

        Raises:
            ArgumentError: the name of the picture has another ending.
            StorageError: a file can't be written.
        """
        if picture.suffix[1:] not in FORMATS:
            raise ArgumentError(f"A picture's name must end with .{', .'.join(FORMATS)}, got {picture}.")
        lines = [Line(f"{g.label} ({len(g.scores)})", g.steps, g.curve, *g.band) for g in self.groups]  # type: ignore[reportArgumentType] # arrays are sequences
        what = "training" if self.metric == "training" else "greedy"
        ylabel = f"{what} return, IQM and 95 % interval"
        draw_returns(picture, lines, title=self.task, ylabel=ylabel, references=self.references)
        curves, scores = picture.with_suffix(".csv"), picture.with_name(f"{picture.stem}_scores.csv")
        points = [
            (g.label, int(step), *(f"{number:.6g}" for number in numbers))
            for g in self.groups
            for step, *numbers in zip(g.steps, g.curve, *g.band, strict=True)
        ]
        _write_csv(curves, ("group", "env_steps", "iqm", "low", "high"), points)
        _write_csv(scores, ("group", "score"), [(g.label, f"{score:.6g}") for g in self.groups for score in g.scores])
        return [picture, curves, scores]


def compare(paths: Sequence[Path], metric: Metric | None = None) -> Comparison:
    """Compare runs, and those of sweeps.

    Args:
        paths: folders of runs or sweeps.
        metric: see :func:`~recurl.trainers.study.curves.read_curves`.

    Raises:
        ArgumentError: a folder holds no run, the runs are of several tasks, or one has no return.
    """
    metric, curves = read_curves(find_runs(paths), metric)
    config = curves[0].config if metric == "training" else curves[0].config.for_evaluation()
    references = reference_returns(config.env_name, config.env_arguments)
    groups = [_group(label, members) for label, members in group(curves).items()]
    return Comparison(" ".join((config.env_name, *config.env_kwargs)), metric, groups, references)


def _group(label: str, curves: Sequence[Curve]) -> Group:
    first, last = max(curve.steps[0] for curve in curves), max(curve.steps[-1] for curve in curves)
    steps = np.unique(np.linspace(min(first, last), last, _POINTS).round())
    values = np.stack([np.interp(steps, curve.steps, curve.values) for curve in curves], axis=-1)
    scores = [curve.values[-1] for curve in curves]
    low, high = bootstrap_interval(np.asarray(scores))
    interval = (float(low), float(high)) if len(scores) > 1 else None
    iqm = float(interquartile_mean(np.asarray(scores)))
    return Group(label, scores, iqm, interval, steps, interquartile_mean(values), bootstrap_interval(values))


def _row(group: Group) -> tuple[str, ...]:
    interval = "-" if group.interval is None else "{:.4g} to {:.4g}".format(*group.interval)
    numbers = (group.iqm, min(group.scores), max(group.scores))
    iqm, least, most = (f"{number:.4g}" for number in numbers)
    return group.label, str(len(group.scores)), f"{int(group.steps[-1]):,}", iqm, interval, least, most


def _write_csv(path: Path, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    text = io.StringIO(newline="")
    csv.writer(text).writerows([columns, *rows])
    write_whole(path, text.getvalue().encode())

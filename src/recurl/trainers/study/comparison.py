"""Comparison of runs: scores and learning curves of groups of seeds with confidence intervals."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from recurl.core.errors import ArgumentError
from recurl.trainers.files.durable import write_atomic
from recurl.trainers.report.figure import FORMATS, Bars, Line, Panel, draw_intervals, draw_panels
from recurl.trainers.report.references import MEMORYLESS, OPTIMUM, reference_returns
from recurl.trainers.study.curves import Curve, Metric, by_task, find_runs, group, read_curves
from recurl.trainers.study.statistics import (
    AGGREGATES,
    Array,
    aggregates,
    bootstrap_interval,
    interquartile_mean,
    stratified_intervals,
)

_POINTS = 200
_SCORE_NAMES = {"training": "mean of the last 20 episodes", "evaluation": "last evaluation"}
_COLUMNS = ("runs", "steps", "IQM", "95% interval", "min", "max")


class Group(NamedTuple):
    """Runs that differ only in the seed.

    Each curve has 2 to 200 steps. The curve of a run that ended earlier than others is extended with its last return.
    """

    label: str
    scores: list[float]
    """Last return of each run."""
    iqm: float
    interval: tuple[float, float] | None
    """95% interval of the interquartile mean; None for a single run."""
    steps: Array
    curve: Array
    """Interquartile means at ``steps``."""
    band: tuple[Array, Array]


class TaskComparison(NamedTuple):
    """Comparison of groups of runs on one task."""

    task: str
    metric: Metric
    groups: list[Group]
    references: dict[str, float]

    def table(self) -> str:
        """Return the scores as text, one line per group."""
        known = "".join(f"; {name} {value:.4g}" for name, value in self.references.items())
        title = f"{self.task}: {self.metric} return, {_SCORE_NAMES[self.metric]}{known}"
        return "\n".join([title, *_table(("", *_COLUMNS), [_row(group) for group in self.groups])])

    def panel(self, labels: Sequence[str]) -> Panel:
        """Return the panel of learning curves; a group's color is determined by its index in ``labels``."""
        lines = [
            Line(
                f"{g.label} ({len(g.scores)})",
                *(part.tolist() for part in (g.steps, g.curve, *g.band)),
                points=len(g.steps) == 1,
                color=labels.index(g.label),
            )
            for g in self.groups
        ]
        return Panel(self.task, lines, self.references)

    def normalized(self, group: Group) -> Array | None:
        """Return a group's scores normalized to 0 for the best memoryless policy and 1 for the optimum, or None."""
        if not self.references:
            return None
        one, zero = (self.references[name] for name in (OPTIMUM, MEMORYLESS))
        return None if one == zero else (np.asarray(group.scores) - zero) / (one - zero)


class Aggregate(NamedTuple):
    """Normalized scores of a group over several tasks."""

    label: str
    runs: int
    values: Array
    """``[4]``: see :func:`~recurl.trainers.study.statistics.aggregates`."""
    intervals: tuple[Array, Array] | None
    """None if every task has a single run."""


class Comparison(NamedTuple):
    """Comparison of groups of runs on one or several tasks.

    Attributes:
        metric: the return that is scored.
        tasks: comparisons per task.
        aggregates: aggregates over the tasks with reference returns, if there are several, for groups with runs on all
            of them.
        notes: remarks on the scores, one line each.
    """

    metric: Metric
    tasks: list[TaskComparison]
    aggregates: list[Aggregate]
    notes: list[str]

    def table(self) -> str:
        """Return the scores of each task, aggregates over tasks, and notes as text."""
        parts = [task.table() for task in self.tasks]
        if self.aggregates:
            title = (
                f"Over tasks: normalized {self.metric} return (0 best without memory, 1 optimum), 95% stratified "
                "bootstrap intervals"
            )
            rows = [_aggregate_row(one) for one in self.aggregates]
            parts.append("\n".join([title, *_table(("", "runs", *AGGREGATES), rows)]))
        return "\n\n".join([*parts, *(["\n".join(self.notes)] if self.notes else [])])

    def write(self, picture: Path) -> list[Path]:
        """Write the learning curves as a picture and a CSV file next to it, and the scores of all runs as CSV.

        For several tasks, the aggregates are written to another picture and CSV file.

        Raises:
            ArgumentError: the picture has an unsupported suffix.
            StorageError: a file can't be written.
        """
        if picture.suffix[1:] not in FORMATS:
            raise ArgumentError(f"A picture's name must end with .{', .'.join(FORMATS)}, got {picture}.")
        labels = list(dict.fromkeys(g.label for task in self.tasks for g in task.groups))
        panels = [task.panel(labels) for task in self.tasks]
        draw_panels(picture, panels, ylabel=f"{self.metric} return, IQM and 95% interval")
        several = len(self.tasks) > 1
        curves, scores = picture.with_suffix(".csv"), picture.with_name(f"{picture.stem}_scores.csv")
        groups = [((task.task, g.label) if several else (g.label,), g) for task in self.tasks for g in task.groups]
        names = ("task", "group") if several else ("group",)
        points = [
            (*name, int(step), *(f"{number:.6g}" for number in numbers))
            for name, g in groups
            for step, *numbers in zip(g.steps, g.curve, *g.band, strict=True)
        ]
        _write_csv(curves, (*names, "env_steps", "iqm", "low", "high"), points)
        _write_csv(scores, (*names, "score"), [(*name, f"{score:.6g}") for name, g in groups for score in g.scores])
        return [picture, curves, scores, *(self._write_aggregates(picture) if self.aggregates else [])]

    def _write_aggregates(self, picture: Path) -> list[Path]:
        drawn = picture.with_name(f"{picture.stem}_aggregates{picture.suffix}")
        numbers = drawn.with_suffix(".csv")
        labels = [one.label for one in self.aggregates]
        rows = np.stack([(one.values, *(one.intervals or (one.values, one.values))) for one in self.aggregates])
        panels = [Bars(name, labels, *rows[..., place].T.tolist()) for place, name in enumerate(AGGREGATES)]
        draw_intervals(drawn, panels)
        text = [
            (label, name, *(f"{number:.6g}" for number in row[:, place]))
            for label, row in zip(labels, rows, strict=True)
            for place, name in enumerate(AGGREGATES)
        ]
        _write_csv(numbers, ("group", "aggregate", "value", "low", "high"), text)
        return [drawn, numbers]


def compare(paths: Sequence[Path], metric: Metric | None = None) -> Comparison:
    """Compare individual runs and runs of sweeps.

    Args:
        paths: folders of runs or sweeps, of one or several tasks.
        metric: see :func:`~recurl.trainers.study.curves.read_curves`.

    Raises:
        ArgumentError: a folder contains no run, or a run has no return.
    """
    metric, curves = read_curves(find_runs(paths), metric)
    found = by_task(curves, metric)
    tasks = [_task(name, metric, groups) for name, groups in zip(found, group(list(found.values())), strict=True)]
    aggregated, notes = _aggregate(tasks) if len(tasks) > 1 else ([], [])
    if metric == "evaluation":
        notes += [
            f"{curve.path}: last evaluated after {curve.steps[-1]:,} of {curve.trained:,} steps"
            for curve in curves
            if curve.steps[-1] < curve.trained
        ]
    return Comparison(metric, tasks, aggregated, notes)


def _task(name: str, metric: Metric, groups: Mapping[str, Sequence[Curve]]) -> TaskComparison:
    config = next(iter(groups.values()))[0].config
    config = config if metric == "training" else config.for_evaluation()
    in_trials = config.values.get("trial_episodes")  # whose returns are sums of episodes
    references = {} if in_trials else reference_returns(config.env_name, config.env_arguments)
    return TaskComparison(name, metric, [_group(label, members) for label, members in groups.items()], references)


def _aggregate(tasks: Sequence[TaskComparison]) -> tuple[list[Aggregate], list[str]]:
    """Return the aggregates over tasks and notes on excluded tasks and groups."""
    notes: list[str] = []
    known: dict[str, dict[str, Array]] = {}
    for task in tasks:
        scores = {group.label: task.normalized(group) for group in task.groups}
        normalized = {label: values for label, values in scores.items() if values is not None}
        if normalized:
            known[task.task] = normalized
        else:
            notes.append(f"{task.task} declares no reference returns: it is excluded from aggregates over tasks")
    if len(known) < 2:
        return [], notes
    found: list[Aggregate] = []
    for label in dict.fromkeys(one.label for task in tasks for one in task.groups):
        lacking = [name for name, scores in known.items() if label not in scores]
        if lacking:
            notes.append(f"{label} has no run on {', '.join(lacking)}: it is excluded from aggregates over tasks")
            continue
        scores = [one[label] for one in known.values()]
        several = any(len(one) > 1 for one in scores)
        intervals = stratified_intervals(scores) if several else None
        found.append(Aggregate(label, sum(map(len, scores)), aggregates(scores), intervals))
    return found, notes


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
    iqm, low, high = (f"{number:.4g}" for number in numbers)
    return group.label, str(len(group.scores)), f"{int(group.steps[-1]):,}", iqm, interval, low, high


def _aggregate_row(one: Aggregate) -> tuple[str, ...]:
    texts = [f"{value:.3f}" for value in one.values]
    if one.intervals is not None:
        texts = [f"{text} ({low:.3f} to {high:.3f})" for text, low, high in zip(texts, *one.intervals, strict=True)]
    return one.label, str(one.runs), *texts


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in (header, *rows)
    ]


def _write_csv(path: Path, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    text = io.StringIO(newline="")
    csv.writer(text).writerows([columns, *rows])
    write_atomic(path, text.getvalue().encode())

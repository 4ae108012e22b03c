"""Reading and grouping of learning curves of existing runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from recurl.core.errors import ArgumentError
from recurl.trainers.algorithms.written import WrittenOptions
from recurl.trainers.report.metrics import EVALUATION, MAX_RETURN, RETURN, STEPS, read_curve
from recurl.trainers.run.folder import RunFolder

Metric: TypeAlias = Literal["training", "evaluation"]
_IGNORED_OPTIONS = {
    *("seed", "threads", "device", "backend", "checkpoint_every", "logger", "callback", "env", "env_kwargs"),
    *("keep_best", "eval_every", "eval_episodes", "eval_max_steps", "eval_env", "eval_env_kwargs"),
}


class Curve(NamedTuple):
    """Returns of a run over environment steps."""

    path: Path
    config: WrittenOptions
    steps: list[int]
    values: list[float]
    trained: int = 0
    """Environment steps trained so far."""


def find_runs(paths: Sequence[Path]) -> list[RunFolder]:
    """Return the runs in folders, each a run or a sweep.

    Raises:
        ArgumentError: a folder is neither a run nor a sweep, or a sweep contains no run.
    """
    return [run for path in paths for run in _runs_in(path)]


def _runs_in(path: Path) -> list[RunFolder]:
    if (path / "sweep.json").exists():
        runs = [RunFolder(file.parent) for file in sorted(path.glob("*/config.json"))]
        for run in runs:
            if run.path.is_symlink():
                raise ArgumentError(f"{run.path} is a symbolic link: name the run that it points to, not the sweep.")
        if not runs:
            raise ArgumentError(f"The sweep {path} contains no run yet.")
        return runs
    if not (path / "config.json").exists():
        raise ArgumentError(f"{path} is neither a run nor a sweep: name folders written by recurl train or sweep.")
    return [RunFolder(path)]


def read_curves(folders: Iterable[RunFolder], metric: Metric | None = None) -> tuple[Metric, list[Curve]]:
    """Return the learning curves of runs.

    Args:
        folders: the runs.
        metric: returns of training episodes, or of evaluations during training. By default evaluations if all runs have
            some, training returns otherwise.

    Raises:
        ArgumentError: a run has no such return.
    """
    runs = [(folder, folder.read_written()) for folder in folders]
    if metric is None:
        evaluated = all(len(read_curve(folder.evaluations, EVALUATION)[0]) for folder, _ in runs)
        metric = "evaluation" if evaluated else "training"
    return metric, [_curve(folder, config, metric) for folder, config in runs]


def _curve(folder: RunFolder, config: WrittenOptions, metric: Metric) -> Curve:
    file, column = (folder.metrics, RETURN) if metric == "training" else (folder.evaluations, EVALUATION)
    steps, values = read_curve(file, column)
    if not len(steps):
        lacking = "has no finished episode" if metric == "training" else "has no evaluation (--eval-every)"
        raise ArgumentError(f"The run {folder.path} {lacking}: leave it out, or train it for longer.")
    if np.abs(values).max() > MAX_RETURN:
        raise ArgumentError(
            f"The run {folder.path} has returns beyond {MAX_RETURN:g}, whose means can't be computed: leave it out."
        )
    trained = [int(step) for step in read_curve(folder.metrics, STEPS)[0][-1:]]
    return Curve(folder.path, config, [int(step) for step in steps], values.tolist(), *trained)


def by_task(curves: Sequence[Curve], metric: Metric) -> dict[str, list[Curve]]:
    """Group curves by the task on which their returns were measured, in order of first appearance."""
    tasks: dict[str, list[Curve]] = {}
    for curve in curves:
        config = curve.config if metric == "training" else curve.config.for_evaluation()
        tasks.setdefault(" ".join((config.env_name, *sorted(config.env_kwargs))), []).append(curve)
    return tasks


def group(tasks: Sequence[Sequence[Curve]]) -> list[dict[str, list[Curve]]]:
    """Group the curves of each task so that runs in a group differ only in the seed.

    A group's label lists the options in which runs of its algorithm differ on any task, and the algorithm if there are
    several. Labels have the same meaning on all tasks. Groups are sorted by their options: numbers by value, others in
    order of appearance.
    """
    curves = [curve for task in tasks for curve in task]
    algorithms = list(dict.fromkeys(curve.config.algorithm for curve in curves))
    varied = {name: _varied(tasks, name) for name in algorithms}
    labels: dict[str, tuple[Any, ...]] = {}
    found = [dict[str, list[Curve]]() for _ in tasks]
    for groups, task in zip(found, tasks, strict=True):
        for curve in task:
            name, options = curve.config.algorithm, _options(curve)
            parts = [f"{option}={_format(options.get(option))}" for option in varied[name]]
            if len(algorithms) > 1 or not parts:
                parts.insert(0, name if parts else f"{name}, {curve.config.cell}")
            label = ", ".join(parts)
            labels.setdefault(label, (name, *(options.get(option) for option in varied[name])))
            groups.setdefault(label, []).append(curve)
    ranks = [_ranks(column) for column in zip_longest(*labels.values())]
    order = {
        label: [rank[str(value)] for rank, value in zip(ranks, key, strict=False)] for label, key in labels.items()
    }
    return [dict(sorted(groups.items(), key=lambda item: order[item[0]])) for groups in found]


def _options(curve: Curve) -> dict[str, Any]:
    return {name: value for name, value in curve.config.to_dict().items() if name not in _IGNORED_OPTIONS}


def _varied(tasks: Sequence[Sequence[Curve]], algorithm: str) -> list[str]:
    """Return the options in which runs of an algorithm differ within a task."""
    found: dict[str, None] = {}
    for task in tasks:
        first, *others = [_options(curve) for curve in task if curve.config.algorithm == algorithm] or [{}]
        found |= dict.fromkeys(name for name in first if any(other.get(name) != first[name] for other in others))
    return list(found)


def _ranks(values: Iterable[Any]) -> dict[str, int]:
    """Return the sort rank of each value by its text: non-numbers in their order, then numbers by value."""
    known = {str(value): value for value in values}
    numbers = {text for text, value in known.items() if isinstance(value, int | float)}
    ordered = [text for text in known if text not in numbers] + sorted(numbers, key=lambda text: known[text])
    return {text: rank for rank, text in enumerate(ordered)}


def _format(value: Any) -> str:
    return (" ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)

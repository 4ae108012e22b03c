"""Learning curves of runs that exist: read, and put side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from recurl.errors import ArgumentError
from recurl.trainers.config import RunConfig
from recurl.trainers.report.metrics import EVALUATION, RETURN, read_metrics
from recurl.trainers.run.folder import RunFolder

Metric: TypeAlias = Literal["training", "evaluation"]
_ASIDE = {
    *("seed", "threads", "device", "backend", "checkpoint_every", "logger", "callback", "env", "env_kwargs"),
    *("keep_best", "eval_every", "eval_episodes", "eval_max_steps", "eval_env", "eval_env_kwargs"),
}


class Curve(NamedTuple):
    """Returns of a run over environment steps."""

    path: Path
    config: RunConfig
    steps: list[int]
    values: list[float]


def find_runs(paths: Sequence[Path]) -> list[RunFolder]:
    """Return the runs that folders are, or hold as sweeps.

    Raises:
        ArgumentError: a folder is neither, or a sweep holds no run.
    """
    return [run for path in paths for run in _runs_in(path)]


def _runs_in(path: Path) -> list[RunFolder]:
    if (path / "sweep.json").exists():
        runs = [RunFolder(file.parent) for file in sorted(path.glob("*/config.json"))]
        if not runs:
            raise ArgumentError(f"The sweep {path} holds no run yet.")
        return runs
    if not (path / "config.json").exists():
        raise ArgumentError(f"{path} is neither a run nor a sweep: name folders that recurl train or sweep wrote.")
    return [RunFolder(path)]


def read_curves(folders: Iterable[RunFolder], metric: Metric | None = None) -> tuple[Metric, list[Curve]]:
    """Return the learning curves of runs of one task.

    Args:
        folders: the runs.
        metric: returns of training episodes, or of evaluations during training; by default these where all runs have
            some.

    Raises:
        ArgumentError: the runs are of several tasks, or one has no such return.
    """
    runs = [(folder, folder.read_config()) for folder in folders]
    if metric is None:
        evaluated = all(read_metrics(folder.evaluations, EVALUATION)[1] for folder, _ in runs)
        metric = "evaluation" if evaluated else "training"
    _check_task([(folder.path, config if metric == "training" else config.for_evaluation()) for folder, config in runs])
    return metric, [_curve(folder, config, metric) for folder, config in runs]


def _check_task(runs: Sequence[tuple[Path, RunConfig]]) -> None:
    first, *others = [(path, " ".join((config.env_name, *sorted(config.env_kwargs)))) for path, config in runs]
    for path, task in others:
        if task != first[1]:
            raise ArgumentError(
                f"Only runs of one task can be compared, got {first[1]} ({first[0]}) and {task} ({path}): compare "
                "those of each task by themselves."
            )


def _curve(folder: RunFolder, config: RunConfig, metric: Metric) -> Curve:
    file, column = (folder.metrics, RETURN) if metric == "training" else (folder.evaluations, EVALUATION)
    rows = [(int(row["env_steps"]), float(row[column])) for row in read_metrics(file, column)[1]]
    known = [row for row in rows if math.isfinite(row[1])]
    if not known:
        lacking = "has no episode that ended" if metric == "training" else "has no evaluation (--eval-every)"
        raise ArgumentError(f"The run {folder.path} {lacking}: leave it out, or train it for longer.")
    return Curve(folder.path, config, [step for step, _ in known], [value for _, value in known])


def group(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    """Return curves by what their runs have in common: runs that differ in the seed only are together.

    A group's name holds the options in which it differs from other groups of its algorithm, and the algorithm where
    there are several.
    """
    algorithms = list(dict.fromkeys(curve.config.algorithm for curve in curves))
    varied = {name: _varied([curve for curve in curves if curve.config.algorithm == name]) for name in algorithms}
    groups: dict[str, list[Curve]] = {}
    for curve in curves:
        name, options = curve.config.algorithm, _options(curve)
        parts = [f"{option}={_shown(options[option])}" for option in varied[name]]
        if len(algorithms) > 1 or not parts:
            parts.insert(0, name if parts else f"{name}, {curve.config.cell}")
        groups.setdefault(", ".join(parts), []).append(curve)
    return groups


def _options(curve: Curve) -> dict[str, Any]:
    return {name: value for name, value in curve.config.to_dict().items() if name not in _ASIDE}


def _varied(curves: Sequence[Curve]) -> list[str]:
    all_options = [_options(curve) for curve in curves]
    return [name for name in all_options[0] if any(other[name] != all_options[0][name] for other in all_options)]


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)

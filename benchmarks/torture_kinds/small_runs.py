"""Small runs of every algorithm, and the comparison of an attacked run with an undisturbed one."""

from __future__ import annotations

import csv
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from recurl.trainers import RunFolder
from recurl.trainers.checkpoint import latest_checkpoint, load_checkpoint
from torture_kinds.forks import Broken, Command

_TASK = (
    "--env recurl/RepeatPrevious-v0 --env-kwargs k=1 episode_length=8 --hidden-size 8 --num-envs 2 --rollout-steps 8"
)
_REPLAY = "--slices 2 --slice-length 6 --learning-starts 32 --buffer-size 128"
UPDATES = 24
STEPS_PER_UPDATE = 16
ALGORITHMS = {
    "ppo": "ppo --sequence-length 4 --minibatches 2",
    "ppo --overlap": "ppo --sequence-length 4 --minibatches 2 --overlap",
    "dqn": f"dqn {_REPLAY} --cell gru",
    "r2d2": f"r2d2 {_REPLAY} --burn-in 2",
}
_CLOCKS = ("wall_s", "cpu_s", "steps_per_s")


def words(algorithm: str, folder: Path, *more: object, every: int = 1, updates: int = UPDATES) -> list[str]:
    """Return the command line of a run."""
    steps = f"--total-steps {updates * STEPS_PER_UPDATE} --checkpoint-every {every} --eval-episodes 2"
    return ["train", *f"{ALGORITHMS[algorithm]} {_TASK} {steps} --run-dir".split(), str(folder), *map(str, more)]


def whole(place: Path, algorithm: str, every: int = 1, updates: int = UPDATES) -> tuple[RunFolder, float]:
    """Return an undisturbed run, cached across attacks, and its duration in seconds."""
    name = f"{algorithm.replace(' ', '')}-{every}-{updates}"
    folder, note = RunFolder(place.parent / "whole" / name), place.parent / "whole" / f"{name}.seconds"
    if not note.exists():
        shutil.rmtree(folder.path, ignore_errors=True)
        folder.path.parent.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        command = Command(words(algorithm, folder.path, every=every, updates=updates), note.with_suffix(".log"))
        if command.wait() != 0:
            raise Broken(algorithm, f"an undisturbed run ends with {command.code}: {command.err}")
        note.write_text(str(time.perf_counter() - start))
    return folder, float(note.read_text())


def difference(found: RunFolder, expected: RunFolder) -> str | None:
    """Return how the final states of two runs differ, ignoring clocks and trajectory ids; None if they don't."""
    rows, others = metrics(found), metrics(expected)
    if rows != others:
        return f"metrics differ: {len(rows)} rows, expected {len(others)}"
    states = [load_checkpoint(latest_checkpoint(folder.checkpoints)) for folder in (found, expected)]
    place = differing(*states)
    return None if place is None else f"state differs at {place}"


def metrics(folder: RunFolder) -> list[dict[str, str]]:
    """Return the rows of ``metrics.csv`` without the timing columns."""
    with folder.metrics.open(newline="") as file:
        return [{name: value for name, value in row.items() if name not in _CLOCKS} for row in csv.DictReader(file)]


def differing(first: Any, second: Any, path: str = "") -> str | None:
    """Return the path at which two nested states first differ, or None."""
    if "traj_ids" in path or path.rpartition("/")[2] in _CLOCKS or path == "/config/checkpoint_every":
        return None
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        same = first.dtype == second.dtype and first.shape == second.shape and first.equal(second)
        return None if same or bool((first.isnan() & second.isnan() | (first == second)).all()) else path
    if type(first) is not type(second):
        return path
    if isinstance(first, dict):
        if first.keys() != second.keys():
            return path
        return _first(differing(first[key], second[key], f"{path}/{key}") for key in first)
    if isinstance(first, list | tuple):
        if len(first) != len(second):
            return path
        return _first(differing(*pair, f"{path}/{index}") for index, pair in enumerate(zip(first, second, strict=True)))
    return None if first == second or first != first else path


def _first(places: Any) -> str | None:
    return next((place for place in places if place is not None), None)

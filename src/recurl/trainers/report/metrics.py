"""Rows of a run: ``metrics.csv``, one per update, and ``evaluations.csv``, one per evaluation."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from recurl.errors import ArgumentError
from recurl.trainers.files.durable import sync_folder, write_all, write_whole, writing

Row: TypeAlias = Mapping[str, float]
RETURN, SPREAD, EVALUATION = "return_mean_20", "return_std_20", "eval_return"
"""Columns: mean and standard deviation of the returns of the last 20 episodes, and the mean return of an evaluation."""
COLLECTION = ("lag_mean", "lag_max", "actors_replaced", "frames_lost")
"""Columns of a run with actors: how many versions old the weights were that acted, and what was lost so far."""
_UPDATE, _STEPS = "update", "env_steps"
_GROUPS = {
    "episodes": ("episodes", RETURN, SPREAD, "length_mean_20"),
    "run": (_UPDATE, "wall_s", "cpu_s", "steps_per_s", "skipped", *COLLECTION),
}
_GROUP_OF = {name: group for group, names in _GROUPS.items() for name in names}
_EVALUATED = "eval_"


def tagged(row: Row) -> dict[str, float]:
    """Return the numbers of a row by tags with a group, ``env_steps`` left out.

    Example:
        >>> tagged({"env_steps": 64, "return_mean_20": 1.0, "grad_norm": 0.5, "eval_return": 2.0})
        {'episodes/return_mean_20': 1.0, 'learning/grad_norm': 0.5, 'evaluation/return': 2.0}
    """
    return {_tag(name): value for name, value in row.items() if name != _STEPS}


def _tag(name: str) -> str:
    if name.startswith(_EVALUATED):
        return f"evaluation/{name.removeprefix(_EVALUATED)}"
    return f"{_GROUP_OF.get(name, 'learning')}/{name}"


class MetricsFile:
    """File of one row per update or evaluation, handed to the operating system at every write.

    The file only grows, or is replaced whole.

    Args:
        path: the file.
        fields: names of the columns; those of an earlier version of recurl that a file has besides are kept.
        updates: of the checkpoint that a run goes on from. Rows of later updates are dropped; so is what a crash left
            of a row.
        expected: rows up to there; one per update by default.
        score: column that every such file has, besides ``update`` and ``env_steps``.
        notify: called when rows before the checkpoint are missing: the run goes on without them.

    Raises:
        ArgumentError: the file holds something else.
        StorageError: it can't be written.
    """

    def __init__(
        self,
        path: Path,
        fields: Sequence[str],
        *,
        updates: int = 0,
        expected: int | None = None,
        score: str = RETURN,
        notify: Callable[[str], None],
    ) -> None:
        self._path = path
        before, rows = read_metrics(path, score) if updates else ([], [])
        self._fields = [*fields, *(name for name in before if name not in fields)]
        kept = _kept(rows, updates)
        expected = updates if expected is None else expected
        if len(kept) < expected:
            what = "updates" if score == RETURN else "evaluations"
            notify(
                f"{path} holds the rows of {len(kept)} of the {expected} {what} before the checkpoint: the others are "
                "lost, the run goes on without them."
            )
        text = self._text([dict(zip(self._fields, self._fields, strict=True)), *kept])
        if not path.exists() or path.read_bytes() != text:
            write_whole(path, text)
        with writing(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0))

    def _text(self, rows: Sequence[Mapping[str, object]]) -> bytes:
        text = io.StringIO(newline="")
        csv.DictWriter(text, self._fields, restval="").writerows(rows)
        return text.getvalue().encode()

    def write(self, row: Row) -> None:
        """Append a row.

        Raises:
            StorageError: it can't be written; a part of it may be.
        """
        with writing(self._path):
            write_all(self._descriptor, self._text([row]))

    def sync(self) -> None:
        """Flush all rows to disk."""
        with writing(self._path):
            os.fsync(self._descriptor)
        sync_folder(self._path.parent)

    def close(self) -> None:
        """Close the file."""
        with writing(self._path):
            os.close(self._descriptor)


def read_metrics(path: Path, score: str = RETURN) -> tuple[list[str], list[dict[str, str]]]:
    """Return columns and whole rows of the metrics of a run; none if there is no such file, or it is empty.

    Rows whose numbers can't be read, such as the last one of a run that died while it wrote it, are left out.

    Raises:
        ArgumentError: the file holds something else.
    """
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        return [], []
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path} can't be read ({error}): move it away; the run goes on with a new one.") from error
    lines = text[: text.rfind("\n") + 1].splitlines()
    if not lines:
        return [], []
    fields, *rows = _cells(lines)
    needed = (_UPDATE, _STEPS, score)
    if not set(needed) <= set(fields):
        raise ArgumentError(
            f"{path} must have the columns {', '.join(needed)} of a run's metrics, got {lines[0][:80]!r}: move it "
            "away; the run goes on with a new one."
        )
    whole = [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]
    return fields, [row for row in whole if _has_numbers(row, score)]


def _cells(lines: list[str]) -> list[list[str]]:
    try:
        return list(csv.reader(lines))
    except csv.Error:  # a field of more than 100,000 letters
        return [[]]


def _has_numbers(row: Mapping[str, str], score: str) -> bool:
    try:
        update, steps, _ = int(row[_UPDATE]), int(row[_STEPS]), float(row[score])
    except ValueError:
        return False
    return update > 0 and steps > 0


def _kept(rows: Sequence[dict[str, str]], updates: int) -> list[dict[str, str]]:
    """Return the rows up to an update, each of which follows the one before."""
    kept: list[dict[str, str]] = []
    update = steps = 0
    for row in rows:
        if update < int(row[_UPDATE]) <= updates and int(row[_STEPS]) > steps:
            kept.append(row)
            update, steps = int(row[_UPDATE]), int(row[_STEPS])
    return kept

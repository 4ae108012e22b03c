"""Metrics files of a run: ``metrics.csv``, one row per update, and ``evaluations.csv``, one row per evaluation."""

from __future__ import annotations

import csv
import io
import math
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np

from recurl.core.errors import ArgumentError
from recurl.core.untrusted import open_regular, open_regular_descriptor
from recurl.trainers.files.durable import sync_folder, write_all, write_atomic, writing

Row: TypeAlias = Mapping[str, float]
Array: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
RETURN, SPREAD, EVALUATION = "return_mean_20", "return_std_20", "eval_return"
"""Columns: mean and standard deviation of the last 20 episode returns, and mean return of an evaluation."""
MAX_RETURN = 1e100
"""Largest return that is drawn and averaged; sums of larger ones could overflow."""
COLLECTION = ("lag_mean", "lag_max", "actors_replaced", "frames_lost")
"""Columns of a run with actors: mean and maximum lag of the acting weights in versions, and cumulative losses."""
_UPDATE, STEPS = "update", "env_steps"
_GROUPS = {
    "episodes": ("episodes", RETURN, SPREAD, "length_mean_20"),
    "run": (_UPDATE, "wall_s", "cpu_s", "steps_per_s", "skipped", *COLLECTION),
}
_GROUP_OF = {name: group for group, names in _GROUPS.items() for name in names}
_EVALUATION_PREFIX = "eval_"
_MAX_BYTES = 2**31  # file size, about ten million rows
_MAX_LINE_BYTES = 2**16
_MAX_POINTS = 2**20  # rows of a curve
_MAX_STEPS = 10**15


def tagged(row: Row) -> dict[str, float]:
    """Return the values of a row, without ``env_steps``, keyed by tags with group prefixes.

    Example:
        >>> tagged({"env_steps": 64, "return_mean_20": 1.0, "grad_norm": 0.5, "eval_return": 2.0})
        {'episodes/return_mean_20': 1.0, 'learning/grad_norm': 0.5, 'evaluation/return': 2.0}
    """
    return {_tag(name): value for name, value in row.items() if name != STEPS}


def _tag(name: str) -> str:
    if name.startswith(_EVALUATION_PREFIX):
        return f"evaluation/{name.removeprefix(_EVALUATION_PREFIX)}"
    return f"{_GROUP_OF.get(name, 'learning')}/{name}"


class MetricsFile:
    """Unbuffered CSV file with one row per update or evaluation.

    The file is only appended to, or replaced as a whole.

    Args:
        path: the file.
        fields: names of the columns. Other columns that the file has from an earlier version of recurl are kept.
        updates: number of updates of the checkpoint from which a run is resumed. Rows of later updates and rows
            truncated by a crash are dropped.
        expected: expected number of rows up to the checkpoint; one per update by default.
        score: column that must exist besides ``update`` and ``env_steps``.
        notify: called if rows before the checkpoint are missing. The run continues without them.

    Raises:
        ArgumentError: the file isn't a metrics file.
        StorageError: the file can't be written.
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
                f"{path} contains rows for {len(kept)} of the {expected} {what} before the checkpoint: the others are "
                "lost, and the run continues without them."
            )
        text = self._text([dict(zip(self._fields, self._fields, strict=True)), *kept])
        with writing(path):
            if not _holds(path, text):
                write_atomic(path, text)
            self._descriptor = open_regular_descriptor(path, os.O_WRONLY | os.O_APPEND)

    def _text(self, rows: Sequence[Mapping[str, object]]) -> bytes:
        text = io.StringIO(newline="")
        csv.DictWriter(text, self._fields, restval="").writerows(rows)
        return text.getvalue().encode()

    def write(self, row: Row) -> None:
        """Append a row.

        Raises:
            StorageError: the row can't be written completely.
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


def _holds(path: Path, text: bytes) -> bool:
    """Return whether a file contains exactly ``text`` and has no hard links, which would grow with it."""
    try:
        with open_regular(path) as file:
            about = os.fstat(file.fileno())
            return about.st_nlink == 1 and about.st_size == len(text) and file.read() == text
    except FileNotFoundError:
        return False


def read_metrics(path: Path, score: str = RETURN) -> tuple[list[str], list[dict[str, str]]]:
    """Return the columns and complete rows of a metrics file; both empty if the file is missing or empty.

    Unparsable rows are skipped, such as the last row of a run that was killed while writing it.

    Raises:
        ArgumentError: the file isn't a metrics file.
    """
    table = _table(path, score)
    fields = next(table, [])
    return fields, [dict(zip(fields, row, strict=True)) for row in table]


def read_curve(path: Path, score: str = RETURN, *more: str) -> list[Array]:
    """Return numeric columns of a metrics file, ``[rows]`` each: environment steps, ``score``, and ``more``.

    Rows in which ``score`` is NaN or infinite are skipped. To bound memory, files with more than a million rows are
    subsampled to every second row, every fourth, and so on, keeping the last row.

    Args:
        path: the file; if it doesn't exist, all columns are empty.
        score: see :class:`MetricsFile`.
        more: other columns; NaN where a row has no such number.

    Raises:
        ArgumentError: the file isn't a metrics file.
    """
    table = _table(path, score)
    fields = next(table, [])
    places = [fields.index(name) if name in fields else -1 for name in (STEPS, score, *more)]
    rows = (numbers for row in table if math.isfinite((numbers := _numbers(row, places))[1]))
    kept, every, last = array("d"), 1, None
    for number, last in enumerate(rows):
        if number % every == 0:
            kept.extend(last)
            if len(kept) == _MAX_POINTS * len(places):
                every *= 2
                kept = array("d", np.asarray(kept).reshape(-1, len(places))[::2].tobytes())
    found = np.asarray(kept).reshape(-1, len(places))
    if last is not None and found[-1, 0] != last[0]:
        found = np.concatenate([found, np.asarray([last])])
    return list(found.T)


def _table(path: Path, score: str) -> Iterator[list[str]]:
    """Yield the column names of a file, then the cells of each complete row; nothing if it is missing or empty.

    Raises:
        ArgumentError: the file isn't a metrics file.
    """
    try:
        with open_regular(path, most=_MAX_BYTES) as file:
            lines = _lines(file)
            header = next(lines, None)
            if header is None:
                return
            fields, needed = _cells(header), (_UPDATE, STEPS, score)
            if not set(needed) <= set(fields):
                raise ArgumentError(
                    f"{path} must have the columns {', '.join(needed)} of a run's metrics, got {header[:80]!r}: move "
                    "it away; the run then continues with a new file."
                )
            yield fields
            places = [fields.index(name) for name in needed]
            for line in lines:
                row = _cells(line)
                if len(row) == len(fields) and _has_numbers(*(row[place] for place in places)):
                    yield row
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ArgumentError(
            f"{path} can't be read ({reason}): move it away; the run then continues with a new file."
        ) from error


def _lines(file: IO[bytes]) -> Iterator[str]:
    """Yield the complete lines of a file, overlong ones truncated; an unterminated last line is skipped."""
    while line := file.readline(_MAX_LINE_BYTES):
        rest = line
        while rest and not rest.endswith(b"\n"):
            rest = file.readline(_MAX_LINE_BYTES)
        if rest:
            yield line.decode(errors="strict" if rest is line else "replace").rstrip("\r\n")


def _cells(line: str) -> list[str]:
    try:
        return next(csv.reader([line]), []) if '"' in line else line.split(",")
    except csv.Error:
        return []


def _has_numbers(update: str, steps: str, score: str) -> bool:
    try:
        whole, _ = (int(update), int(steps)), float(score)
    except ValueError:
        return False
    return all(0 < number <= _MAX_STEPS for number in whole)


def _numbers(row: Sequence[str], places: Sequence[int]) -> list[float]:
    return [_number(row[place]) if place >= 0 else math.nan for place in places]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _kept(rows: Sequence[dict[str, str]], updates: int) -> list[dict[str, str]]:
    """Return the rows up to an update whose updates and steps increase strictly."""
    kept: list[dict[str, str]] = []
    update = steps = 0
    for row in rows:
        if update < int(row[_UPDATE]) <= updates and int(row[STEPS]) > steps:
            kept.append(row)
            update, steps = int(row[_UPDATE]), int(row[STEPS])
    return kept

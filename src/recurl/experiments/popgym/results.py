"""Results file of the POPGym benchmark: one row per finished run, all with the same setting."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from recurl.core.errors import ArgumentError
from recurl.core.untrusted import read_bytes
from recurl.envs.tasks.popgym import POPGYM_TASKS
from recurl.experiments.popgym.settings import MAZES
from recurl.trainers.files.durable import write_atomic

_MAX_BYTES = 2**26  # size of the file
_SETTING_FIELDS = ("setting", "budget", "options")


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a finished run."""

    task: str
    cell: str
    seed: int
    mmer: float
    """The score: see :class:`~recurl.experiments.popgym.score.MaxMeanReturn`."""
    last: float
    """Mean return of the last window."""
    episodes: int
    env_steps: int
    wall_s: float
    """Wall-clock seconds of the run, including setup."""
    setting: str
    budget: int
    options: str
    """PPO options that differ from the defaults."""
    device: str
    versions: str
    date: str

    @property
    def key(self) -> tuple[str, str, int]:
        """Unique key within a setting."""
        return self.task, self.cell, self.seed


class Results:
    """Results stored in a CSV file.

    Args:
        path: the CSV file; it need not exist.

    Attributes:
        rows: the results in file order.

    Raises:
        ArgumentError: the file isn't a valid results file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Result] = _read(path) if path.exists() else []

    def check_setting(self, **wanted: Any) -> None:
        """Check that existing results have the same setting as new ones.

        Args:
            **wanted: ``setting``, ``budget`` and ``options`` of the new results.

        Raises:
            ArgumentError: the file contains results of another setting.
        """
        for row in self.rows:
            for name in _SETTING_FIELDS:
                if getattr(row, name) != wanted[name]:
                    raise ArgumentError(
                        f"{self.path} must hold results of one setting only, but its {name} is "
                        f"{getattr(row, name)}, not {wanted[name]}. Continue with that setting, or name another folder "
                        "(--out)."
                    )

    def add(self, result: Result) -> None:
        """Add a result and rewrite the whole file.

        Raises:
            StorageError: the file can't be written.
        """
        self.rows.append(result)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, [field.name for field in fields(Result)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in self.rows)
        write_atomic(self.path, text.getvalue().encode())


def _read(path: Path) -> list[Result]:
    names = [field.name for field in fields(Result)]
    try:
        text = read_bytes(path, _MAX_BYTES).decode("utf-8-sig")  # spreadsheets write a byte order mark
        lines = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except OSError as error:
        raise ArgumentError(f"{path} can't be read: {error.strerror}.") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ArgumentError(f"{path} is not a UTF-8 table ({error}): fix or remove it.") from error
    if not lines or lines[0] != names:
        raise ArgumentError(f"{path} must hold results of recurl bench popgym, with the columns {', '.join(names)}.")
    rows: dict[tuple[str, str, int], Result] = {}
    for line in filter(None, lines[1:]):
        try:
            row = _result(names, line)
        except ValueError as error:
            raise ArgumentError(
                f"{path} holds a row that can't be read ({error}): fix or remove it. It is {','.join(line)}"
            ) from error
        if row.key in rows:
            raise ArgumentError(
                f"{path} must hold one row per run, but holds two of {row.task} {row.cell} seed {row.seed}: remove one."
            )
        rows[row.key] = row
    return list(rows.values())


def _result(names: list[str], line: list[str]) -> Result:
    if len(line) != len(names):
        raise ValueError(f"it has {len(line)} entries, not {len(names)}")
    row = dict(zip(names, line, strict=True))
    if row["task"] not in (*POPGYM_TASKS, *MAZES):
        raise ValueError(f"there is no task {row['task']!r}")
    numbers: dict[str, Any] = {
        field.name: float if field.type == "float" else int for field in fields(Result) if field.type != "str"
    }
    return Result(**{name: numbers.get(name, str)(value) for name, value in row.items()})

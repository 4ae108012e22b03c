"""File of the results on POPGym: one row for each finished run, all of one setting."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from recurl.errors import ArgumentError
from recurl.trainers.files.durable import write_whole

_SAME = ("setting", "budget", "options")


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished run."""

    task: str
    cell: str
    seed: int
    mmer: float
    """The score: see :class:`~recurl.trainers.study.popgym.score.MaxMeanReturn`."""
    last: float
    """Mean return of the last window."""
    episodes: int
    env_steps: int
    wall_s: float
    """Seconds that the run took, set-up included."""
    setting: str
    budget: int
    options: str
    """Options of PPO that aren't its defaults."""
    device: str
    versions: str
    date: str

    @property
    def key(self) -> tuple[str, str, int]:
        """What tells it from others of its setting."""
        return self.task, self.cell, self.seed


class Results:
    """The results in a file.

    Args:
        path: the CSV file; it need not exist.

    Attributes:
        rows: the results in the order of the file.

    Raises:
        ArgumentError: the file holds something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Result] = _read(path) if path.exists() else []

    def check_setting(self, **wanted: Any) -> None:
        """Refuse results of another setting: they aren't to be mixed.

        Args:
            **wanted: ``setting``, ``budget`` and ``options`` of the results to come.

        Raises:
            ArgumentError: the file holds others.
        """
        for row in self.rows:
            for name in _SAME:
                if getattr(row, name) != wanted[name]:
                    raise ArgumentError(
                        f"{self.path} holds results of another setting, and is not to be mixed: its {name} is "
                        f"{getattr(row, name)}, not {wanted[name]}. Go on with that one, or name another folder "
                        "(--out)."
                    )

    def add(self, result: Result) -> None:
        """Add a result; the file is replaced as a whole.

        Raises:
            StorageError: the file can't be written.
        """
        self.rows.append(result)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, [field.name for field in fields(Result)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in self.rows)
        write_whole(self.path, text.getvalue().encode())


def _read(path: Path) -> list[Result]:
    names = [field.name for field in fields(Result)]
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if list(reader.fieldnames or ()) != names:
            raise ArgumentError(
                f"{path} must hold results of recurl bench popgym, with the columns {', '.join(names)}."
            )
        rows = list(reader)
    try:
        return [_result(row) for row in rows]
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{path} holds a row that can't be read ({error}): mend or remove it.") from error


def _result(row: dict[str, Any]) -> Result:
    numbers: dict[str, Any] = {
        field.name: float if field.type == "float" else int for field in fields(Result) if field.type != "str"
    }
    if None in row.values() or len(row) > len(fields(Result)):
        raise ValueError("it is too short, or too long")
    return Result(**{name: numbers.get(name, str)(value) for name, value in row.items()})

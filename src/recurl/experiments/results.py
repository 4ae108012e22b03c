"""Results file of a benchmark: a CSV file with one row per finished run."""

from __future__ import annotations

import csv
import io
from collections.abc import Hashable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from recurl.core.errors import ArgumentError, StorageError
from recurl.core.untrusted import read_bytes
from recurl.trainers.files.durable import remove_partial, write_atomic

_MAX_BYTES = 2**26  # size of the file


class Finished(Protocol):
    """Result of a finished run: a dataclass of texts and numbers."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def key(self) -> Hashable:
        """Unique key within the file."""
        ...

    @property
    def name(self) -> str:
        """The run, for messages."""
        ...

    def check(self) -> None:
        """Check the values; raise ValueError with the reason if one is not valid."""
        ...


_Row = TypeVar("_Row", bound=Finished)


class ResultsFile(Generic[_Row]):
    """Results stored in a CSV file.

    Args:
        path: the CSV file; it need not exist.
        kind: dataclass of a row; its fields are the columns.
        command: the command that writes such files, for messages.

    Attributes:
        path: the CSV file.
        rows: the results in file order.

    Raises:
        ArgumentError: the file isn't a valid results file.
    """

    def __init__(self, path: Path, kind: type[_Row], command: str) -> None:
        self.path = path
        self._kind = kind
        self._names = [field.name for field in fields(kind)]
        self.rows: list[_Row] = self._read(command) if path.exists() else []

    def add(self, result: _Row) -> None:
        """Add a result and rewrite the whole file; only one process may do so at a time.

        Raises:
            StorageError: the file can't be written; the message holds the row.
        """
        self.rows.append(result)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in self.rows)
        try:
            remove_partial(self.path)
            write_atomic(self.path, text.getvalue().encode())
        except StorageError as error:
            row = text.getvalue().splitlines()[-1]
            raise StorageError(f"{error} To keep the result, add this row to the file:\n{row}") from error

    def _read(self, command: str) -> list[_Row]:
        path = self.path
        try:
            text = read_bytes(path, _MAX_BYTES).decode("utf-8-sig")  # spreadsheets write a byte order mark
            lines = list(csv.reader(io.StringIO(text, newline=""), strict=True))
        except OSError as error:
            raise ArgumentError(f"{path} can't be read: {error.strerror}.") from error
        except (UnicodeDecodeError, csv.Error) as error:
            raise ArgumentError(f"{path} is not a UTF-8 table ({error}): fix or remove it.") from error
        header = lines[0] if lines else []
        if header != self._names:
            lacks = [name for name in self._names if name not in header]
            got = f"it lacks {', '.join(lacks)}" if lacks else "it has others besides, or another order"
            raise ArgumentError(
                f"{path} must hold results of {command}, with the columns {', '.join(self._names)}, but {got}: restore "
                "them, or name another folder (--out)."
            )
        rows: dict[Hashable, _Row] = {}
        for line in filter(None, lines[1:]):
            try:
                row = self._result(line)
            except ValueError as error:
                raise ArgumentError(
                    f"{path} holds a row that can't be read ({error}): fix or remove it. It is {','.join(line)}"
                ) from error
            if row.key in rows:
                raise ArgumentError(f"{path} must hold one row per run, but holds two of {row.name}: remove one.")
            rows[row.key] = row
        return list(rows.values())

    def _result(self, line: list[str]) -> _Row:
        if len(line) != len(self._names):
            raise ValueError(f"it has {len(line)} entries, not {len(self._names)}")
        row = dict(zip(self._names, line, strict=True))
        numbers: dict[str, Any] = {
            field.name: float if field.type == "float" else int for field in fields(self._kind) if field.type != "str"
        }
        result = self._kind(**{name: numbers.get(name, str)(value) for name, value in row.items()})
        result.check()
        return result

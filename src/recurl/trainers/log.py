"""Where the numbers of a run go: metrics.csv, TensorBoard, and the terminal."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from recurl.errors import ArgumentError

if TYPE_CHECKING:
    from rich.console import Console

Row: TypeAlias = Mapping[str, float]
_SECONDS_BETWEEN_LINES = 5.0
LIVE = "return {return_mean_20:.4g}  length {length_mean_20:.0f}  {steps_per_s:.0f} steps/s"


class MetricsFile:
    """``metrics.csv``: one row per update, on disk as soon as it is written.

    Args:
        path: the file.
        keep_rows: rows to keep of a file that is there already: those written after the checkpoint that a run
            goes on from are dropped.

    Raises:
        ArgumentError: the file holds fewer rows than ``keep_rows``.
    """

    def __init__(self, path: Path, *, keep_rows: int = 0) -> None:
        self.rows = keep_rows
        self._fields: list[str] = []
        if keep_rows:
            self._fields = _truncate(path, keep_rows)
        self._file = path.open("a" if keep_rows else "w", newline="")

    def write(self, row: Row) -> None:
        """Append a row; the first one decides the columns."""
        writer = csv.DictWriter(self._file, self._fields or list(row))
        if not self._fields:
            self._fields = list(row)
            writer.writeheader()
        writer.writerow(row)
        self._file.flush()
        self.rows += 1

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _truncate(path: Path, keep_rows: int) -> list[str]:
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    if len(lines) < keep_rows + 1:
        raise ArgumentError(
            f"{path} must hold the {keep_rows} rows of the checkpoint, got {max(len(lines) - 1, 0)}: "
            "put the file back, or train anew with --overwrite."
        )
    path.write_text("".join(lines[: keep_rows + 1]))
    return next(csv.reader(io.StringIO(lines[0])))


class Events:
    """TensorBoard scalars over environment steps.

    Args:
        folder: where the event files go.
        purge_step: events at later steps that an earlier process left are hidden; None for a new run.
    """

    def __init__(self, folder: Path, *, purge_step: int | None = None) -> None:
        # Imported where it is used, and without torch's writer around it, which takes an event per number.
        from tensorboard.compat.proto import event_pb2, summary_pb2  # noqa: PLC0415 - as said above
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415 - as said above

        events, summaries = cast(Any, event_pb2), cast(Any, summary_pb2)  # their classes are made when imported
        self._event, self._summary = events.Event, summaries.Summary
        self._writer = EventFileWriter(str(folder))
        if purge_step is not None:
            log = events.SessionLog(status=events.SessionLog.START)
            self._writer.add_event(self._event(wall_time=time.time(), step=purge_step, session_log=log))

    def write(self, row: Row) -> None:
        """Add every entry of a row at its ``env_steps``."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in row.items()]
        summary, step = self._summary(value=values), int(row["env_steps"])
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Write out what is pending."""
        self._writer.close()


class Display(Protocol):
    """Shows a run while it goes on."""

    def update(self, row: Row) -> None:
        """Show the latest row."""
        ...

    def close(self) -> None:
        """Leave the terminal in order."""
        ...


class LineDisplay:
    """A plain line every few seconds, for files and pipes; the first and the last row are always shown.

    Args:
        console: where to write.
        total_steps: environment steps of the whole run.
        live: format of the algorithm's own numbers.
        seconds: time between lines.
    """

    def __init__(
        self, console: Console, *, total_steps: int, live: str, seconds: float = _SECONDS_BETWEEN_LINES
    ) -> None:
        self._console = console
        self._format = f"{LIVE}  {live}"
        self._total = total_steps
        self._seconds = seconds
        self._next = 0.0
        self._pending: Row | None = None

    def update(self, row: Row) -> None:
        """Print the row when it is time, otherwise keep it."""
        self._pending = row
        if time.monotonic() >= self._next:
            self._print()
            self._next = time.monotonic() + self._seconds

    def close(self) -> None:
        """Print the last row."""
        self._print()

    def _print(self) -> None:
        if self._pending is None:
            return
        row, self._pending = self._pending, None
        left = max(self._total - row["env_steps"], 0) / max(row["steps_per_s"], 1e-9)
        self._console.print(
            f"{int(row['env_steps']):>9,}/{self._total:,} steps  {self._format.format(**row)}  left {left:.0f} s",
            soft_wrap=True,
            markup=False,
            highlight=False,
        )


def make_display(console: Console, *, total_steps: int, live: str, done_steps: int = 0) -> Display:
    """Return a live display on a terminal, plain lines otherwise."""
    if console.is_terminal:
        # Imported where it is used: rich draws from Python's global random numbers when it is imported.
        from recurl.trainers.live import LiveDisplay  # noqa: PLC0415 - as said above

        return LiveDisplay(console, total_steps=total_steps, live=live, done_steps=done_steps)
    return LineDisplay(console, total_steps=total_steps, live=live)

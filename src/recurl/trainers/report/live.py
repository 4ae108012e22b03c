"""Progress of a run as a bar."""

from __future__ import annotations

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from recurl.trainers.report.metrics import LIVE, Row


class LiveDisplay:
    """A progress bar with the latest numbers.

    Args:
        console: terminal to draw on.
        total_steps: environment steps of the whole run.
        live: format of the algorithm's own numbers.
        done_steps: environment steps of earlier processes.
    """

    def __init__(self, console: Console, *, total_steps: int, live: str, done_steps: int = 0) -> None:
        self._format = f"{LIVE}  {live}"
        self._progress = Progress(
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.completed:,}/{task.total:,} steps, left"),
            TimeRemainingColumn(),
            auto_refresh=False,
            speed_estimate_period=60,
        )
        self._task = self._progress.add_task("", total=total_steps, completed=done_steps)
        # Drawn when there is something new: no thread takes time from training.
        self._live = Live(Group(self._progress, Text("collecting")), console=console, auto_refresh=False)
        self._live.start(refresh=True)

    def write(self, row: Row) -> None:
        """Show the latest row."""
        self._progress.update(self._task, completed=int(row["env_steps"]))
        self._live.update(Group(self._progress, Text(self._format.format(**row))), refresh=True)

    def close(self) -> None:
        """Stop drawing; the last state stays on the screen."""
        self._live.stop()

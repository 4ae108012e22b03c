"""Live progress bar of a run."""

from __future__ import annotations

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from recurl.trainers.report.metrics import Row
from recurl.trainers.report.shown import ProgressText


class LiveDisplay:
    """Callback that draws a progress bar with the latest metrics.

    Args:
        console: terminal to draw on.
        total_steps: environment steps of the whole run.
        live: format string of the algorithm's metrics.
        done_steps: environment steps of earlier processes.
    """

    def __init__(self, console: Console, *, total_steps: int, live: str, done_steps: int = 0) -> None:
        self._latest = ProgressText(live, total_steps)
        self._progress = Progress(
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.completed:,}/{task.total:,} steps, left {task.fields[left]}"),
            auto_refresh=False,
        )
        self._task = self._progress.add_task("", total=total_steps, completed=done_steps, left=self._latest.left)
        # Redrawn on new rows only, so no refresh thread takes time from training.
        self._live = Live(self._picture(), console=console, auto_refresh=False)
        self._live.start(refresh=True)

    def on_update(self, row: Row) -> None:
        """Show the row of an update."""
        self._latest.update(row)
        self._progress.update(self._task, completed=int(row["env_steps"]), left=self._latest.left)
        self._live.update(self._picture(), refresh=True)

    def on_evaluation(self, row: Row) -> None:
        """Show the row of an evaluation."""
        self._latest.evaluate(row)
        self._live.update(self._picture(), refresh=True)

    def on_end(self, outcome: object) -> None:
        """Stop drawing and leave the last state on the screen."""
        self._live.stop()

    def _picture(self) -> Group:
        return Group(self._progress, Text(self._latest.text))

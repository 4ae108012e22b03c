"""TensorBoard logger."""

from __future__ import annotations

from recurl.trainers.report.events import Events
from recurl.trainers.report.metrics import Row, tagged


class TensorBoardLogger:
    """Callback that writes update and evaluation metrics under grouped tags, such as ``episodes/return_mean_20``.

    Args:
        events: writer of the events.
    """

    def __init__(self, events: Events) -> None:
        self._events = events

    def on_update(self, row: Row) -> None:
        """Write the row of an update."""
        self._events.write(int(row["env_steps"]), tagged(row))

    def on_evaluation(self, row: Row) -> None:
        """Write the row of an evaluation."""
        self._events.write(int(row["env_steps"]), tagged(row))

    def on_end(self, outcome: object) -> None:
        """Close the file."""
        self._events.close()

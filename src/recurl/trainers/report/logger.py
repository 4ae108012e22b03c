"""Protocol of loggers: files, TensorBoard, the terminal, or a class of one's own."""

from __future__ import annotations

from typing import Protocol

from recurl.trainers.report.metrics import Row


class Logger(Protocol):
    """Takes a row of numbers after every update.

    ``Trainer(..., loggers=[...])`` takes objects of any class with these methods.
    """

    def write(self, row: Row) -> None:
        """Log the row of an update: numbers by name, among them ``update``, ``env_steps`` and ``return_mean_20``."""
        ...

    def close(self) -> None:
        """Close, when the run has ended or was stopped."""
        ...

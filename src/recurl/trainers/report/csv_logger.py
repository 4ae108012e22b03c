"""CSV logger: ``metrics.csv`` and ``evaluations.csv``."""

from __future__ import annotations

from recurl.trainers.report.metrics import MetricsFile, Row


class CsvLogger:
    """Callback that appends a row to one file after every update and to another after every evaluation.

    Args:
        metrics: file of the updates.
        evaluations: file of the evaluations during training; None if there are none.
    """

    def __init__(self, metrics: MetricsFile, evaluations: MetricsFile | None = None) -> None:
        self._metrics = metrics
        self._evaluations = evaluations

    def on_update(self, row: Row) -> None:
        """Append the row of an update."""
        self._metrics.write(row)

    def on_evaluation(self, row: Row) -> None:
        """Append the row of an evaluation."""
        if self._evaluations is not None:
            self._evaluations.write(row)

    def sync(self) -> None:
        """Flush all rows to disk."""
        for file in self._files():
            file.sync()

    def on_end(self, outcome: object) -> None:
        """Close the files."""
        for file in self._files():
            file.close()

    def _files(self) -> list[MetricsFile]:
        return [file for file in (self._metrics, self._evaluations) if file is not None]

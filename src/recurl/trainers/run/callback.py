"""Protocol of callbacks, which also covers loggers."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from tensordict import TensorDictBase

from recurl.trainers.report.metrics import Row
from recurl.trainers.run.outcome import Outcome
from recurl.trainers.run.trainer import Trainer


class Callback(Protocol):
    """Methods that a run calls during training. Any object with at least one of them is a callback.

    Random numbers drawn by a callback don't affect those of the run. The first exception raised by a callback ends the
    run: the current update is finished, a checkpoint is saved, and a :class:`~recurl.core.errors.CallbackError` is
    raised.

    ``Trainer(..., callbacks=[...])`` takes objects; ``--callback module:Class`` takes classes without required
    arguments.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Called when a run starts or resumes.

        ``trainer`` has the options, folder, networks, ``stop()``, and for a curriculum ``set_parameters(name=value)``,
        which changes the training environments, and ``parameters``, the values that were set, also before the run was
        resumed.
        """

    def on_batch(self, batch: TensorDictBase) -> None:
        """Called with each new batch ``[B, T]``, before the update.

        Recurrent states may be stored at the starts of sequences only (``--store-states``).
        """

    def on_update(self, row: Row) -> None:
        """Called with the metrics of an update, by name: ``update``, ``env_steps``, ``return_mean_20``, losses...

        On a GPU, the next update may already have been launched, so that ``stop()`` ends the run one update later.
        """

    def on_evaluation(self, row: Row) -> None:
        """Called with the metrics of an evaluation: ``update``, ``env_steps``, ``eval_return``..."""

    def on_checkpoint(self, path: Path) -> None:
        """Called after a checkpoint has been saved."""

    def on_end(self, outcome: Outcome) -> None:
        """Called exactly once when the run ends; ``outcome.status`` is ``"failed"`` if an error ended it."""

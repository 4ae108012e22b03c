"""A callback: what a run calls while it goes on; loggers are callbacks too."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from tensordict import TensorDictBase

from recurl.trainers.report.metrics import Row
from recurl.trainers.run.outcome import Outcome
from recurl.trainers.run.trainer import Trainer


class Callback(Protocol):
    """What a run calls while it goes on; an object with any of these methods is one.

    Random numbers that a callback draws leave those of the run as they were. The first exception that a callback
    raises ends the run: the update is finished, a checkpoint saved, and a
    :class:`~recurl.errors.CallbackError` raised.

    ``Trainer(..., callbacks=[...])`` takes objects, ``--callback module:Class`` classes that need no arguments.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Begin; ``trainer`` has the options, the folder, the networks, and ``stop()``. Also when a run is resumed."""

    def on_batch(self, batch: TensorDictBase) -> None:
        """Look at a new batch ``[B, T]``, before anything learns from it.

        Its recurrent states may be stored where sequences start only (``--store-states``).
        """

    def on_update(self, row: Row) -> None:
        """Look at the numbers of an update, by name: ``update``, ``env_steps``, ``return_mean_20``, losses...

        On a GPU this may be after the next update was launched, so that ``stop()`` ends the run one update later.
        """

    def on_evaluation(self, row: Row) -> None:
        """Look at the numbers of an evaluation: ``update``, ``env_steps``, ``eval_return``, ``eval_return_std``..."""

    def on_checkpoint(self, path: Path) -> None:
        """Look at a checkpoint that has been saved."""

    def on_end(self, outcome: Outcome) -> None:
        """End; ``outcome.status`` is ``"failed"`` when an error ended the run. Called in every case, once."""

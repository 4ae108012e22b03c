"""Weights & Biases logger; with ``WANDB_MODE=offline`` it writes to a folder."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recurl.core.errors import ArgumentError
from recurl.core.untrusted import read_bytes
from recurl.trainers.files.durable import make_folder, write_atomic
from recurl.trainers.report.metrics import Row, tagged

_MAX_ID_BYTES = 1_000  # bytes of an id


class WandbLogger:
    """Callback that logs update and evaluation metrics over environment steps.

    A resumed run keeps its id, which is stored in ``<folder>/wandb/run_id``.

    Args:
        folder: run folder.
        options: options of the run.
    """

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        wandb: Any = importlib.import_module("wandb")  # lazy: an optional extra, and the import takes a second
        place = folder / "wandb"
        make_folder(place)
        known = place / "run_id"
        self._run: Any = wandb.init(
            project="recurl",
            name=folder.name,
            dir=folder,
            config=dict(options),
            id=_read_id(known),
            resume="allow",
            settings=wandb.Settings(console="off", silent=True, disable_git=True),
        )
        write_atomic(known, str(self._run.id).encode())
        self._run.define_metric("env_steps")
        self._run.define_metric("*", step_metric="env_steps")

    def on_update(self, row: Row) -> None:
        """Log the row of an update."""
        self._run.log({"env_steps": int(row["env_steps"]), **tagged(row)})

    def on_evaluation(self, row: Row) -> None:
        """Log the row of an evaluation."""
        self._run.log({"env_steps": int(row["env_steps"]), **tagged(row)})

    def on_end(self, outcome: object) -> None:
        """Finish the Weights & Biases run, marking it as failed if the run failed."""
        self._run.finish(exit_code=int(getattr(outcome, "status", "") == "failed"))


def _read_id(path: Path) -> str | None:
    try:
        return read_bytes(path, _MAX_ID_BYTES).decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(
            f"{path} doesn't contain a Weights & Biases id ({error}): remove it; the run gets a new id."
        ) from error

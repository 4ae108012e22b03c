"""Rows of a run on Weights & Biases, online or, with ``WANDB_MODE=offline``, in a folder."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recurl.errors import ArgumentError
from recurl.trainers.files.durable import make_folder, write_whole
from recurl.trainers.report.metrics import Row, tagged
from recurl.untrusted import read_bytes

_LONGEST = 1_000  # bytes of an id


class WandbLogger:
    """Logs the numbers of updates and evaluations over environment steps.

    A resumed run goes on under its id, which stands in ``<folder>/wandb/run_id``.

    Args:
        folder: folder of the run.
        options: options of the run.
    """

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        wandb: Any = importlib.import_module("wandb")  # where it is used: it takes a second, and is an extra
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
        write_whole(known, str(self._run.id).encode())
        self._run.define_metric("env_steps")
        self._run.define_metric("*", step_metric="env_steps")

    def on_update(self, row: Row) -> None:
        """Log the row of an update."""
        self._run.log({"env_steps": int(row["env_steps"]), **tagged(row)})

    def on_evaluation(self, row: Row) -> None:
        """Log the row of an evaluation."""
        self._run.log({"env_steps": int(row["env_steps"]), **tagged(row)})

    def on_end(self, outcome: object) -> None:
        """Finish; Weights & Biases lists a run that failed as such."""
        self._run.finish(exit_code=int(getattr(outcome, "status", "") == "failed"))


def _read_id(path: Path) -> str | None:
    try:
        return read_bytes(path, _LONGEST).decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(
            f"{path} holds no id of Weights & Biases ({error}): remove it; the run gets another id."
        ) from error

"""Small runs, trained in a second."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from recurl.trainers import RunFolder, Trainer
from recurl.trainers.algorithms.configs import ReplayConfig


def trained(path: Path, kind: Any, env: str, options: dict[str, Any]) -> RunFolder:
    """Folder of a run of two updates, so that weights and statistics differ from their initial values."""
    small = {"num_envs": 4, "rollout_steps": 32, "total_steps": 256, "hidden_size": 8, "seed": 1}
    if issubclass(kind, ReplayConfig):
        small |= {"learning_starts": 64, "slices": 4, "slice_length": 8, "burn_in": 0}
    folder = RunFolder(path)
    folder.create(config := kind(env=env, **small, **options))
    trainer = Trainer(config, folder, console=Console(file=io.StringIO()))
    trainer.run()
    trainer.close()
    return folder

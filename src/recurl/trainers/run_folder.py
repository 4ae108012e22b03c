"""The folder of a run: what lies where, and when it may be written."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from recurl.errors import ArgumentError
from recurl.trainers.config import RunConfig
from recurl.trainers.options import read_options


@dataclass(frozen=True)
class RunFolder:
    """Paths inside the folder of one run.

    Args:
        path: the folder; it need not exist yet.

    Example:
        >>> RunFolder(Path("runs/demo")).metrics.as_posix()
        'runs/demo/metrics.csv'
    """

    path: Path

    @property
    def config(self) -> Path:
        """The options of the run."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """One row of numbers per update."""
        return self.path / "metrics.csv"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """Folder of the TensorBoard events."""
        return self.path / "tensorboard"

    @property
    def curve(self) -> Path:
        """Picture of the learning curve."""
        return self.path / "learning_curve.png"

    def check_free(self, *, overwrite: bool) -> None:
        """Refuse a folder that holds another run, or anything else.

        Args:
            overwrite: another run may be replaced.

        Raises:
            ArgumentError: the folder can't take a new run.
        """
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise ArgumentError(f"{self.path} is not a folder: name another with --run-dir.")
        if self.config.exists():
            if not overwrite:
                raise ArgumentError(
                    f"{self.path} holds a run already: go on with it (recurl train --resume {self.path}), "
                    "replace it (--overwrite) or name another folder (--run-dir)."
                )
        elif any(self.path.iterdir()):
            raise ArgumentError(f"{self.path} is not empty and holds no run: name another folder with --run-dir.")

    def create(self, config: RunConfig) -> None:
        """Make the folder, remove what an earlier run left in it, and write the options.

        Raises:
            ArgumentError: the folder can't be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for folder in (self.checkpoints, self.tensorboard):
                shutil.rmtree(folder, ignore_errors=True)
            for file in (self.metrics, self.curve):
                file.unlink(missing_ok=True)
            self.config.write_text(json.dumps(config.to_dict(), indent=2) + "\n")
        except OSError as error:
            raise ArgumentError(
                f"Can't write the run folder {self.path} ({error.strerror}): name another with --run-dir."
            ) from error

    def read_config(self) -> RunConfig:
        """Return the options of the run in this folder.

        Raises:
            ArgumentError: there is no run here, or its options can't be read.
        """
        try:
            values = json.loads(self.config.read_text())
        except OSError as error:
            raise ArgumentError(
                f"{self.path} holds no run ({self.config} can't be read: {error.strerror}): name the folder that "
                "recurl train wrote."
            ) from error
        except ValueError as error:
            raise ArgumentError(f"{self.config} is not JSON: {error}.") from error
        if not isinstance(values, dict):
            raise ArgumentError(f"{self.config} must hold a JSON object, got {type(values).__name__}.")
        return read_options(values)

"""Results file of the POPGym benchmark: one row per finished run, all with the same setting."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recurl.core.errors import ArgumentError
from recurl.envs.tasks.popgym import POPGYM_TASKS
from recurl.experiments.results import ResultsFile

_SETTING_FIELDS = ("setting", "budget", "options")


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a finished run."""

    task: str
    cell: str
    seed: int
    mmer: float
    """The score: see :class:`~recurl.experiments.popgym.score.MaxMeanReturn`."""
    last: float
    """Mean return of the last window."""
    episodes: int
    env_steps: int
    wall_s: float
    """Wall-clock seconds of the run, including setup."""
    setting: str
    budget: int
    options: str
    """PPO options that differ from the defaults."""
    device: str
    versions: str
    date: str

    @property
    def key(self) -> tuple[str, str, int]:
        """Unique key within a setting."""
        return self.task, self.cell, self.seed

    @property
    def name(self) -> str:
        """The run, for messages."""
        return f"{self.task} {self.cell} seed {self.seed}"

    def check(self) -> None:
        """Check that there is such a task; raise ValueError if not."""
        if self.task not in POPGYM_TASKS:
            raise ValueError(f"there is no task {self.task!r}")


class Results(ResultsFile[Result]):
    """Results stored in a CSV file; see :class:`ResultsFile`.

    Args:
        path: the CSV file; it need not exist.

    Raises:
        ArgumentError: the file isn't a valid results file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, Result, "recurl bench popgym")

    def check_setting(self, **wanted: Any) -> None:
        """Check that existing results have the same setting as new ones.

        Args:
            **wanted: ``setting``, ``budget`` and ``options`` of the new results.

        Raises:
            ArgumentError: the file contains results of another setting.
        """
        for row in self.rows:
            for name in _SETTING_FIELDS:
                if getattr(row, name) != wanted[name]:
                    raise ArgumentError(
                        f"{self.path} must hold results of one setting only, but its {name} is "
                        f"{getattr(row, name)}, not {wanted[name]}. Continue with that setting, or name another folder "
                        "(--out)."
                    )

"""Training of one run of the POPGym benchmark."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from recurl._version import __version__
from recurl.experiments.jobs import OnSpeed, train_in
from recurl.experiments.popgym.results import Result
from recurl.experiments.popgym.score import MaxMeanReturn
from recurl.experiments.popgym.settings import Run, options_text
from recurl.trainers.run.folder import RunFolder
from recurl.trainers.run.outcome import Outcome
from recurl.trainers.run.trainer import Trainer


class Work(NamedTuple):
    """Settings shared by the runs of a benchmark."""

    folder: Path
    """Parent folder of the run folders."""
    setting: str
    budget: int
    device: str
    """Name of the device, for the results."""
    keep_runs: bool
    """Whether to keep the run folders."""
    notify: Callable[[str], None]
    """Called with notices; must be a module-level function, since it is sent to workers."""

    def train(self, run: Run, on_speed: OnSpeed, should_stop: Callable[[], bool]) -> Result | None:
        """Train a run and return its result, or None if it was stopped; see :class:`~recurl.experiments.jobs.Work`."""
        begin = time.perf_counter()
        score = MaxMeanReturn(run.config.num_envs)

        def finished(folder: RunFolder, trainer: Trainer, outcome: Outcome) -> Result:
            return Result(
                task=run.task,
                cell=run.cell,
                seed=run.seed,
                mmer=round(score.value, 6),
                last=round(score.last, 6),
                episodes=score.episodes,
                env_steps=outcome.env_steps,
                wall_s=round(time.perf_counter() - begin, 2),
                setting=self.setting,
                budget=self.budget,
                options=options_text(run.config),
                device=self.device,
                versions=f"recurl {__version__} torch {torch.__version__}",
                date=time.strftime("%Y-%m-%d"),
            )

        return train_in(
            self.folder / run.slug,
            run.config,
            self.notify,
            callbacks=[score],
            on_speed=on_speed,
            should_stop=should_stop,
            keep=self.keep_runs,
            then=finished,
        )

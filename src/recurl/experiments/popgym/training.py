"""Training of one run of the POPGym benchmark."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from recurl._version import __version__
from recurl.experiments.popgym.results import Result
from recurl.experiments.popgym.score import MaxMeanReturn
from recurl.experiments.popgym.settings import Run, options_text
from recurl.trainers.files.durable import make_folder
from recurl.trainers.report.metrics import Row
from recurl.trainers.run.folder import RunFolder
from recurl.trainers.run.trainer import Trainer

OnSpeed = Callable[[float], None]


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


class _Speed:
    """Callback that reports the environment steps per second of the second update."""

    def __init__(self, report: OnSpeed) -> None:
        self._report = report

    def on_update(self, row: Row) -> None:
        if row["update"] == 2:  # the first one compiles
            self._report(float(row["steps_per_s"]))


def train(run: Run, work: Work, *, on_speed: OnSpeed, should_stop: Callable[[], bool] = lambda: False) -> Result | None:
    """Train a run and return its result, or None if it was stopped.

    Args:
        run: the run.
        work: shared settings of the runs.
        on_speed: called with the environment steps per second of the second update.
        should_stop: called after every update; returning True stops the run.
    """
    begin = time.perf_counter()
    folder = RunFolder(work.folder / _slug(run), work.notify)
    make_folder(folder.path.parent)
    score = MaxMeanReturn(run.config.num_envs)
    callbacks = [score, _Speed(on_speed)]
    console = Console(quiet=True)
    with closing(Trainer(run.config, folder, console=console, callbacks=callbacks)) as trainer, folder.hold():
        folder.create(run.config, overwrite=True)
        outcome = trainer.run(should_stop)
    if outcome.status == "stopped":
        return None
    if not work.keep_runs:
        shutil.rmtree(folder.path)
    return Result(
        task=run.task,
        cell=run.cell,
        seed=run.seed,
        mmer=round(score.value, 6),
        last=round(score.last, 6),
        episodes=score.episodes,
        env_steps=outcome.env_steps,
        wall_s=round(time.perf_counter() - begin, 2),
        setting=work.setting,
        budget=work.budget,
        options=options_text(run.config),
        device=work.device,
        versions=f"recurl {__version__} torch {torch.__version__}",
        date=time.strftime("%Y-%m-%d"),
    )


def _slug(run: Run) -> str:
    cell = "".join(letter if letter.isalnum() else "-" for letter in run.cell)
    return f"{run.task}-{cell}-seed{run.seed}"

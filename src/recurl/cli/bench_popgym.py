"""``recurl bench popgym``: memory cells on the tasks of POPGym, all in one table."""

from __future__ import annotations

import shutil
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console

from recurl._version import __version__
from recurl.cli.bench_rnn import device_name
from recurl.cli.notices import notify
from recurl.cli.signals import StopOnSignal
from recurl.errors import ArgumentError, NonFiniteError
from recurl.hardware import check_device
from recurl.ranges import Count, Steps
from recurl.trainers import RunFolder, Trainer
from recurl.trainers.files.durable import make_folder
from recurl.trainers.files.lock import FolderLock
from recurl.trainers.keyword_arguments import keyword_arguments
from recurl.trainers.report.metrics import Row
from recurl.trainers.study.popgym.results import Result, Results
from recurl.trainers.study.popgym.score import MaxMeanReturn
from recurl.trainers.study.popgym.settings import CELLS, Run, find_tasks, make_runs, options_text, setting
from recurl.trainers.study.popgym.summary import Summary


@dataclass(frozen=True)
class BenchPopgym:
    """Train memory cells on the tasks of POPGym, and show the largest mean return of each (MMER).

    The same command goes on where it was stopped: each finished run is a row of popgym.csv. Other cells, tasks and more
    seeds are added to the same table.
    """

    cells: tuple[str, ...] = CELLS
    """Cells to compare, module:Class for one of your own, none for no memory; s5*4 has four layers."""
    tasks: tuple[str, ...] = ()
    """Tasks such as RepeatPreviousEasy, or RepeatPrevious for all its difficulties; by default all but the mazes."""
    seeds: Count = 1
    """Seeds of each task and cell, from 0 on."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """Device of environments and networks, such as cpu or cuda."""
    budget: Steps = 15_000_000
    """Environment steps of each run."""
    setting: Literal["fast", "paper"] = "fast"
    """Options of PPO: for short runs, or near those of the paper."""
    set: tuple[str, ...] = ()
    """Options of PPO that differ from the setting, name=value each, such as learning_rate=1e-3."""
    cuda_graph: bool = True
    """On a GPU, run compiled steps as CUDA graphs; a cell of your own, which isn't compiled, may not allow graphs."""
    keep_runs: bool = False
    """Keep the folders of the runs, with their policies."""
    out: Path = Path("bench-popgym")
    """Folder for popgym.csv, popgym.png and runs."""


def bench_popgym(wanted: BenchPopgym) -> int:
    """Train what isn't in the results yet, then show the table."""
    if not wanted.cells:
        raise ArgumentError("--cells needs at least one cell.")
    check_device(wanted.device)
    options = setting(wanted.setting, keyword_arguments("--set", wanted.set), cuda_graph=wanted.cuda_graph)
    tasks = find_tasks(wanted.tasks)
    runs = make_runs(tasks, wanted.cells, wanted.seeds, options, budget=wanted.budget, device=wanted.device)
    make_folder(wanted.out)
    with FolderLock(wanted.out, notify).hold(), StopOnSignal() as stop:
        results = Results(wanted.out / "popgym.csv")
        text = options_text(runs[0].config)
        results.check_setting(setting=wanted.setting, budget=wanted.budget, options=text)
        finished = {row.key for row in results.rows}
        waiting = [run for run in runs if run.key not in finished]
        _say(f"{len(runs)} runs, {len(runs) - len(waiting)} of them finished before, into {results.path}")
        _say(f"Setting {wanted.setting}, {wanted.budget:,} steps each on {device_name(wanted.device)}: {text}")
        failed = _train_all(waiting, wanted, results, stop)
        if stop.requested():
            _say("Stopped. Go on with the same command.")
            return stop.exit_code
        _show(results, wanted.out)
    if failed:
        _say(f"{len(failed)} runs failed: {', '.join(failed)}. The same command tries them again.")
    return 1 if failed else 0


def _train_all(runs: list[Run], wanted: BenchPopgym, results: Results, stop: StopOnSignal) -> list[str]:
    """Train runs until a signal comes, and return the names of those that failed."""
    failed: list[str] = []
    for place, run in enumerate(runs):
        try:
            result = _train(run, wanted, stop, left=len(runs) - place, say_time=place == 0)
        except NonFiniteError as error:
            failed.append(_name(run))
            _say(f"{place + 1}/{len(runs)} {_name(run)} failed: {error}")
            continue
        if result is None:
            break
        results.add(result)
        _say(f"{place + 1}/{len(runs)} {_name(run)}: MMER {result.mmer:.3f} after {result.wall_s:.1f} s")
    return failed


def _show(results: Results, folder: Path) -> None:
    if not results.rows:
        return
    summary = Summary(results.rows)
    print(summary.table())
    summary.draw(folder / "popgym.png")
    _say(f"{results.path} and {folder / 'popgym.png'} hold these results")


class _Estimate:
    """Says after the first updates how long all runs take: a callback."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def on_update(self, row: Row) -> None:
        if row["update"] == 2:  # the first one compiles
            hours = self._steps / float(row["steps_per_s"]) / 3600
            _say(f"At {float(row['steps_per_s']):,.0f} steps/s all runs take {_duration(hours)}")


def _train(run: Run, wanted: BenchPopgym, stop: StopOnSignal, *, left: int, say_time: bool) -> Result | None:
    """Train a run; None when it was stopped."""
    begin = time.perf_counter()
    folder = RunFolder(wanted.out / "runs" / _slug(run), notify)
    make_folder(folder.path.parent)
    score = MaxMeanReturn(run.config.num_envs)
    callbacks = [score, _Estimate(wanted.budget * left)] if say_time else [score]
    console = Console(quiet=True)
    with closing(Trainer(run.config, folder, console=console, callbacks=callbacks)) as trainer, folder.hold():
        folder.create(run.config, overwrite=True)
        outcome = trainer.run(stop.requested)
    if outcome.status == "stopped":
        return None
    if not wanted.keep_runs:
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
        setting=wanted.setting,
        budget=wanted.budget,
        options=options_text(run.config),
        device=device_name(wanted.device),
        versions=f"recurl {__version__} torch {torch.__version__}",
        date=time.strftime("%Y-%m-%d"),
    )


def _name(run: Run) -> str:
    return f"{run.task} {run.cell} seed {run.seed}"


def _slug(run: Run) -> str:
    cell = "".join(letter if letter.isalnum() else "-" for letter in run.cell)
    return f"{run.task}-{cell}-seed{run.seed}"


def _duration(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.1f} minutes"


def _say(text: str) -> None:
    print(text, flush=True)

"""``recurl bench popgym``: memory cells on the tasks of POPGym, all in one table."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from recurl.cli.bench_rnn import device_name
from recurl.cli.notices import keep_trace, notify
from recurl.cli.signals import StopOnSignal
from recurl.errors import ArgumentError
from recurl.hardware import check_device, core_count
from recurl.ranges import Count, Steps
from recurl.trainers.files.durable import make_folder
from recurl.trainers.files.lock import FolderLock
from recurl.trainers.keyword_arguments import keyword_arguments
from recurl.trainers.study.popgym.jobs import Failed, default_jobs, train_all
from recurl.trainers.study.popgym.results import Results
from recurl.trainers.study.popgym.settings import CELLS, Run, find_tasks, make_runs, options_text, setting
from recurl.trainers.study.popgym.summary import Summary
from recurl.trainers.study.popgym.training import Work


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
    jobs: Count | None = None
    """Runs that go on at once, in processes of their own; by default 1, on a GPU one for every two cores, at most 3."""
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
        count = f"{len(failed)} {'run' if len(failed) == 1 else 'runs'}"
        _say(f"{count} failed: {', '.join(failed)}. The same command tries again.")
    return 1 if failed else 0


def _train_all(runs: list[Run], wanted: BenchPopgym, results: Results, stop: StopOnSignal) -> list[str]:
    """Train runs until a signal comes, and return the names of those that failed."""
    cores = core_count()
    jobs = wanted.jobs or default_jobs(wanted.device, cores)
    work = Work(
        folder=wanted.out / "runs",
        setting=wanted.setting,
        budget=wanted.budget,
        device=device_name(wanted.device),
        keep_runs=wanted.keep_runs,
        notify=notify,
    )
    estimate = _Estimate(wanted.budget * len(runs), min(jobs, len(runs)))
    failed: list[str] = []
    ended = train_all(runs, work, jobs, cores=cores, on_speed=estimate, should_stop=stop.requested)
    with closing(ended):
        for place, (run, outcome) in enumerate(ended):
            name = f"{run.task} {run.cell} seed {run.seed}"
            if isinstance(outcome, Failed):
                failed.append(name)
                kept = "" if outcome.trace is None else f" (its traceback is in {keep_trace(outcome.trace)})"
                _say(f"{place + 1}/{len(runs)} {name} failed: {outcome.text}{kept}")
            else:
                results.add(outcome)
                _say(f"{place + 1}/{len(runs)} {name}: MMER {outcome.mmer:.3f} after {outcome.wall_s:.1f} s")
    return failed


def _show(results: Results, folder: Path) -> None:
    if not results.rows:
        return
    summary = Summary(results.rows)
    print(summary.table())
    summary.draw(folder / "popgym.png")
    _say(f"{results.path} and {folder / 'popgym.png'} hold these results")


class _Estimate:
    """Says once how long all runs take, from the speed of the first one.

    Args:
        steps: of all runs together.
        jobs: how many of these go on at once.
    """

    def __init__(self, steps: int, jobs: int) -> None:
        self._steps, self._jobs = steps, jobs
        self._said = False

    def __call__(self, steps_per_s: float) -> None:
        if not self._said:
            self._said = True
            speed = steps_per_s * self._jobs
            _say(f"At {speed:,.0f} steps/s all runs take {_duration(self._steps / speed / 3600)}")


def _duration(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.1f} minutes"


def _say(text: str) -> None:
    print(text, flush=True)

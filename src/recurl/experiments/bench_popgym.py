"""``recurl bench popgym``: memory cells on the POPGym tasks."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from recurl.cli.notices import notify, save_traceback
from recurl.cli.signals import StopOnSignal
from recurl.core.devices import check_device, core_count
from recurl.core.errors import ArgumentError
from recurl.core.ranges import Count, Steps
from recurl.experiments.bench_rnn import device_name
from recurl.experiments.jobs import Failed, default_jobs, gpus_for, train_all
from recurl.experiments.popgym.results import Results
from recurl.experiments.popgym.settings import CELLS, Run, find_tasks, make_runs, options_text, setting
from recurl.experiments.popgym.summary import Summary
from recurl.experiments.popgym.training import Work
from recurl.trainers.files.durable import make_folder
from recurl.trainers.files.lock import FolderLock
from recurl.trainers.keyword_arguments import keyword_arguments


@dataclass(frozen=True)
class BenchPopgym:
    """Train memory cells on the POPGym tasks and show the maximum mean return of each (MMER).

    Each finished run is a row of popgym.csv, and the same command continues a benchmark that was stopped. Other cells,
    tasks and seeds are added to the same table.
    """

    cells: tuple[str, ...] = CELLS
    """Cells to compare; module:Class for a custom cell, none for no memory; s5*4 has four layers."""
    tasks: tuple[str, ...] = ()
    """Tasks such as RepeatPreviousEasy, or RepeatPrevious for all its difficulties; by default all."""
    seeds: Count = 1
    """Number of seeds for each task and cell, starting at 0."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """Device of environments and networks, such as cpu or cuda."""
    budget: Steps = 15_000_000
    """Environment steps of each run."""
    setting: Literal["fast", "paper"] = "fast"
    """PPO options: for short runs, or close to those of the paper."""
    set: tuple[str, ...] = ()
    """PPO options that override the setting, as name=value, such as learning_rate=1e-3."""
    cuda_graph: bool = True
    """On a GPU, run compiled steps as CUDA graphs; custom cells are not compiled and may not support graphs."""
    jobs: Count | None = None
    """Number of parallel runs, in separate processes; by default 1, or on GPUs one per two cores, at most 3
    for each. --device cuda uses all GPUs, cuda:1 one."""
    keep_runs: bool = False
    """Keep the run folders, with their policies."""
    out: Path = Path("bench-popgym")
    """Folder for popgym.csv, popgym.png and runs."""


def bench_popgym(args: BenchPopgym) -> int:
    """Train the runs that are missing from the results, then show the table."""
    if not args.cells:
        raise ArgumentError("--cells needs at least one cell.")
    check_device(args.device)
    options = setting(args.setting, keyword_arguments("--set", args.set), cuda_graph=args.cuda_graph)
    tasks = find_tasks(args.tasks)
    runs = make_runs(tasks, args.cells, args.seeds, options, budget=args.budget, device=args.device)
    make_folder(args.out)
    with FolderLock(args.out, notify).hold(), StopOnSignal() as stop:
        results = Results(args.out / "popgym.csv")
        text = options_text(runs[0].config)
        results.check_setting(setting=args.setting, budget=args.budget, options=text)
        finished = {row.key for row in results.rows}
        waiting = [run for run in runs if run.key not in finished]
        _print(f"{len(runs)} runs, {len(runs) - len(waiting)} already finished, in {results.path}")
        _print(f"Setting {args.setting}, {args.budget:,} steps each on {device_name(args.device)}: {text}")
        failed = _train_all(waiting, args, results, stop)
        if stop.requested():
            _print("Stopped. Run the same command to continue.")
            return stop.exit_code
        _show(results, args.out)
    if failed:
        count = f"{len(failed)} {'run' if len(failed) == 1 else 'runs'}"
        _print(f"{count} failed: {', '.join(failed)}. The same command retries them.")
    return 1 if failed else 0


def _train_all(runs: list[Run], args: BenchPopgym, results: Results, stop: StopOnSignal) -> list[str]:
    """Train runs until a signal arrives, and return the names of the failed ones."""
    cores, gpus = core_count(), gpus_for(args.device)
    jobs = args.jobs or default_jobs(args.device, cores, len(gpus))
    work = Work(
        folder=args.out / "runs",
        setting=args.setting,
        budget=args.budget,
        device=device_name(args.device),
        keep_runs=args.keep_runs,
        notify=notify,
    )
    estimate = _Estimate(args.budget * len(runs), min(jobs, len(runs)))
    failed: list[str] = []
    ended = train_all(
        runs, work, min(jobs, len(runs)), cores=cores, gpus=gpus, on_speed=estimate, should_stop=stop.requested
    )
    with closing(ended):
        for place, (run, outcome) in enumerate(ended):
            name = f"{run.task} {run.cell} seed {run.seed}"
            if isinstance(outcome, Failed):
                failed.append(name)
                kept = "" if outcome.trace is None else f" (the traceback is in {save_traceback(outcome.trace)})"
                _print(f"{place + 1}/{len(runs)} {name} failed: {outcome.text}{kept}")
            else:
                results.add(outcome)
                _print(f"{place + 1}/{len(runs)} {name}: MMER {outcome.mmer:.3f} after {outcome.wall_s:.1f} s")
    return failed


def _show(results: Results, folder: Path) -> None:
    if not results.rows:
        return
    summary = Summary(results.rows)
    print(summary.table())
    summary.draw(folder / "popgym.png")
    _print(f"Results written to {results.path} and {folder / 'popgym.png'}")


class _Estimate:
    """Print an estimate of the total time once, from the speed of the first run.

    Args:
        steps: total steps of all runs.
        jobs: number of parallel runs.
    """

    def __init__(self, steps: int, jobs: int) -> None:
        self._steps, self._jobs = steps, jobs
        self._reported = False

    def __call__(self, steps_per_s: float) -> None:
        if not self._reported:
            self._reported = True
            speed = steps_per_s * self._jobs
            _print(f"At {speed:,.0f} steps/s all runs take {_duration(self._steps / speed / 3600)}")


def _duration(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.1f} minutes"


def _print(text: str) -> None:
    print(text, flush=True)

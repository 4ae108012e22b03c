"""``recurl bench memory``: memory cells with equal numbers of parameters."""

from __future__ import annotations

import shutil
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from recurl.cli.notices import notify, save_traceback
from recurl.cli.signals import StopOnSignal
from recurl.core.devices import check_device, core_count
from recurl.core.errors import ArgumentError, ArgumentTypeError
from recurl.core.ranges import Count, Positive, Steps
from recurl.experiments.bench_rnn import device_name
from recurl.experiments.jobs import Failed, default_jobs, gpus_for, train_all
from recurl.experiments.memory.suites import CELLS, MemoryRun, MemoryTask, Suite, find_tasks, make_runs
from recurl.experiments.memory.summary import MemorySummary
from recurl.experiments.memory.training import MemoryResult, MemoryWork
from recurl.experiments.popgym.settings import setting, split_layers
from recurl.experiments.results import ResultsFile
from recurl.recurrence import load_cell
from recurl.trainers.config import NO_CELL
from recurl.trainers.files.durable import make_folder
from recurl.trainers.files.lock import FolderLock
from recurl.trainers.keyword_arguments import keyword_arguments

_RUNS = "bench-memory-runs"  # removed, so it must not be "runs", where recurl train keeps its own


@dataclass(frozen=True)
class BenchMemory:
    """Train memory cells with equal numbers of parameters on tasks that need memory, and show their scores.

    The hidden size of each cell is chosen so that its policy has as many parameters as that of a GRU. Each finished run
    is a row of memory.csv; --resume trains those that are missing, in as many pieces as you like.
    """

    suite: Suite = "core"
    """Tasks: recurl's own from 4 to 1,000 steps of memory, or POPGym's 48, with the setting fast."""
    tasks: tuple[str, ...] = ()
    """Tasks of the suite such as TMaze100; by default all."""
    cells: tuple[str, ...] = ()
    """Cells to compare, by default all main ones and none; module:Class for a custom cell, none for no memory; s5*4 has
    four layers."""
    seeds: Count = 5
    """Number of seeds for each task and cell, starting at 0."""
    steps: Steps | None = None
    """Environment steps of each run; by default 10 million, POPGym 15 million."""
    set: tuple[str, ...] = ()
    """PPO options that override the settings, as name=value; hidden_size is that of the GRU."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """Device of environments and networks, such as cpu or cuda."""
    jobs: Count | None = None
    """Number of parallel runs, in separate processes; by default 1, or on GPUs one per two cores, at most 3
    for each. --device cuda uses all GPUs, cuda:1 one."""
    budget: Positive | None = None
    """Seconds after which no further run is started."""
    resume: bool = False
    """Continue: train the runs that have no row with the same settings yet."""
    table: bool = False
    """Only show the table of the rows that exist; by default of all cells that have some."""
    out: Path = Path("bench-memory")
    """Folder for memory.csv, and for runs while they are trained."""


def bench_memory(args: BenchMemory) -> int:
    """Train the runs that are missing from the results, then show the table."""
    tasks = find_tasks(args.suite, args.tasks)
    if args.table:
        return _show_table(args, tasks)
    check_device(args.device)
    runs = _runs(args, tasks, args.cells or CELLS)
    make_folder(args.out)
    with FolderLock(args.out, notify).hold(), StopOnSignal() as stop:
        results = _results(args.out)
        finished = {row.key for row in results.rows}
        waiting = [run for run in runs if run.key not in finished]
        if results.rows and not args.resume:
            raise ArgumentError(f"{results.path} holds results: continue with --resume, or name another --out.")
        shutil.rmtree(args.out / _RUNS, ignore_errors=True)  # of a process that was killed
        _print(f"{len(runs)} runs, {len(runs) - len(waiting)} already finished, in {results.path}")
        failed = _train_all(waiting, args, results, stop)
        if stop.requested():
            _print("Stopped. Continue with --resume.")
            return stop.exit_code
        _print(MemorySummary(args.suite, tasks, runs, results.rows).table())
    if failed:
        count = f"{len(failed)} {'run' if len(failed) == 1 else 'runs'}"
        _print(f"{count} failed: {', '.join(failed)}. --resume retries them.")
    return 1 if failed else 0


def _show_table(args: BenchMemory, tasks: Sequence[MemoryTask]) -> int:
    given = {"--resume": args.resume, "--budget": args.budget, "--jobs": args.jobs}
    if unused := [name for name, value in given.items() if value]:
        raise ArgumentError(f"--table trains nothing: leave out {' and '.join(unused)}, or --table.")
    results = _results(args.out)
    names = {task.name for task in tasks}
    cells = args.cells or tuple(dict.fromkeys(row.cell for row in results.rows if row.task in names))
    if not cells:
        raise ArgumentError(f"{results.path} holds no results of these tasks yet: train some, without --table.")
    if not args.cells:
        _check_cells(results.path, cells)
    _print(MemorySummary(args.suite, tasks, _runs(args, tasks, cells), results.rows).table())
    return 0


def _check_cells(path: Path, cells: Sequence[str]) -> None:
    """Check that the cells of a file's results can be loaded."""
    for cell in cells:
        try:
            name, _ = split_layers(cell)
            if name != NO_CELL:
                load_cell(name)
        except (ArgumentError, ArgumentTypeError) as error:
            raise ArgumentError(
                f"{path} holds results of the cell {cell!r}, which can't be loaded here. Make it available, or name "
                f"the cells to show, as in --cells gru. ({error})"
            ) from error


def _runs(args: BenchMemory, tasks: Sequence[MemoryTask], cells: Sequence[str]) -> list[MemoryRun]:
    changes = keyword_arguments("--set", args.set)
    device = "cpu" if args.table else args.device  # rows of a GPU are shown anywhere
    options = setting("fast", changes)
    return make_runs(tasks, cells, args.seeds, options, changes=changes, steps=args.steps, device=device)


def _results(folder: Path) -> ResultsFile[MemoryResult]:
    return ResultsFile(folder / "memory.csv", MemoryResult, "recurl bench memory")


def _train_all(
    runs: Sequence[MemoryRun], args: BenchMemory, results: ResultsFile[MemoryResult], stop: StopOnSignal
) -> list[str]:
    """Train runs until a signal arrives or the budget is spent, and return the names of the failed ones."""
    cores, gpus = core_count(), gpus_for(args.device)
    jobs = min(args.jobs or default_jobs(args.device, cores, len(gpus)), len(runs))
    work = MemoryWork(args.out / _RUNS, device_name(args.device), notify)
    failed: list[str] = []
    started = _started(runs, args.budget)
    ended = train_all(started, work, jobs, cores=cores, gpus=gpus, on_speed=lambda _: None, should_stop=stop.requested)
    with closing(ended):
        for place, (run, outcome) in enumerate(ended):
            if isinstance(outcome, Failed):
                failed.append(run.name)
                kept = "" if outcome.trace is None else f" (the traceback is in {save_traceback(outcome.trace)})"
                _print(f"{place + 1}/{len(runs)} {run.name} failed: {outcome.text}{kept}")
            else:
                results.add(outcome)
                _print(
                    f"{place + 1}/{len(runs)} {run.name}: {outcome.hidden_size} units, {outcome.parameters:,} "
                    f"parameters, greedy return {outcome.greedy:.3f} after {outcome.wall_s:.1f} s"
                )
    shutil.rmtree(work.folder, ignore_errors=True)
    return failed


def _started(runs: Sequence[MemoryRun], budget: float | None) -> Generator[MemoryRun]:
    """Yield the runs while the budget lasts."""
    begin = time.monotonic()
    for place, run in enumerate(runs):
        if budget is not None and time.monotonic() - begin >= budget:
            _print(f"The budget of {budget:g} s is spent: {len(runs) - place} runs are left for --resume.")
            return
        yield run


def _print(text: str) -> None:
    print(text, flush=True)

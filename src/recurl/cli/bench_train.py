"""``recurl bench train``: where the time of an update goes, for the options of a run."""

from __future__ import annotations

import csv
import io
import os
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from recurl._version import __version__
from recurl.cli.bench_rnn import device_name
from recurl.cli.sources import read_sources
from recurl.cli.speed import notify_if_slow
from recurl.cli.train import read_run
from recurl.errors import ArgumentError
from recurl.precision import torch_matmul_precision
from recurl.ranges import Count
from recurl.trainers import ALGORITHMS, RunConfig
from recurl.trainers.algorithms.table import make_algorithm
from recurl.trainers.files.durable import write_whole
from recurl.trainers.run.update_times import UpdateTimes, time_updates


@dataclass(frozen=True, kw_only=True)
class BenchTrain:
    """Show where the time of an update goes: recurl bench train ALGORITHM, with the options of recurl train."""

    warm_up: Count = 5
    """Updates before those that are measured; more where learning begins later (--learning-starts)."""
    updates: Count = 20
    """Updates that are measured."""
    csv: Path | None = None
    """Write the times to this CSV file too."""
    preset: str | None = None
    """Take options that were tuned and measured; --config and options of the command line come first."""
    config: Path | None = None
    """Take options from a TOML file, or from the config.json of a run; options of the command line come first."""


def read_bench_train(arguments: list[str]) -> BenchTrain:
    """Parse the arguments: an algorithm and its options."""
    wanted = None
    if arguments:
        wanted = read_run(arguments, read_sources(arguments), prog="recurl bench train", place=BenchTrain)
    if wanted is None:
        raise ArgumentError(f"recurl bench train takes an algorithm ({', '.join(ALGORITHMS)}) and its options.")
    return wanted


def bench_train(wanted: Any) -> int:
    """Run updates and show their parts."""
    config = _long_enough(wanted.options, wanted.warm_up + wanted.updates)
    if wanted.csv is not None:
        _check_writable(wanted.csv)
    notify_if_slow(config.device)
    with torch_matmul_precision(config.torch_precision), closing(make_algorithm(config)) as learner:
        found = time_updates(learner, wanted.warm_up, wanted.updates)
    console = Console()
    for text in _heading(config, found, wanted.updates):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(_table(found))
    for text in _notes(config, found):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    if wanted.csv is not None:
        _write(wanted.csv, config, found)
        console.print(f"{wanted.csv} holds these results", markup=False, highlight=False, soft_wrap=True)
    return 0


def _long_enough(config: RunConfig, updates: int) -> RunConfig:
    """Return the options with as many steps as the updates take, so that schedules don't end before."""
    starts = getattr(config, "learning_starts", 0)
    steps = (updates + 2) * config.frames_per_batch + starts
    return replace(config, total_steps=max(config.total_steps, steps))


def _check_writable(path: Path) -> None:
    irregular = os.path.lexists(path) and (path.is_symlink() or not path.is_file())
    if irregular or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ArgumentError(f"--csv must be a regular file that can be written, in a folder that exists, got {path}.")


def _heading(config: RunConfig, found: UpdateTimes, updates: int) -> list[str]:
    sizes = f"{config.num_envs} environments x {config.rollout_steps} steps"
    return [
        f"{config.algorithm} with {config.cell} {config.hidden_size} on {config.env_name}, {sizes}, on "
        f"{device_name(config.device)}: {updates} updates",
        f"{found.wall * 1e3:,.3g} ms each, {found.frames / found.wall:,.0f} steps/s",
    ]


def _table(found: UpdateTimes) -> Table:
    table = Table("part of an update")
    for name in ("ms", "share"):
        table.add_column(name, justify="right")
    for name, seconds in found.parts.items():
        table.add_row(name, f"{seconds * 1e3:.3g}", f"{seconds / found.wall:.1%}")
    table.add_section()
    table.add_row("all", f"{sum(found.parts.values()) * 1e3:.3g}", f"{sum(found.parts.values()) / found.wall:.1%}")
    return table


def _notes(config: RunConfig, found: UpdateTimes) -> list[str]:
    if found.gpu_idle is None:
        return []
    notes = [
        "Times are those between events on the GPU: they include its waits for the host.",
        f"The GPU worked for {(found.gpu_busy or 0) * 1e3:.3g} ms of an update and was idle for {found.gpu_idle:.0%}.",
    ]
    if getattr(config, "cuda_graph", False):
        notes.append("What runs inside a CUDA graph is given as a whole.")
    return notes


def _write(path: Path, config: RunConfig, found: UpdateTimes) -> None:
    own = {
        "date": time.strftime("%Y-%m-%d"),
        "recurl": __version__,
        "torch": torch.__version__,
        "device_name": device_name(config.device),
        "algorithm": config.algorithm,
        "env": config.env_name,
        "cell": config.cell,
        "hidden_size": config.hidden_size,
        "num_envs": config.num_envs,
        "rollout_steps": config.rollout_steps,
    }
    busy = "" if found.gpu_busy is None else f"{found.gpu_busy * 1e3:.4f}"
    rows = [
        {**own, "part": name, "ms": f"{seconds * 1e3:.4f}", "update_ms": f"{found.wall * 1e3:.4f}", "gpu_busy_ms": busy}
        for name, seconds in found.parts.items()
    ]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue().encode())

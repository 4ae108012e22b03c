"""``recurl bench train``: time breakdown of an update for the options of a run."""

from __future__ import annotations

import csv
import io
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from recurl._version import __version__
from recurl.cli.place import SourceOptions
from recurl.cli.sources import read_sources
from recurl.cli.speed import notify_if_slow
from recurl.cli.train import read_run
from recurl.core.errors import ArgumentError
from recurl.core.ranges import Count
from recurl.core.spans import ENVIRONMENT
from recurl.experiments.bench_rnn import device_name
from recurl.trainers import ALGORITHMS, RunConfig
from recurl.trainers.env_name import is_environment, is_jax, source_of
from recurl.trainers.files.durable import write_atomic
from recurl.trainers.machine import best_workers, describe, step_seconds
from recurl.trainers.run.update_times import UpdateTimes, time_run

_WORTH_SAYING = 1.1  # times the steps/s


@dataclass(frozen=True, kw_only=True)
class BenchTrain(SourceOptions):
    """Show the time breakdown of an update: recurl bench train ALGORITHM, with the options of recurl train."""

    warm_up: Count = 5
    """Updates before measurement begins; more are run if learning starts later (--learning-starts)."""
    updates: Count = 20
    """Number of measured updates."""
    csv: Path | None = None
    """Also write the times to this CSV file."""


def read_bench_train(arguments: list[str]) -> BenchTrain:
    """Parse the arguments: an algorithm and its options."""
    args = None
    if arguments:
        args = read_run(arguments, read_sources(arguments), prog="recurl bench train", extra=BenchTrain)
    if args is None:
        raise ArgumentError(f"recurl bench train needs an algorithm ({', '.join(ALGORITHMS)}) and its options.")
    return args


def bench_train(args: Any) -> int:
    """Run updates and show the time of their parts."""
    config: RunConfig = args.options
    if args.csv is not None:
        _check_writable(args.csv)
    notify_if_slow(config.device)
    found = time_run(config, args.warm_up, args.updates)
    console = Console()
    for text in _heading(config, found, args.updates):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(_table(found))
    for text in _notes(config, found):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    if args.csv is not None:
        _write(args.csv, config, found)
        console.print(f"Results written to {args.csv}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _check_writable(path: Path) -> None:
    irregular = os.path.lexists(path) and (path.is_symlink() or not path.is_file())
    if irregular or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ArgumentError(f"--csv must be a regular file that can be written, in a folder that exists, got {path}.")


def _heading(config: RunConfig, found: UpdateTimes, updates: int) -> list[str]:
    sizes = f"{config.num_envs} environments x {config.rollout_steps} steps"
    chosen = describe(config)
    return [
        *([] if chosen is None else [chosen]),
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
    gain = _gain_of_workers(config, found)
    if found.gpu_idle is None:
        return gain
    notes = [
        "Times are measured between GPU events and include waiting for the host.",
        f"The GPU was busy for {(found.gpu_busy or 0) * 1e3:.3g} ms of an update and idle for {found.gpu_idle:.0%}.",
    ]
    if getattr(config, "cuda_graph", False):
        notes.append("Work inside a CUDA graph is reported as a whole.")
    return notes + gain


def _gain_of_workers(config: RunConfig, found: UpdateTimes) -> list[str]:
    """Return a line with the steps/s expected with environments in worker processes, if these gain a tenth."""
    spent = found.parts.get(ENVIRONMENT, 0.0)
    workers = best_workers(config.num_envs, spent / config.frames_per_batch)
    on_host = config.vectorization == "auto" and not is_jax(config.env) and not is_environment(source_of(config.env))
    if not workers or config.env_workers or not on_host:
        return []
    faster = config.rollout_steps * step_seconds(config.num_envs, workers, spent / config.frames_per_batch)
    gain = found.wall / (found.wall - spent + faster)
    if gain < _WORTH_SAYING:
        return []
    return [
        f"With --env-workers {workers}, the environments are expected to take {faster * 1e3:.3g} instead of "
        f"{spent * 1e3:.3g} ms of an update: {gain:.1f} times the steps/s."
    ]


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
    write_atomic(path, text.getvalue().encode())

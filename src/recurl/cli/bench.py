"""``recurl bench rnn``: which recurrent backend is the fastest here, on the user's own shapes."""

from __future__ import annotations

import csv
import itertools
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from recurl import __version__
from recurl.cli.arguments import parse_arguments
from recurl.diagnostics import RNNCase, RNNTime, time_rnn
from recurl.errors import ArgumentError
from recurl.recurrence import BACKENDS
from recurl.trainers.environment import check_device


@dataclass(frozen=True)
class BenchRNN:
    """Time forward and backward of a recurrent module for every backend that runs here.

    Options that take several values are combined: --hidden-size 64 128 --batch 8 32 are four cases.
    """

    cell: tuple[str, ...] = ("lstm",)
    """Cells: lstm, gru, or module:Class for one of your own."""
    hidden_size: tuple[int, ...] = (64,)
    """Widths of the hidden state."""
    input_size: int | None = None
    """Width of the input; that of the hidden state by default."""
    num_layers: int = 1
    """Stacked layers."""
    batch: tuple[int, ...] = (32,)
    """Rows of a batch."""
    time: tuple[int, ...] = (128,)
    """Steps of each row."""
    mean_segment: tuple[int, ...] = (50,)
    """Mean steps between two resets, which come at random; 0 for none."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Of parameters and data."""
    precision: Literal["auto", "fast", "high-prec", "ieee", "tf32", "tf32x3", "bf16"] = "auto"
    """Of the recurrent products in float32 on a GPU; bf16 rounds their operands."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """Where to run, such as cpu or cuda."""
    threads: int = torch.get_num_threads()
    """CPU threads of torch."""
    backends: tuple[str, ...] = ()
    """Backends to time; all but the slow reference by default."""
    repeats: int = 20
    """Times that each backend runs, in turns."""
    seconds: float = 30.0
    """No new turn of a case after this many seconds."""
    out: Path = Path("bench-rnn")
    """Folder for rnn.csv and rnn.png."""


def bench_rnn_command(arguments: list[str]) -> int:
    """Time the backends; show a table and write it."""
    wanted = parse_arguments(BenchRNN, arguments, prog="recurl bench rnn")
    check_device(wanted.device)
    if wanted.threads <= 0:
        raise ArgumentError(f"--threads must be positive, got {wanted.threads}.")
    for name in wanted.backends:
        if name not in BACKENDS.names:
            raise ArgumentError(f"--backends must be of {', '.join(BACKENDS.names)}, got {name!r}.")
    cases = _cases(wanted)
    before = torch.get_num_threads()
    torch.set_num_threads(wanted.threads)
    console = Console()
    results: list[RNNTime] = []
    try:
        for case in cases:
            measured = time_rnn(case, wanted.backends, repeats=wanted.repeats, seconds=wanted.seconds)
            _show(console, case, measured)
            results += measured
    finally:
        torch.set_num_threads(before)
    try:
        wanted.out.mkdir(parents=True, exist_ok=True)
        _write(wanted.out / "rnn.csv", results, wanted)
        _draw(wanted.out / "rnn.png", cases, results)
    except OSError as error:
        raise ArgumentError(f"Can't write to {wanted.out} ({error.strerror}): name another folder (--out).") from error
    console.print(f"{wanted.out / 'rnn.csv'} and {wanted.out / 'rnn.png'} hold these results", soft_wrap=True)
    return 0


def _cases(wanted: BenchRNN) -> list[RNNCase]:
    lists = (wanted.cell, wanted.hidden_size, wanted.batch, wanted.time, wanted.mean_segment)
    cases = [
        RNNCase(
            cell=cell,
            input_size=hidden if wanted.input_size is None else wanted.input_size,
            hidden_size=hidden,
            num_layers=wanted.num_layers,
            batch=batch,
            time=steps,
            mean_segment=segment or None,
            dtype=wanted.dtype,
            precision=wanted.precision,
            device=wanted.device,
        )
        for cell, hidden, batch, steps, segment in itertools.product(*lists)
    ]
    return list(dict.fromkeys(cases))


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else f"{platform.machine()} CPU"


def _show(console: Console, case: RNNCase, results: Sequence[RNNTime]) -> None:
    title = f"{case}, {case.dtype} on {_device_name(case.device)}: forward and backward"
    console.print(title, markup=False, highlight=False, soft_wrap=True)
    table = Table("backend")
    for name in ("ms", "min - max", "tokens/s", "slower by", "error", "MiB"):
        table.add_column(name, justify="right")
    for place, result in enumerate(result for result in results if result.times_ms):
        ms = result.times_ms
        table.add_row(
            result.backend,
            f"{result.median_ms:.3g}",
            f"{min(ms):.3g} - {max(ms):.3g}",
            f"{result.tokens_per_s:,.0f}",
            "the fastest" if place == 0 else f"x {result.median_ms / results[0].median_ms:.2f}",
            f"{result.error:.0e}",
            "" if result.peak_mb is None else f"{result.peak_mb:.1f}",
            style="bold green" if place == 0 else None,
        )
    console.print(table)
    for result in results:
        if result.reason is not None:
            console.print(f"{result.backend} can't run: {result.reason}", markup=False, highlight=False, soft_wrap=True)
    console.print()


def _write(path: Path, results: Sequence[RNNTime], wanted: BenchRNN) -> None:
    rows = [_row(result, wanted) for result in results]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _row(result: RNNTime, wanted: BenchRNN) -> dict[str, Any]:
    measured: dict[str, Any] = {}
    if result.times_ms:
        measured = {
            "median_ms": f"{result.median_ms:.4f}",
            "min_ms": f"{min(result.times_ms):.4f}",
            "max_ms": f"{max(result.times_ms):.4f}",
            "repeats": len(result.times_ms),
            "tokens_per_s": f"{result.tokens_per_s:.0f}",
            "error": f"{result.error:.2e}",
        }
    return {
        "date": time.strftime("%Y-%m-%d"),
        "recurl": __version__,
        "torch": torch.__version__,
        "device_name": _device_name(wanted.device),
        "threads": wanted.threads,
        **vars(result.case),
        "backend": result.backend,
        **{
            name: measured.get(name, "")
            for name in ("median_ms", "min_ms", "max_ms", "repeats", "tokens_per_s", "error")
        },
        "peak_mib": "" if result.peak_mb is None else f"{result.peak_mb:.1f}",
        "reason": result.reason or "",
    }


def _draw(path: Path, cases: Sequence[RNNCase], results: Sequence[RNNTime]) -> None:
    """A line of points for each case, one point for each backend."""
    figure = Figure(figsize=(9, 1.8 + 0.8 * len(cases)), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name in sorted({result.backend for result in results if result.times_ms}):
        measured = [result for result in results if result.backend == name and result.times_ms]
        places = [cases.index(result.case) for result in measured]
        axes.plot([result.median_ms for result in measured], places, "o", markersize=9, label=name)
        for place, result in zip(places, measured, strict=True):
            text = f"{result.median_ms:.3g}"
            axes.annotate(text, (result.median_ms, place), (0, 8), textcoords="offset points", ha="center", fontsize=8)
    axes.set_yticks(range(len(cases)), [str(case) for case in cases])
    axes.set(xlabel="milliseconds, forward and backward (median): less is better", xscale="log")
    axes.set_ylim(len(cases) - 0.5, -0.5)
    axes.margins(x=0.1)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.grid(visible=True, alpha=0.3)
    if axes.lines:
        figure.legend(loc="outside upper center", ncols=6)
    canvas.print_figure(path, dpi=120)

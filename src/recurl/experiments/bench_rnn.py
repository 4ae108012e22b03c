"""``recurl bench rnn``: timings of all recurrent backends on this machine for given shapes."""

from __future__ import annotations

import csv
import io
import itertools
import math
import platform
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from recurl._version import __version__
from recurl.core.errors import ArgumentError
from recurl.core.ranges import Count, NonNegative, NonNegativeInt, Threads
from recurl.diagnostics import RNNCase, RNNTime, time_rnn
from recurl.diagnostics.kernel_tuning import PORTABLE, check_tunable, tune_kernels
from recurl.experiments.bench_figure import figure
from recurl.recurrence import BACKENDS
from recurl.recurrence.cuda.tuned import path
from recurl.trainers.files.durable import write_atomic

_THREADS = min(torch.get_num_threads(), 1024)


@dataclass(frozen=True)
class BenchRNN:
    """Time the forward and backward pass of a recurrent module on every available backend.

    All combinations of values are timed: --hidden-size 64 128 --batch 8 32 gives four cases.
    """

    cell: tuple[str, ...] = ("lstm",)
    """Cells to time: lstm, gru, mingru, minlstm, lru, s5, rglru, ffm, gtrxl, mlstm, mamba2, gated_deltanet, slstm, shm,
    or module:Class for a custom cell."""
    hidden_size: tuple[Count, ...] = (64,)
    """Widths of the hidden state."""
    input_size: Count | None = None
    """Width of the input; by default that of the hidden state."""
    num_layers: Count = 1
    """Number of stacked layers."""
    batch: tuple[Count, ...] = (32,)
    """Rows of a batch."""
    time: tuple[Count, ...] = (128,)
    """Steps of each row."""
    mean_segment: tuple[NonNegativeInt, ...] = (50,)
    """Mean number of steps between random resets; 0 for no resets."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Dtype of parameters and data."""
    precision: Literal["auto", "fast", "high-prec", "ieee", "tf32", "tf32x3", "bf16"] = "auto"
    """Precision of recurrent products in float32 on a GPU; bf16 rounds their operands."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """Device to run on, such as cpu or cuda."""
    threads: Threads = _THREADS
    """Number of CPU threads of torch."""
    backends: tuple[str, ...] = ()
    """Backends to time; by default all but the slow reference."""
    tune: bool = False
    """Time the families of GPU kernels for an lstm or gru, instead of the backends, and use the fastest from now on."""
    repeats: Count = 20
    """Repetitions per backend; the backends take turns."""
    seconds: NonNegative = 30.0
    """Seconds after which no further repetition of a case is started."""
    out: Path = Path("bench-rnn")
    """Folder for rnn.csv and rnn.png."""


def bench_rnn(args: BenchRNN) -> int:
    """Time the backends, then print and save the results."""
    for name in args.backends:
        if name not in BACKENDS.names:
            raise ArgumentError(f"--backends must be of {', '.join(BACKENDS.names)}, got {name!r}.")
    if args.tune and args.backends:
        raise ArgumentError("--tune times the families of the triton backend: leave out --backends.")
    cases = _cases(args)
    for case in cases:
        case.check_machine()
        if args.tune:
            check_tunable(case)
    _make_folder(args.out)
    before = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    console = Console()
    results: list[RNNTime] = []
    try:
        for case in cases:
            measured = (
                tune_kernels(case, repeats=args.repeats, seconds=args.seconds)
                if args.tune
                else time_rnn(case, args.backends, repeats=args.repeats, seconds=args.seconds)
            )
            _show(console, case, measured)
            results += measured
    finally:
        torch.set_num_threads(before)
    _write(args.out / "rnn.csv", results, args)
    picture = io.BytesIO()
    figure(cases, results).savefig(picture, format="png", dpi=120)
    write_atomic(args.out / "rnn.png", picture.getvalue())
    if args.tune:
        untuned = [str(result.case) for result in results if result.backend == PORTABLE and math.isnan(result.error)]
        for case in untuned:
            text = f"{case}: nothing is stored, since the portable kernels, the measure of accuracy, can't run"
            console.print(text, markup=False, soft_wrap=True)
        if len(untuned) < len(cases):
            which = "The other layers" if untuned else "Layers of these sizes"
            console.print(f"{which} use the fastest kernels from now on: see {path()}", soft_wrap=True)
    console.print(f"Results written to {args.out / 'rnn.csv'} and {args.out / 'rnn.png'}", soft_wrap=True)
    return 0


@contextmanager
def _writing(folder: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise ArgumentError(f"Can't write to {folder} ({error.strerror}): name another folder (--out).") from error


def _make_folder(folder: Path) -> None:
    """Create the folder, but not its parents, and check that it is writable."""
    with _writing(folder):
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def _cases(args: BenchRNN) -> list[RNNCase]:
    lists = (args.cell, args.hidden_size, args.batch, args.time, args.mean_segment)
    cases = [
        RNNCase(
            cell=cell,
            input_size=hidden if args.input_size is None else args.input_size,
            hidden_size=hidden,
            num_layers=args.num_layers,
            batch=batch,
            time=steps,
            mean_segment=segment or None,
            dtype=args.dtype,
            precision=args.precision,
            device=args.device,
        )
        for cell, hidden, batch, steps, segment in itertools.product(*lists)
    ]
    if not cases:
        raise ArgumentError("--cell, --hidden-size, --batch, --time and --mean-segment need a value each.")
    return list(dict.fromkeys(cases))


def device_name(device: str) -> str:
    """Return the name of a GPU, or the architecture of this CPU."""
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else f"{platform.machine()} CPU"


def _show(console: Console, case: RNNCase, results: Sequence[RNNTime]) -> None:
    title = f"{case}, {case.dtype} on {device_name(case.device)}: forward and backward"
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


def _write(path: Path, results: Sequence[RNNTime], args: BenchRNN) -> None:
    rows = [_row(result, args) for result in results]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(path, text.getvalue().encode())


def _row(result: RNNTime, args: BenchRNN) -> dict[str, Any]:
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
        "device_name": device_name(args.device),
        "threads": args.threads,
        **vars(result.case),
        "backend": result.backend,
        **{
            name: measured.get(name, "")
            for name in ("median_ms", "min_ms", "max_ms", "repeats", "tokens_per_s", "error")
        },
        "peak_mib": "" if result.peak_mb is None else f"{result.peak_mb:.1f}",
        "reason": result.reason or "",
    }

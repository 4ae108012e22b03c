"""Recurrent layers of many sizes on a GPU vs. cuDNN: results/rnn_gpu_sweep.csv and docs/rnn_gpu_sweep.png.

Each row is one layer, forward and backward with all weight gradients, float32 storage, 16,384 to 65,536 tokens:
milliseconds of GPU time without host gaps (busy) and wall time of a call in eager mode. A table can be created in
parts: cases of the commit that are already in the CSV are skipped. cuDNN does not support resets. With --families,
every family of kernels that fits is timed too, as ``tf32:rows``. Usage::

    python benchmarks/bench_rnn_gpu_sweep.py --commit abc123 --seconds 300
    python benchmarks/bench_rnn_gpu_sweep.py --families --csv benchmarks/results/rnn_gpu_families.csv --sizes 104 128
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from bench_rnn_gpu import busy, cudnn, wall
from recurl.recurrence.cuda import choose
from recurl.recurrence.cuda.choose import fitting_for
from recurl.recurrence.cuda.hardware import hardware_of
from recurl.recurrence.cuda.plan import only
from rnn_gpu_layer import DEVICE, Layer, Problem, guarded, options_of

ROOT = Path(__file__).parents[1]
RESULTS, FIGURE = ROOT / "benchmarks/results/rnn_gpu_sweep.csv", ROOT / "docs/rnn_gpu_sweep.png"
SIZES = [
    *[16, 24, 32, 48, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256],
    *[320, 384, 448, 512, 640, 768, 1024],
]
SHAPES = ["64x512", "512x64", "16x1024", "4096x16", "100x200", "256x128"]
KEY = ("cell", "H", "B", "T", "resets", "what")
NAMES = {"tf32": "tf32", "ieee": "ieee", "bf16": "bf16", "cudnn": "tf32", "cudnn-float32": "ieee", "cudnn-bf16": "bf16"}
PEERS = [("tf32", "cudnn"), ("ieee", "cudnn-float32"), ("ieee", "cudnn"), ("bf16", "cudnn-bf16")]
LEAST, GROWTH = 0.95, 1.3  # minimum relative to cuDNN's speed; maximum relative to the time of the previous size


def cases(arguments: argparse.Namespace) -> Iterator[Problem]:
    """Yield the grid of cases, shape by shape."""
    for shape, resets, hidden, cell in itertools.product(
        arguments.shapes, arguments.resets, arguments.sizes, arguments.cells
    ):
        rows, length = map(int, shape.split("x"))
        yield Problem(cell, hidden, rows, length, resets)


def key_of(problem: Problem, what: str) -> tuple[str, ...]:
    values = (problem.cell, problem.hidden, problem.rows, problem.length, problem.resets, what)
    return tuple(map(str, values))


def time_one(layer: Layer, problem: Problem, what: str) -> dict[str, Any]:
    """Return one row of the table."""
    precision, _, family = what.partition(":")
    allowed = NAMES[precision] != "ieee"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    if what.startswith("cudnn"):
        step = cudnn(layer, problem, torch.bfloat16 if what == "cudnn-bf16" else torch.float32)
    else:

        def step() -> object:
            return layer.step("triton", options_of(precision))

    with only(family) if family else nullcontext():
        total, walks = busy(step, 3)
        return {**dict(zip(KEY, key_of(problem, what), strict=True)), "busy": total, "wall": wall(step, 7), **walks}


def names_of(arguments: argparse.Namespace, problem: Problem) -> list[str]:
    """Return what is timed of a case."""
    names = [what for what in arguments.names if problem.resets == 0.0 or not what.startswith("cudnn")]
    if arguments.families:
        hardware = hardware_of(DEVICE)
        for precision in [name for name in names if not name.startswith("cudnn")]:
            fitting = fitting_for(choose.Layer(hardware, problem.cell, problem.hidden, precision, problem.rows))
            names += [f"{precision}:{family}" for family in fitting]
    return names


def compiled(arguments: argparse.Namespace) -> None:
    """Run every case of this process's part once, to compile its kernels."""
    first, step = arguments.part
    problems = {(p.cell, p.hidden, p.rows): p for p in cases(arguments)}
    for problem in list(problems.values())[first::step]:
        layer = Layer(problem)
        for what in names_of(arguments, problem):
            precision, _, family = what.partition(":")
            if not what.startswith("cudnn"):
                with only(family) if family else nullcontext():
                    guarded(layer.step, "triton", options_of(precision))


def compile_all(jobs: int) -> None:
    """Compile in ``jobs`` parallel processes."""
    command = [sys.executable, *sys.argv]
    running = [subprocess.Popen([*command, "--part", str(k), str(jobs)]) for k in range(jobs)]
    for process in running:
        process.wait()


def sweep(arguments: argparse.Namespace, versions: dict[str, str]) -> None:
    """Time the cases that are missing in the CSV, and append them row by row."""
    path, until = arguments.csv, time.monotonic() + arguments.seconds
    done = {tuple(row[name] for name in KEY) for row in table_of(path) if row["commit"] == versions["commit"]}
    fields = [*KEY, "busy", "wall", "forward", "backward", *versions]
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fields)
        if fresh:
            writer.writeheader()
        for problem in cases(arguments):
            missing = [what for what in names_of(arguments, problem) if key_of(problem, what) not in done]
            layer = Layer(problem) if missing else None
            for what in missing:
                if time.monotonic() > until:
                    print("out of time at", *key_of(problem, what), flush=True)
                    return
                row = guarded(time_one, layer, problem, what)
                if isinstance(row, dict):
                    rounded = {name: round(v, 4) if isinstance(v, float) else v for name, v in row.items()}
                    writer.writerow({**rounded, **versions})
                    file.flush()


def table_of(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV; none if the file is missing."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def latest(table: list[dict[str, str]]) -> dict[tuple[str, ...], dict[str, str]]:
    """Return the last row of each case."""
    return {tuple(row[name] for name in KEY): row for row in table}


def ratios(rows: dict[tuple[str, ...], dict[str, str]], what: str, peer: str) -> dict[tuple[str, ...], float]:
    """Return the speedup of each case relative to ``peer`` (without resets)."""
    found: dict[tuple[str, ...], float] = {}
    for key, row in rows.items():
        other = rows.get((*key[:4], "0.0", peer))
        if key[5] == what and other is not None:
            found[key[:5]] = float(other["busy"]) / float(row["busy"])
    return found


def steps_up(rows: dict[tuple[str, ...], dict[str, str]], what: str) -> dict[tuple[str, ...], float]:
    """Return the time of each size relative to the previous one, its growth in work and :data:`GROWTH`."""
    found: dict[tuple[str, ...], float] = {}
    for before, after in itertools.pairwise(SIZES):
        for key, row in rows.items():
            smaller = rows.get((key[0], str(before), *key[2:]))
            if key[5] == what and key[1] == str(after) and smaller is not None:
                allowed = GROWTH * float(smaller["busy"]) * (after / before) ** 2
                found[key[:5]] = float(row["busy"]) / allowed
    return found


def summary(rows: dict[tuple[str, ...], dict[str, str]]) -> Iterator[str]:
    """Yield a comparison with the goals, worst cases first."""
    for what, peer in PEERS:
        against = ratios(rows, what, peer)
        if against:
            faster = sum(value > 1.0 for value in against.values()) / len(against)
            below = sum(value < LEAST for value in against.values())
            yield f"{what}: {len(against)} cases, {faster:.1%} faster than {peer}, {below} below {LEAST} of its speed"
            worst = sorted(against.items(), key=lambda entry: entry[1])[:16]
            yield "  " + "; ".join(f"{' '.join(key)}: {value:.2f}" for key, value in worst if value < 1.1)
    for what in dict.fromkeys(what for what, _ in PEERS):
        growth = steps_up(rows, what)
        over = sorted(((value, key) for key, value in growth.items() if value > 1.0), reverse=True)
        yield f"{what}: {len(over)} of {len(growth)} steps to the next size cost more than allowed"
        yield "  " + "; ".join(f"{' '.join(key)}: {value:.2f}" for value, key in over)


def draw(rows: dict[tuple[str, ...], dict[str, str]]) -> None:
    """Draw maps of the ratios: sizes across, batches down."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional dependency

    figure = Figure(figsize=(18, 6), layout="constrained")
    axes = figure.subplots(2, 2)
    for column, (what, peer) in enumerate(PEERS[:2]):
        found = ratios(rows, what, peer)
        batches = [(shape, p) for shape in SHAPES for p in ("0.0", "0.02")]
        batches = [b for b in batches if sum((*k[2:4], k[4]) == (*b[0].split("x"), b[1]) for k in found) >= len(SIZES)]
        for row, cell in enumerate(("lstm", "gru")):
            grid = [[found.get((cell, str(h), *shape.split("x"), p)) for h in SIZES] for shape, p in batches]
            draw_map(axes[row][column], grid, [f"{shape}, {'1/50' if p != '0.0' else 'none'}" for shape, p in batches])
            axes[row][column].set_title(f"{cell.upper()}, {what}: times as fast as {peer}", fontsize=9)
    figure.supxlabel("hidden units; batch (rows x steps) and resets per step; cuDNN without resets", fontsize=8)
    figure.savefig(FIGURE, dpi=60)


def draw_map(axes: Any, grid: list[list[float | None]], labels: list[str]) -> None:
    """Draw one map, from half as fast (red) to four times as fast (green)."""
    values = [[float("nan") if value is None else min(max(value, 0.25), 4.0) for value in line] for line in grid]
    axes.imshow(values, cmap="RdYlGn", norm="log", vmin=0.25, vmax=4.0, aspect="auto")
    for row, line in enumerate(grid):
        for column, value in enumerate(line):
            if value is not None:
                text = f"{value:.1f}" if value > 2.0 else f"{value:.2f}"
                axes.text(column, row, text, ha="center", va="center", fontsize=7)
    axes.set_xticks(range(len(SIZES)), list(map(str, SIZES)), fontsize=7)
    axes.set_yticks(range(len(labels)), labels, fontsize=7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="*", default=["tf32", "cudnn"], choices=NAMES)
    parser.add_argument("--families", action="store_true", help="time every family of kernels that fits")
    parser.add_argument("--cells", nargs="*", default=["lstm", "gru"])
    parser.add_argument("--sizes", nargs="*", type=int, default=SIZES)
    parser.add_argument("--shapes", nargs="*", default=SHAPES)
    parser.add_argument("--resets", nargs="*", type=float, default=[0.0, 0.02])
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="", help="what to write into the column 'commit'")
    parser.add_argument("--seconds", type=float, default=1e9, help="when to stop")
    parser.add_argument("--jobs", type=int, default=0, help="compile first, in this many processes")
    parser.add_argument("--part", type=int, nargs=2, help="K N: time nothing, compile for every N-th case from K")
    parser.add_argument("--draw", action="store_true", help="time nothing: verdicts and figure from the CSV")
    arguments = parser.parse_args()
    if arguments.part:
        compiled(arguments)
        return
    if not arguments.draw:
        versions = {"commit": arguments.commit, "device": torch.cuda.get_device_name()}
        versions |= {package: importlib.metadata.version(package) for package in ("torch", "triton")}
        if arguments.jobs:
            compile_all(arguments.jobs)
        sweep(arguments, versions)
    rows = latest(table_of(arguments.csv))
    print(*summary(rows), sep="\n", flush=True)
    if arguments.draw:
        draw(rows)


if __name__ == "__main__":
    main()

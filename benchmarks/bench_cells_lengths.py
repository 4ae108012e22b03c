"""Length of memory that each cell learns: RepeatPrevious with k up to 512, T-mazes of up to 1,000 steps.

Appends to results/cells_lengths.csv and draws docs/cells_lengths.png. Every row is one run of the ``recurl train``
command in its ``command`` column, in a separate process with environments and networks on the device, until the mean
return of the last 20 training episodes is 0.95, the steps are used up or the limit is reached. Each row of a batch
contains at least one whole episode and is learned from as one sequence, so gradients reach back over the whole memory.
Runs of 10 million steps are ordered so that an interrupted benchmark covers every cell at some lengths; runs that are
already in the table are skipped. Usage::

    nvidia-cuda-mps-control -d                                         # jobs share the GPU concurrently
    python benchmarks/bench_cells_lengths.py --device cuda --jobs 8    # every task and cell, one seed
    python benchmarks/bench_cells_lengths.py --device cuda --jobs 8 --seeds 1 2 --tasks tmaze-100 repeat-previous-32
    python benchmarks/bench_cells_lengths.py --device cpu --tasks repeat-previous-4 --cells lru --csv /tmp/lengths.csv
    python benchmarks/bench_cells_lengths.py --show                    # the table, and the figure
"""

from __future__ import annotations

import argparse
import csv
import math
import shlex
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from threading import Lock

from matplotlib.figure import Figure

from bench_learning import machine, train
from recurl.experiments.bench_rnn import device_name
from recurl.trainers import RunFolder
from results_file import append

RESULTS = Path(__file__).parent / "results" / "cells_lengths.csv"
PICTURE = Path(__file__).parents[1] / "docs" / "cells_lengths.png"
SOLVED = 0.95
FAMILIES = {"repeat-previous": ("RepeatPrevious", "k", 0.25), "tmaze": ("T-maze", "corridor", 0.5)}
"""Title, name of the length, best return without memory."""
TASKS = [
    *("repeat-previous-16", "tmaze-100", "repeat-previous-64", "tmaze-500", "repeat-previous-4", "tmaze-20"),
    *("repeat-previous-256", "tmaze-1000", "repeat-previous-512"),
]
# minGRU's gates depend only on the current input, so it has its convolution. LRU's moduli start in 0 to 1, or near 1.
CELLS = ["gru", "lstm", "mingru(conv_width=4)", "lru", "s5", "ffm", "lru(min_radius=0.9)"]
_writing = Lock()
Row = dict[str, str]


def main() -> None:
    """Run the combinations that are not in the table yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=TASKS, help="repeat-previous-K and tmaze-CORRIDOR")
    parser.add_argument("--cells", nargs="+", default=CELLS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--more", default="", help="additional options for every run, such as '--compile'")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after which a run is stopped")
    parser.add_argument("--csv", type=Path, default=RESULTS, help="the table")
    parser.add_argument("--out", type=Path, default=PICTURE, help="the figure")
    parser.add_argument("--show", action="store_true", help="only show the table and draw the figure")
    chosen = parser.parse_args()
    if not chosen.show:
        known = {row["command"] for row in rows(chosen.csv)}
        jobs = [
            (task, cell, seed, text)
            for seed, task, cell in product(chosen.seeds, chosen.tasks, chosen.cells)
            if (text := command(task, cell, seed, chosen.device, chosen.more)) not in known
        ]
        print(f"{len(jobs)} runs", flush=True)
        hardware = machine() | {"device": device_name(chosen.device)}
        with ThreadPoolExecutor(chosen.jobs) as pool:
            list(pool.map(lambda job: run(*job, hardware, chosen.limit, chosen.csv), jobs))
    show(rows(chosen.csv), chosen.out)


def rows(path: Path) -> list[Row]:
    """Return the rows of a table; none if the file is missing."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def command(task: str, cell: str, seed: int, device: str, more: str) -> str:
    """Return the command of a run."""
    family, length = split(task)
    if family == "tmaze":  # a row contains a whole episode of corridor + 1 steps, wherever it begins
        steps = max(64, 2 ** math.ceil(math.log2(2 * length + 2)))
        options = f"--env recurl/TMaze-v0 --env-kwargs corridor_length={length} --gamma 0.5"
    else:  # an episode is a row
        steps = max(64, 2 * length)
        options = f"--env recurl/RepeatPrevious-v0 --env-kwargs k={length} episode_length={steps} --gamma 0.3"
    options += f" --learning-rate 3e-3 --num-envs {512 if steps <= 128 else 128} --minibatches 8"
    options += f" --rollout-steps {steps} --sequence-length {steps}"
    options += f" --hidden-size 128 --total-steps 10000000 --stop-return {SOLVED} --device {device}"
    options += f" --vectorization device --no-compile --shared-trunk {more}".rstrip()
    return f"recurl train ppo {options} --cell '{cell}' --seed {seed}"


def split(task: str) -> tuple[str, int]:
    """Return the family of a task and its length."""
    family, _, length = task.rpartition("-")
    if family not in FAMILIES or not length.isdecimal():
        sys.exit(f"A task is {' or '.join(f'{name}-{words[1].upper()}' for name, words in FAMILIES.items())}: {task!r}")
    return family, int(length)


def run(task: str, cell: str, seed: int, text: str, hardware: dict[str, object], limit: float, table: Path) -> None:
    """Train, measure and write a row; report and skip a run that fails."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name) / "run")
        aside = ["--eval-episodes", "1", "--eval-max-steps", "1", "--logger", "none", "--run-dir", str(folder.path)]
        try:
            train([sys.executable, "-m", *shlex.split(text), *aside], limit)
            metrics = rows(folder.metrics)
            if not metrics:
                raise RuntimeError(f"It made no update within {limit:g} s.")
        except RuntimeError as error:
            print(f"FAILED {text}\n{str(error)[-500:]}", flush=True)
            return
    full = [row for row in metrics if int(row["episodes"]) >= 20]
    first = next((row for row in full if float(row["return_mean_20"]) >= SOLVED), None)
    row = {"date": time.strftime("%Y-%m-%d"), **hardware, "task": task, "cell": cell, "seed": seed, "command": text}
    row["steps_to_solve"] = first["env_steps"] if first else ""
    row["steps"] = metrics[-1]["env_steps"]
    row["best_return_mean_20"] = f"{max(float(row['return_mean_20']) for row in full):.4g}" if full else ""
    row["train_s"] = metrics[-1]["wall_s"]
    row["wall_s"] = f"{time.perf_counter() - begin:.1f}"
    with _writing:
        append(table, row)
        print(*(f"{key}={row[key]}" for key in ("task", "cell", "seed", *list(row)[-5:])), flush=True)


def show(table: list[Row], picture: Path) -> None:
    """Print, for each task and cell, the number of seeds that solved it and their median steps; draw the figure."""
    points: dict[tuple[str, str], dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in table:
        family, length = split(row["task"])
        points[family, row["cell"]][length].append(row)
    for (family, cell), lengths in sorted(points.items()):
        for length, runs in sorted(lengths.items()):
            steps = steps_to_solve(runs)
            when = f"median {statistics.median(steps):,.0f} steps" if steps else ""
            best = f"{len(steps)} of {len(runs)} solved  best {best_return(runs):6.3g}  {when}"
            print(f"{family}-{length:<5} {cell:22} {best}")
    if points:
        draw(points, picture)


def steps_to_solve(runs: list[Row]) -> list[int]:
    """Return the steps of the runs that solved their task."""
    return [int(row["steps_to_solve"]) for row in runs if row["steps_to_solve"]]


def best_return(runs: list[Row]) -> float:
    """Return the median over seeds of the best return."""
    return statistics.median(float(row["best_return_mean_20"] or "nan") for row in runs)


def shown(runs: list[Row]) -> float:
    """Return the best return, at least 0: in a long T-maze, penalties for hitting walls exceed the reward."""
    return max(0.0, best_return(runs))


def draw(points: dict[tuple[str, str], dict[int, list[Row]]], picture: Path) -> None:
    """Draw the best return and the steps to 0.95 over the length of memory: one line per cell, filled if solved."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    families = [family for family in FAMILIES if any(family == key for key, _ in points)]
    panels = figure.subplots(2, len(families), sharex="col", sharey="row", squeeze=False)
    colors = {cell: f"C{index}" for index, cell in enumerate(sorted({cell for _, cell in points}))}
    for column, family in enumerate(families):
        title, name, without = FAMILIES[family]
        returns, steps = panels[:, column]
        returns.axhline(without, color="#9e9e9e", linestyle=":", label="without memory")
        for cell, color in colors.items():
            lines = sorted(points.get((family, cell), {}).items())
            returns.plot([x for x, _ in lines], [shown(runs) for _, runs in lines], color=color, label=cell)
            for x, runs in lines:
                face = color if len(steps_to_solve(runs)) == len(runs) else "white"
                returns.plot(x, shown(runs), "o", color=color, markerfacecolor=face)
            solved = [(x, of) for x, runs in lines if len(of := steps_to_solve(runs)) == len(runs)]
            steps.plot([x for x, _ in solved], [statistics.median(of) / 1e6 for _, of in solved], "o-", color=color)
        ticks = sorted({length for key, lengths in points.items() if key[0] == family for length in lengths})
        returns.set(title=title, ylim=(-0.03, 1.03))
        steps.set_xscale("log", base=2)
        steps.set(yscale="log", ylim=(0.03, 12))
        steps.yaxis.set_major_formatter("{x:g}")
        steps.set_xticks(ticks, [str(length) for length in ticks])
        steps.set(xlabel=f"{name}, the steps to remember for")
        for axes in (returns, steps):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(visible=True, axis="y", alpha=0.3)
    panels[0, 0].set_ylabel("best return, mean of 20 episodes")
    panels[1, 0].set_ylabel(f"million steps to {SOLVED}")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    main()

"""Returns and steps to learn for each cell (for the length of memory see bench_cells_lengths.py).

Appends to results/cells_learning.csv. Every row is one run of the ``recurl train`` command in its ``command`` column,
with one process and one thread, until the mean return of the last 20 training episodes counts as solved or the steps
are used up, followed by greedy episodes. Runs that are already in the table are skipped. Usage::

    python benchmarks/bench_cells_learning.py --jobs 16                          # both tasks, every cell, three seeds
    python benchmarks/bench_cells_learning.py --cells lstm s5 --seeds 0 --more "--num-layers 2"
    python benchmarks/bench_cells_learning.py --show                             # the table
"""

from __future__ import annotations

import argparse
import csv
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from threading import Lock

from bench_learning import machine
from recurl.recurrence import CELLS
from recurl.trainers import RunFolder, evaluate_run
from results_file import append

RESULTS = Path(__file__).parent / "results" / "cells_learning.csv"
GREEDY = 200  # episodes
# In one layer, gates that depend only on the current input can't measure age: these cells have their convolution.
CONVOLVED = ("mingru", "minlstm", "rglru")
CELL_TEXTS = [f"{name}(conv_width=4)" if name in CONVOLVED else name for name in CELLS]
_writing = Lock()


@dataclass(frozen=True)
class Task:
    """A task."""

    name: str
    options: str
    solved: float
    steps: int


TASKS = {
    task.name: task
    for task in (
        Task("masked-cartpole", "--env recurl/MaskedCartPole-v1", 475.0, 150_000),
        Task(
            "repeat-previous-4",
            "--env recurl/RepeatPrevious-v0 --env-kwargs k=4 episode_length=64 --gamma 0.3 --learning-rate 3e-3 "
            "--rollout-steps 128 --sequence-length 32",
            0.95,
            200_000,
        ),
    )
}


def main() -> None:
    """Run the combinations that are not in the table yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--cells", nargs="+", default=CELL_TEXTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--more", default="", help="additional options for every run")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--show", action="store_true", help="only show the table")
    chosen = parser.parse_args()
    if not chosen.show:
        jobs = [(TASKS[name], cell, seed) for seed, name, cell in product(chosen.seeds, chosen.tasks, chosen.cells)]
        known = {row["command"] for row in rows()}
        jobs = [job for job in jobs if command(*job, chosen.more) not in known]
        print(f"{len(jobs)} runs", flush=True)
        with ThreadPoolExecutor(chosen.jobs) as pool:
            list(pool.map(lambda job: run(*job, chosen.more), jobs))
    show()


def rows() -> list[dict[str, str]]:
    """Return the rows of the table."""
    if not RESULTS.exists():
        return []
    with RESULTS.open(newline="") as file:
        return list(csv.DictReader(file))


def command(task: Task, cell: str, seed: int, more: str) -> str:
    """Return the command of a run."""
    options = f"{task.options} --total-steps {task.steps} --stop-return {task.solved} {more}".strip()
    return f"recurl train ppo {options} --threads 1 --cell '{cell}' --seed {seed}"


def run(task: Task, cell: str, seed: int, more: str) -> None:
    """Train, measure and write a row; report and skip a run that fails."""
    text = command(task, cell, seed, more)
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name) / "run")
        words = [sys.executable, "-m", *shlex.split(text), "--eval-episodes", "1", "--run-dir", str(folder.path)]
        done = subprocess.run(words, check=False, capture_output=True, text=True)
        if done.returncode:
            print(f"FAILED {text}\n{done.stderr[-500:]}", flush=True)
            return
        row = {"date": time.strftime("%Y-%m-%d"), **machine(), "task": task.name, "cell": cell}
        row |= {"seed": seed, "command": text, **measured(folder, task.solved)}
    with _writing:
        append(RESULTS, row)
        print(f"{task.name} {cell} seed {seed}: {row['steps_to_solve'] or 'not solved'}", flush=True)


def measured(folder: RunFolder, solved: float) -> dict[str, object]:
    """Return the results of a run."""
    with folder.metrics.open(newline="") as file:
        metrics = [row for row in csv.DictReader(file) if int(row["episodes"]) >= 20]
    first = next((row for row in metrics if float(row["return_mean_20"]) >= solved), None)
    returns = [float(row["return_mean_20"]) for row in metrics]
    return {
        "solved_at": solved,
        "steps_to_solve": first["env_steps"] if first else "",
        "steps": metrics[-1]["env_steps"] if metrics else 0,
        "cpu_s": metrics[-1]["cpu_s"] if metrics else "",
        "best_return_mean_20": f"{max(returns):.4g}" if returns else "",
        "greedy_return": f"{evaluate_run(folder, episodes=GREEDY).mean_return:.4g}",
    }


def show() -> None:
    """Print, for each task and cell, the number of seeds that solved it and their median steps."""
    table: dict[str, dict[str, list[dict[str, str]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows():
        table[row["task"]][row["cell"]].append(row)
    for task, cells in table.items():
        for cell, runs in cells.items():
            steps = [int(row["steps_to_solve"]) for row in runs if row["steps_to_solve"]]
            when = f"median {statistics.median(steps):,.0f} steps" if steps else ""
            best = statistics.median(float(row["best_return_mean_20"] or "nan") for row in runs)
            print(f"{task:22} {cell:22} {len(steps)} of {len(runs)} solved  best {best:.3g}  {when}")


if __name__ == "__main__":
    main()

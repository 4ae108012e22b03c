"""Learning of memory tasks, with and without memory: trains the tasks and appends to results/learning.csv.

Every row is one run of the ``recurl train`` command in its ``command`` column, in a separate process, followed by 1,000
new greedy episodes. Usage::

    python benchmarks/bench_learning.py                  # everything, hours of CPU time
    python benchmarks/bench_learning.py --only tmaze     # the experiments whose name contains a word
    python benchmarks/bench_learning.py --seeds 0 1      # fewer or other seeds
    python benchmarks/bench_learning.py --only sac td3 --jobs 16 --limit 1500  # 16 at once, each at most 25 minutes

A run that reaches the limit is stopped and evaluated in its current state; its steps are in the row. Runs of this
commit that are already in the file are skipped.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import tensordict
import torch

import recurl
from recurl.envs.tasks import TASKS
from recurl.trainers import RunFolder, evaluate_run
from results_file import append, commit

RESULTS = Path(__file__).parent / "results" / "learning.csv"
REPEAT = "--gamma 0.3 --learning-rate 3e-3"


@dataclass(frozen=True)
class Experiment:
    """One command, run with several cells and seeds."""

    name: str
    options: str
    cells: tuple[str, ...]
    seeds: tuple[int, ...]
    solved: float
    """Mean return of the last 20 training episodes (reduced by exploration) that counts as solved."""
    algorithm: str = "ppo"
    """Algorithm of ``recurl train``."""


EXPERIMENTS = (
    Experiment(
        "masked-cartpole",
        "--env recurl/MaskedCartPole-v1 --total-steps 150000",
        ("lstm", "gru", "none"),
        (0, 1, 2, 3, 4),
        475.0,
    ),
    Experiment(
        "repeat-previous-4",
        f"--env recurl/RepeatPrevious-v0 --total-steps 200000 {REPEAT}",
        ("lstm", "gru", "none"),
        (0, 1, 2),
        0.95,
    ),
    Experiment(
        "tmaze-20",
        "--env recurl/TMaze-v0 --total-steps 150000",
        ("lstm", "gru", "none"),
        (0, 1, 2),
        0.95,
    ),
    Experiment(
        "repeat-previous-8",
        "--env recurl/RepeatPrevious-v0 --env-kwargs k=8 --total-steps 400000 --sequence-length 64 "
        f"--hidden-size 128 {REPEAT}",
        ("lstm", "gru"),
        (0,),
        0.95,
    ),
    Experiment(
        "tmaze-50",
        "--env recurl/TMaze-v0 --env-kwargs corridor_length=50 --total-steps 300000",
        ("lstm", "gru"),
        (0,),
        0.95,
    ),
    Experiment(
        "masked-pendulum",
        "--env recurl/MaskedPendulum-v1 --total-steps 500000 --num-envs 16 --gamma 0.9 --epochs 10 "
        "--sequence-length 64",
        ("lstm", "gru"),
        (0, 1, 2),
        -200.0,
    ),
    *(
        Experiment(
            f"masked-pendulum-{algorithm}",
            "--env recurl/MaskedPendulum-v1 --total-steps 60000",
            ("lstm", "gru", "none"),
            (0, 1, 2, 3, 4),
            -200.0,
            algorithm,
        )
        for algorithm in ("sac", "td3")
    ),
    *(
        Experiment(
            f"masked-cartpole-{algorithm}",
            f"--env recurl/MaskedCartPole-v1 --total-steps {steps}",
            ("lstm", "gru", "none"),
            (0, 1, 2, 3, 4),
            475.0,
            algorithm,
        )
        for algorithm, steps in (("sac", 100_000), ("dqn", 80_000), ("r2d2", 80_000))
    ),
    *(
        Experiment(f"{name}-{algorithm}", options, ("gru", "lstm"), (0, 1, 2), solved, algorithm)
        for algorithm in ("r2d2", "sac")
        for name, options, solved in (
            # Slices of whole episodes: 50 steps along the corridor, and as many wasted ones.
            (
                "tmaze-50",
                "--env recurl/TMaze-v0 --env-kwargs corridor_length=50 --total-steps 300000 --slice-length 204",
                0.9,
            ),
            (
                "repeat-previous-16",
                "--env recurl/RepeatPrevious-v0 --env-kwargs k=16 --total-steps 600000 --slice-length 64 "
                f"--hidden-size 128 {REPEAT}",
                0.9,
            ),
        )
    ),
    *(
        Experiment(
            f"half-cheetah-positions-{algorithm}",
            "--env HalfCheetah-v5 --wrapper positions_only:PositionsOnly --total-steps 100000 --hidden-size 128",
            ("gru",),
            (0, 1, 2),
            3000.0,
            algorithm,
        )
        for algorithm in ("sac", "td3", "ppo")
    ),
    *(
        Experiment(f"{name}-{algorithm}", options, ("lstm", "gru", "none"), (0, 1, 2, 3, 4), solved, algorithm)
        for algorithm in ("a2c", "impala")
        for name, options, solved in (
            ("masked-cartpole", "--env recurl/MaskedCartPole-v1", 475.0),
            ("tmaze-20", "--env recurl/TMaze-v0 --entropy-coeff 0.01 --rollout-steps 32", 0.95),
        )
    ),
    *(
        Experiment(f"{name}-{algorithm}", options, ("lstm", "gru", "none"), (0, 1, 2), 0.9, algorithm)
        for name, algorithm, options in (
            ("repeat-previous-4", "dqn", f"--env recurl/RepeatPrevious-v0 --total-steps 120000 {REPEAT}"),
            ("repeat-previous-4", "r2d2", f"--env recurl/RepeatPrevious-v0 --total-steps 120000 {REPEAT}"),
            ("tmaze-20", "dqn", "--env recurl/TMaze-v0 --total-steps 80000"),
            # Slices of whole episodes: shorter slices would mostly be drawn from long, unsuccessful episodes.
            ("tmaze-20", "r2d2", "--env recurl/TMaze-v0 --total-steps 80000 --slice-length 84"),
        )
    ),
)


def main() -> None:
    """Run the chosen experiments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="experiments whose name contains one of these")
    parser.add_argument("--cells", nargs="+", help="instead of each experiment's own")
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of each experiment's own")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, one thread each")
    parser.add_argument("--limit", type=float, default=None, help="seconds after which a run is stopped")
    parser.add_argument("--tested", action="store_true", help="skip the tests, which have passed already")
    chosen = parser.parse_args()
    if not chosen.tested:
        check_tests()
    known = measured_commands()
    runs = [
        (experiment, cell, seed)
        for experiment in EXPERIMENTS
        if any(word in experiment.name for word in chosen.only)
        for seed, cell in itertools.product(chosen.seeds or experiment.seeds, chosen.cells or experiment.cells)
        if shown_command(experiment, cell, seed) not in known
    ]
    with ProcessPoolExecutor(chosen.jobs, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(run, *one, chosen.limit): one for one in runs}
        failed = [shown_command(*running[ended]) for ended in as_completed(running) if not reported(ended)]
    if failed:
        sys.exit(f"These failed: {'; '.join(failed)}")


def measured_commands() -> set[str]:
    """Return the commands whose results of this commit exist."""
    if not RESULTS.exists():
        return set()
    present = commit()
    with RESULTS.open(newline="") as file:
        return {row["command"] for row in csv.DictReader(file) if row["commit"] == present}


def shown_command(experiment: Experiment, cell: str, seed: int) -> str:
    """Return the command of a run."""
    return f"recurl train {experiment.algorithm} {experiment.options} --cell {cell} --seed {seed}"


def check_tests() -> None:
    """Exit if the tests fail."""
    tests = Path(__file__).parents[1] / "tests" / "trainers"
    if subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", str(tests)], check=False).returncode:
        sys.exit("The tests of the trainers fail: no numbers before they pass.")


def run(experiment: Experiment, cell: str, seed: int, limit: float | None) -> dict[str, object]:
    """Train one combination of cell and seed, and measure it."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name) / "run")
        shown = shown_command(experiment, cell, seed)
        command = [sys.executable, "-m", *shlex.split(shown)]
        train([*command, "--eval-episodes", "1", "--logger", "none", "--run-dir", str(folder.path)], limit)
        return {
            "date": time.strftime("%Y-%m-%d"),
            **machine(),
            "task": experiment.name,
            "command": shown,
            "cell": cell,
            "seed": seed,
            **measured(folder, experiment.solved),
        }


def train(command: list[str], limit: float | None) -> None:
    """Run a command, which may import modules from this folder; interrupt it after ``limit`` seconds."""
    process = subprocess.Popen(
        command,
        cwd=Path(__file__).parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # it saves a checkpoint and ends
        process.communicate()
        return
    if process.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed: {errors}")


def machine() -> dict[str, object]:
    """Return the factors other than the options that results depend on."""
    return {
        "commit": commit(),
        "device": f"{platform.machine()} CPU",
        "recurl": recurl.__version__,
        "torch": torch.__version__,
        "tensordict": tensordict.__version__,
    }


def measured(folder: RunFolder, solved: float) -> dict[str, object]:
    """Return the results: training until solved, and the greedy return of the final policy."""
    with folder.metrics.open(newline="") as file:
        rows = list(csv.DictReader(file))
    returns = [float(row["return_mean_20"]) for row in rows if int(row["episodes"]) >= 20]
    first = next((row for row in rows if int(row["episodes"]) >= 20 and float(row["return_mean_20"]) >= solved), None)
    config = folder.read_config()
    task = TASKS.get(config.env_name)
    return {
        "solved_at": solved,
        "steps_to_solve": first["env_steps"] if first else "",
        "cpu_s_to_solve": first["cpu_s"] if first else "",
        "steps": rows[-1]["env_steps"],
        "cpu_s": rows[-1]["cpu_s"],
        "wall_s": rows[-1]["wall_s"],
        "best_return_mean_20": f"{max(returns, default=math.nan):.4g}",
        "final_return_mean_20": f"{float(rows[-1]['return_mean_20']):.4g}",
        "greedy_return_1000": f"{evaluate_run(folder, episodes=1000 if task else 20).mean_return:.4g}",
        "optimal": "" if task is None else task.optimal_return(**config.env_arguments),
        "memoryless_bound": "" if task is None else task.memoryless_return(**config.env_arguments),
    }


def reported(ended: Future[dict[str, object]]) -> bool:
    """Add the row of a run to the results and print it; return False if the run failed."""
    error = ended.exception()
    if error is not None:
        print("".join(traceback.format_exception(error)), flush=True)
        return False
    append(RESULTS, ended.result())
    print(json.dumps(ended.result()), flush=True)
    return True


if __name__ == "__main__":
    main()

"""Does memory get learnt, how fast, and does it fail without: trains the tasks and appends to results/learning.csv.

Every row is one run of the ``recurl train`` command that its ``command`` column holds, in a process of its own,
then 1,000 fresh greedy episodes. Usage::

    python benchmarks/bench_learning.py                  # everything, about half an hour of CPU time
    python benchmarks/bench_learning.py --only tmaze     # the experiments whose name contains a word
    python benchmarks/bench_learning.py --seeds 0 1      # fewer or other seeds
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
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
    """One command, to be run with several cells and seeds."""

    name: str
    options: str
    cells: tuple[str, ...]
    seeds: tuple[int, ...]
    solved: float
    """Mean return of the last 20 training episodes (of which exploration costs a part) that counts as solved."""
    algorithm: str = "ppo"
    """What ``recurl train`` is to run."""


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
            # Slices of whole episodes: with shorter ones, long walks have many more places to start than good ones.
            ("tmaze-20", "r2d2", "--env recurl/TMaze-v0 --total-steps 80000 --slice-length 84"),
        )
    ),
)


def main() -> None:
    """Run the chosen experiments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="experiments whose name contains this")
    parser.add_argument("--cells", nargs="+", help="instead of each experiment's own")
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of each experiment's own")
    chosen = parser.parse_args()
    check_tests()
    for experiment in EXPERIMENTS:
        if chosen.only in experiment.name:
            for row in run(experiment, chosen.cells or experiment.cells, chosen.seeds or experiment.seeds):
                report(row)


def check_tests() -> None:
    """Refuse to measure what is broken."""
    tests = Path(__file__).parents[1] / "tests" / "trainers"
    if subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", str(tests)], check=False).returncode:
        sys.exit("The tests of the trainers fail: no numbers before they pass.")


def run(experiment: Experiment, cells: tuple[str, ...], seeds: tuple[int, ...]) -> Iterator[dict[str, object]]:
    """Train and measure every combination of cell and seed."""
    for cell in cells:
        for seed in seeds:
            with tempfile.TemporaryDirectory() as name:
                folder = RunFolder(Path(name) / "run")
                options = f"{experiment.options} --cell {cell} --seed {seed}"
                command = [sys.executable, "-m", "recurl", "train", experiment.algorithm, *shlex.split(options)]
                subprocess.run(
                    [*command, "--eval-episodes", "1", "--run-dir", str(folder.path)], check=True, capture_output=True
                )
                yield {
                    "date": time.strftime("%Y-%m-%d"),
                    **machine(),
                    "task": experiment.name,
                    "command": f"recurl train {experiment.algorithm} {options}",
                    "cell": cell,
                    "seed": seed,
                    **measured(folder, experiment.solved),
                }


def machine() -> dict[str, object]:
    """What the numbers depend on besides the options."""
    return {
        "commit": commit(),
        "device": f"{platform.machine()} CPU",
        "recurl": recurl.__version__,
        "torch": torch.__version__,
        "tensordict": tensordict.__version__,
    }


def measured(folder: RunFolder, solved: float) -> dict[str, object]:
    """What came out: training until solved, and the greedy return of the final policy."""
    with folder.metrics.open(newline="") as file:
        rows = list(csv.DictReader(file))
    first = next((row for row in rows if int(row["episodes"]) >= 20 and float(row["return_mean_20"]) >= solved), None)
    config = folder.read_config()
    task = TASKS[config.env]
    return {
        "solved_at": solved,
        "steps_to_solve": first["env_steps"] if first else "",
        "cpu_s_to_solve": first["cpu_s"] if first else "",
        "steps": rows[-1]["env_steps"],
        "cpu_s": rows[-1]["cpu_s"],
        "wall_s": rows[-1]["wall_s"],
        "best_return_mean_20": f"{max(float(row['return_mean_20']) for row in rows if int(row['episodes']) >= 20):.4g}",
        "final_return_mean_20": f"{float(rows[-1]['return_mean_20']):.4g}",
        "greedy_return_1000": f"{evaluate_run(folder, episodes=1000).mean_return:.4g}",
        "optimal": task.optimal_return(**config.env_arguments),
        "memoryless_bound": task.memoryless_return(**config.env_arguments),
    }


def report(row: dict[str, object]) -> None:
    """Add a row to the results and show it."""
    append(RESULTS, row)
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

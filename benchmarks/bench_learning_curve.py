"""Learning curves for the landing page: masked CartPole with and without memory.

Writes results/learning_curve.csv: for every run, the mean return of the last 20 training episodes, every eighth update.
Usage: ``python benchmarks/bench_learning_curve.py`` (about three minutes of CPU time), then ``benchmarks/plots.py``.
"""

from __future__ import annotations

import csv
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_learning import check_tests, machine
from recurl.trainers import RunFolder

RESULTS = Path(__file__).parent / "results" / "learning_curve.csv"
COMMAND = "train ppo --env recurl/MaskedCartPole-v1 --total-steps 150000"
CELLS = ("lstm", "gru", "none")
SEEDS = (0, 1, 2)
EVERY = 8


def main() -> None:
    """Train every cell with every seed and replace the results."""
    check_tests()
    rows = [
        row for cell in CELLS for seed in SEEDS for row in train(f"{COMMAND} --cell {cell} --seed {seed}", cell, seed)
    ]
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def train(command: str, cell: str, seed: int) -> list[dict[str, object]]:
    """Return the curve of one run."""
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name) / "run")
        words = [
            sys.executable,
            "-m",
            "recurl",
            *command.split(),
            "--eval-episodes",
            "1",
            "--run-dir",
            str(folder.path),
        ]
        subprocess.run(words, check=True, capture_output=True)
        with folder.metrics.open(newline="") as file:
            updates = list(csv.DictReader(file))[::EVERY]
    about = {"date": time.strftime("%Y-%m-%d"), **machine(), "command": f"recurl {command}", "cell": cell, "seed": seed}
    return [{**about, "env_steps": row["env_steps"], "return_mean_20": row["return_mean_20"]} for row in updates]


if __name__ == "__main__":
    main()

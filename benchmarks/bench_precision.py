"""Learning curves of recurrent PPO on a GPU with ``--matmul-precision highest`` (float32) and ``high`` (tf32).

Appends every eighth update's mean training return to results/precision.csv. Usage::

    python benchmarks/bench_precision.py --jobs 3  # three runs at once
    python benchmarks/bench_precision.py --device cpu --seeds 0 --total-steps 100000  # a dry run
"""

from __future__ import annotations

import argparse
import csv
import itertools
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from recurl import __version__
from recurl.trainers import RunFolder
from results_file import append, commit

RESULTS = Path(__file__).parent / "results" / "precision.csv"
EVERY = 8
COMMON = "--num-envs 512 --rollout-steps 64 --sequence-length 64 --vectorization device --no-cuda-graph --no-compile"
COMMON += " --logger none --eval-episodes 1"
TASKS = {
    "MaskedCartPole": "recurl/MaskedCartPole-v1",
    "MaskedPendulum": "recurl/MaskedPendulum-v1 --gamma 0.9 --epochs 10",
    "RepeatPrevious": "recurl/RepeatPrevious-v0 --hidden-size 128 --gamma 0.3 --learning-rate 3e-3",
}


def main() -> None:
    """Train every task with every precision and seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--total-steps", type=int, default=12_000_000)
    parser.add_argument("--csv", type=Path, default=RESULTS)
    options = parser.parse_args()
    programs = "--compile --cuda-graph" if options.device.startswith("cuda") else ""
    common = f"{COMMON} {programs} --device {options.device} --total-steps {options.total_steps}"
    runs = [
        (task, precision, seed, f"--env {TASKS[task]} {common} --matmul-precision {precision} --seed {seed}")
        for task, precision, seed in itertools.product(options.tasks, ("highest", "high"), options.seeds)
    ]
    name = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    with ThreadPoolExecutor(options.jobs) as pool:
        for (task, precision, seed, command), curve in zip(
            runs, pool.map(curve_of, (run[3] for run in runs)), strict=True
        ):
            last = curve[-1]
            print(f"{task} {precision} {seed}: {last['return_mean_20']} in {last['wall_s']} s", flush=True)
            stamp = {"date": time.strftime("%Y-%m-%d"), "commit": commit(), "device": name, "recurl": __version__}
            for row in (*curve[:-1:EVERY], last):
                chosen = {key: row[key] for key in ("env_steps", "wall_s", "return_mean_20")}
                about = {"torch": torch.__version__, "task": task, "precision": precision, "seed": seed}
                append(options.csv, {**stamp, **about, **chosen, "command": f"recurl train ppo {command}"})


def curve_of(command: str) -> list[dict[str, Any]]:
    """Return the rows that a run has logged, one of each update."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder) / "run")
        words = [sys.executable, "-m", "recurl", "train", "ppo", *command.split(), "--run-dir", str(run.path)]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        with run.metrics.open(newline="") as file:
            return list(csv.DictReader(file))


if __name__ == "__main__":
    main()

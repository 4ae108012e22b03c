"""Whether runs with many environments learn, and keep what they have learned: results/learning_scale.csv.

The first cases train with 4,096 environments; those named after a number of steps train with as many as a run has by
default on a GPU, and those that end in ``-8`` with 8 environments on a CPU. Each run is evaluated greedily ten times on
the way, over 100 episodes. A run *holds* if its last evaluation reaches 0.99 of its best one (for negative returns, if
it is at most 1 % below). ``dips`` counts the updates, after the best training return was first reached, whose mean
return over 20 episodes is more than 2 % below it. The curves, that return at every second update, or at 100 of them,
are appended to results/learning_scale_curves.csv. ``--jobs`` says how many runs start at once; rows are appended in
their order. Usage::

    python benchmarks/bench_learning_scale.py                       # 4,096 environments: 20 runs, on a GPU
    python benchmarks/bench_learning_scale.py --only cartpole-32-shared cartpole-32-lr
    python benchmarks/bench_learning_scale.py --only cartpole-3M cartpole-3M-8 --seeds 0 1
    python benchmarks/bench_learning_scale.py --read FOLDER...      # append run folders, named CASE-SEED
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.metadata
import json
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from results_file import append, commit

RESULTS = Path(__file__).parent / "results" / "learning_scale.csv"
EVERY, POINTS = 2, 100  # updates between the points of a curve, at least; and its points, at most
SCALE = "--num-envs 4096 --hidden-size 128 --total-steps 40000000 --eval-every 4000000"
CARTPOLE = "--env recurl/MaskedCartPole-v1 --rollout-steps"
DEFAULTS = {
    "cartpole-32": f"{CARTPOLE} 32",
    "cartpole-64": f"{CARTPOLE} 64",
    "repeat-previous": "--env recurl/RepeatPrevious-v0 --gamma 0.3 --rollout-steps 64",
    "pendulum": "--preset masked-pendulum --rollout-steps 64",
}
OTHERS = {
    "cartpole-32-shared": f"{CARTPOLE} 32 --shared-trunk",
    "cartpole-64-shared": f"{CARTPOLE} 64 --shared-trunk",
    "cartpole-128-shared": f"{CARTPOLE} 128 --shared-trunk",
    "cartpole-32-eps": f"{CARTPOLE} 32 --shared-trunk --adam-eps 3e-4",
    "cartpole-32-lr": f"{CARTPOLE} 32 --shared-trunk --learning-rate 3e-4",
    "cartpole-32-entropy": f"{CARTPOLE} 32 --shared-trunk --entropy-coeff 0.01",
    "cartpole-32-highest": f"{CARTPOLE} 32 --shared-trunk --matmul-precision highest",
    "cartpole-32-critic": f"{CARTPOLE} 32 --shared-trunk --critic-coeff 5",
    "cartpole-32-fast": f"{CARTPOLE} 32 --learning-rate 3e-3",
}
TASKS = {
    "cartpole": "--env recurl/MaskedCartPole-v1",
    "repeat-previous": "--env recurl/RepeatPrevious-v0 --gamma 0.3",
    "pendulum": "--env recurl/MaskedPendulum-v1 --gamma 0.9 --learning-rate 1e-3 --epochs 10 --sequence-length 64",
}
CHOSEN = {
    f"{task}-{millions}M": f"{words} --total-steps {millions}000000 --eval-every {millions}00000"
    for millions in (10, 3, 1)  # the longest runs first
    for task, words in reversed(TASKS.items())
}
FEW = {f"{case}-8": f"{words} --num-envs 8 --device cpu" for case, words in CHOSEN.items()}
CASES = {case: f"{SCALE} {words}" for case, words in {**DEFAULTS, **OTHERS}.items()} | CHOSEN | FEW


def train(case: str, seed: int, folder: Path, device: str) -> Path:
    """Train a run and return its folder."""
    run = folder / f"{case}-{seed}"
    words = shlex.split(f"train ppo {CASES[case]} --eval-episodes 100 --logger none --seed {seed} --run-dir {run}")
    words += ["--overwrite", *([] if "--device" in words else ["--device", device])]
    with (folder / f"{run.name}.log").open("w") as log:
        subprocess.run([sys.executable, "-m", "recurl", *words], stdout=log, stderr=subprocess.STDOUT, check=True)
    return run


def read(run: Path) -> dict[str, Any]:
    """Return the row of a run."""
    config = json.loads((run / "config.json").read_text())
    with (run / "metrics.csv").open() as file:
        returns = [float(row["return_mean_20"]) for row in csv.DictReader(file)]
    with (run / "evaluations.csv").open() as file:
        evaluations = [(int(row["env_steps"]), float(row["eval_return"])) for row in csv.DictReader(file)]
    best = max(value for value in returns if value == value)  # without NaN
    begin = next(index for index, value in enumerate(returns) if value >= best - 0.002 * abs(best))
    most, last = max(value for _, value in evaluations), evaluations[-1][1]
    return {
        "case": run.name.rpartition("-")[0],
        "seed": config["seed"],
        "shared_trunk": config["shared_trunk"],
        "num_envs": config["num_envs"],
        "env_steps": evaluations[-1][0],
        "updates": len(returns),
        "best_at_update": begin + 1,
        "dips": sum(value < best - 0.02 * abs(best) for value in returns[begin:]),
        "best_greedy": round(most, 2),
        "last_greedy": round(last, 2),
        "holds": last >= most - 0.01 * abs(most),
    }


def curve(run: Path, row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the points of a run's curve."""
    with (run / "metrics.csv").open() as file:
        points = [(int(point["env_steps"]), float(point["return_mean_20"])) for point in csv.DictReader(file)]
    own = {name: row[name] for name in ("case", "seed", "shared_trunk", "num_envs")}
    every = max(EVERY, -(-len(points) // POINTS))
    return [{**own, "env_steps": steps, "return_mean_20": round(value, 2)} for steps, value in points[::every]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(DEFAULTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--jobs", type=int, default=15, help="runs at once")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, default=Path("runs/learning_scale"))
    parser.add_argument("--read", type=Path, nargs="+", default=[], help="append these run folders, without training")
    parser.add_argument("--machine", help="what to write into the column 'device'")
    parser.add_argument("--torch", default=importlib.metadata.version("torch"), help="likewise")
    parser.add_argument("--commit", default=commit(), help="likewise")
    parser.add_argument("--csv", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    machine = options.machine or (torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
    tags = {"device": machine, "commit": options.commit, "torch": options.torch}
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = [(case, seed, options.folder, options.device) for seed in options.seeds for case in options.only]
        ended = options.read or pool.map(lambda run: train(*run), runs)
        for run in ended:
            row = read(run)
            append(options.csv, {"date": datetime.date.today().isoformat(), **row, **tags})
            for point in curve(run, row):
                append(options.csv.with_stem(f"{options.csv.stem}_curves"), point)
            print(*row.values(), flush=True)


if __name__ == "__main__":
    main()

"""Learning results of presets: trains each with several seeds and writes results/presets.csv.

Every row is one run of ``recurl train --preset NAME --seed SEED`` in a separate process with one thread. Runs that are
already in the file are skipped; interrupted runs are resumed. Usage::

    python benchmarks/bench_presets.py --jobs 16 --seeds 3      # all presets whose packages are installed
    python benchmarks/bench_presets.py --only tmaze masked      # those whose name contains one of the words
    python benchmarks/bench_presets.py --list                   # what has been measured, as a table

A preset that isn't in the file doesn't belong in the package: delete it.
"""

from __future__ import annotations

import argparse
import csv
import fcntl
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import fmean

import torch

import recurl
from recurl.core.errors import MissingDependencyError
from recurl.trainers import RunFolder
from recurl.trainers.algorithms.options_file import preset_names, read_preset
from recurl.trainers.report.metrics import EVALUATION, read_metrics

RESULTS = Path(__file__).parent / "results" / "presets.csv"
FIELDS = (
    "date",
    "commit",
    "recurl",
    "torch",
    "preset",
    "seed",
    "env",
    "cell",
    "steps",
    "seconds",
    "cpu_s",
    "train_return",
    "eval_return",
    "best_eval_return",
    "best_steps",
    "curve",
)


def main() -> None:
    """Run the missing measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="presets whose name contains one of these")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each, from 0")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--runs", type=Path, default=Path("runs/presets"), help="folder of the runs")
    parser.add_argument("--list", action="store_true", help="print the results")
    chosen = parser.parse_args()
    if chosen.list:
        print(table())
        return
    names = [name for name in preset_names() if any(word in name for word in chosen.only) and usable(name)]
    done = {(row["preset"], int(row["seed"])) for row in rows()}
    jobs = [job for job in product(range(chosen.seeds), names) if job[::-1] not in done]
    print(f"{len(jobs)} runs of {len(names)} presets", flush=True)
    with ThreadPoolExecutor(chosen.jobs) as pool:
        failed = [job for job in pool.map(lambda job: measure(job[1], job[0], chosen.runs), jobs) if job]
    if failed:
        sys.exit(f"These failed, their output is in {chosen.runs}: {', '.join(failed)}")


def usable(name: str) -> bool:
    """Return whether the packages of a preset are installed."""
    try:
        read_preset(name)
    except MissingDependencyError as error:
        print(f"left out: {error}", flush=True)
        return False
    return True


def measure(name: str, seed: int, place: Path) -> str | None:
    """Train, or resume, and write the row; return the name of the run if it failed."""
    folder = RunFolder(place / f"{name}-seed{seed}")
    place.mkdir(parents=True, exist_ok=True)
    words = ["--preset", name, "--seed", str(seed), "--threads", "1", "--logger", "none", "--overwrite"]
    words += ["--run-dir", str(folder.path)]
    if any(folder.checkpoints.glob("*.pt")):
        words = ["--resume", str(folder.path)]
    with (place / f"{name}-seed{seed}.txt").open("a") as log:
        command = [sys.executable, "-m", "recurl", "train", *words]
        code = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
    if code:
        print(f"failed: {name}, seed {seed}", flush=True)
        return f"{name}-seed{seed}"
    append(measured(name, seed, folder))
    return None


def measured(name: str, seed: int, folder: RunFolder) -> dict[str, object]:
    """Return the results: time, returns, and the curve of evaluations as ``steps:return`` points."""
    config = folder.read_config()
    last = read_metrics(folder.metrics)[1][-1]
    points = [
        (int(row["env_steps"]), float(row[EVALUATION])) for row in read_metrics(folder.evaluations, EVALUATION)[1]
    ]
    best = max(points, key=lambda point: point[1])
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": revision.stdout.strip(),
        "recurl": recurl.__version__,
        "torch": torch.__version__,
        "preset": name,
        "seed": seed,
        "env": " ".join((config.env, *config.env_kwargs)),
        "cell": config.cell,
        "steps": last["env_steps"],
        "seconds": last["wall_s"],
        "cpu_s": last["cpu_s"],
        "train_return": f"{float(last['return_mean_20']):.4g}",
        "eval_return": f"{points[-1][1]:.4g}",
        "best_eval_return": f"{best[1]:.4g}",
        "best_steps": best[0],
        "curve": " ".join(f"{step}:{value:.4g}" for step, value in points),
    }


def append(row: dict[str, object]) -> None:
    """Add a row to the results, possibly concurrently with other processes."""
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a", newline="") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        writer = csv.DictWriter(file, FIELDS)
        if file.tell() == 0:
            writer.writeheader()
        writer.writerow(row)
    print(f"{row['preset']}, seed {row['seed']}: {row['eval_return']} after {row['steps']} steps", flush=True)


def rows() -> list[dict[str, str]]:
    """Return the rows of the results."""
    if not RESULTS.exists():
        return []
    with RESULTS.open(newline="") as file:
        return list(csv.DictReader(file))


def table() -> str:
    """Return a Markdown table of the results, one row per preset."""
    lines = ["| preset | environment | cell | steps | seconds | greedy return, each seed | mean |", "|" + "---|" * 7]
    found = rows()
    for name in sorted({row["preset"] for row in found}):
        own = sorted((row for row in found if row["preset"] == name), key=lambda row: int(row["seed"]))
        returns = [float(row["eval_return"]) for row in own]
        cells = (
            f"`{name}`",
            f"`{own[0]['env']}`",
            own[0]["cell"],
            f"{max(int(row['steps']) for row in own):,}",
            f"{fmean(float(row['seconds']) for row in own):.0f}",
            ", ".join(f"{value:.3g}" for value in returns),
            f"{fmean(returns):.3g}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

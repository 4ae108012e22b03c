"""Learning curves of several agents on VMAS: one policy for all, with a critic of each agent's view or of the state.

IPPO's critic sees what its agent sees; MAPPO's sees the observations of all agents. Policies and critics have memories
(GRU). Appends to results/multi_agent.csv: a row for each tenth of a run, with the mean return of the last 20 training
episodes (of single agents), and in the last one that of greedy episodes. Every run is the ``recurl train`` command in
its ``command`` column, with one thread. Runs that are already in the table are skipped. Usage::

    python benchmarks/bench_multi_agent.py              # two tasks, both critics, three seeds: ten minutes of a CPU
    python benchmarks/bench_multi_agent.py --show       # the table
    python benchmarks/plots.py                          # the figure
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
from importlib.metadata import version
from itertools import product
from pathlib import Path

from bench_learning import machine
from recurl.trainers import RunFolder, evaluate_run
from results_file import append

RESULTS = Path(__file__).parent / "results" / "multi_agent.csv"
GREEDY = 150  # episodes of single agents
POINTS = 10
STEPS = 400_000  # of single agents
TASKS = {
    "balance": "--env vmas/balance --env-kwargs max_steps=100 n_agents=3",
    "navigation": "--env vmas/navigation --env-kwargs max_steps=100 n_agents=3",
}
CRITICS = {"IPPO": "", "MAPPO": " return_state=True --critic-observations state"}
OPTIONS = "--num-envs 96 --rollout-steps 100 --gamma 0.95 --learning-rate 1e-3 --cell gru --threads 1"


def main() -> None:
    """Run the combinations that are not in the table yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--critics", nargs="+", choices=CRITICS, default=list(CRITICS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--show", action="store_true", help="only show the table")
    chosen = parser.parse_args()
    known = {row["command"] for row in rows()}
    for seed, critic, task in [] if chosen.show else product(chosen.seeds, chosen.critics, chosen.tasks):
        text = f"recurl train ppo {TASKS[task]}{CRITICS[critic]} {OPTIONS} --total-steps {chosen.steps} --seed {seed}"
        if text not in known:
            run(text, {"task": task, "critic": critic, "seed": seed})
    show()


def rows() -> list[dict[str, str]]:
    """Return the rows of the table."""
    if not RESULTS.exists():
        return []
    with RESULTS.open(newline="") as file:
        return list(csv.DictReader(file))


def run(text: str, names: dict[str, object]) -> None:
    """Train, and write the rows of the run; report and skip a run that fails."""
    tags = {"date": time.strftime("%Y-%m-%d"), **machine(), "vmas": version("vmas"), **names}
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name) / "run")
        words = [sys.executable, "-m", *shlex.split(text), "--eval-episodes", "1", "--run-dir", str(folder.path)]
        done = subprocess.run(words, check=False, capture_output=True, text=True)
        if done.returncode:
            print(f"FAILED {text}\n{done.stderr[-500:]}", flush=True)
            return
        with folder.metrics.open(newline="") as file:
            metrics = [row for row in csv.DictReader(file) if int(row["episodes"]) >= 20]
        last = len(metrics) - 1
        greedy = evaluate_run(folder, episodes=GREEDY).mean_return
        for point in sorted({round(last * tenth / POINTS) for tenth in range(POINTS + 1)}):
            row = metrics[point]
            found = {name: row[name] for name in ("env_steps", "cpu_s")}
            found["return_mean_20"] = f"{float(row['return_mean_20']):.4g}"
            found["greedy_return"] = f"{greedy:.4g}" if point == last else ""
            append(RESULTS, {**tags, **found, "command": text})
    print(f"{names}: {greedy:.4g}", flush=True)


def show() -> None:
    """Print returns at the beginning, in the middle and at the end of training, over seeds."""
    table: dict[tuple[str, str], dict[str, list[dict[str, str]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows():
        table[row["task"], row["critic"]][row["seed"]].append(row)
    for (task, critic), runs in table.items():
        parts = list[str]()
        for share in (0, 0.5, 1):
            points = [found[round((len(found) - 1) * share)] for found in runs.values()]
            values = [float(point["return_mean_20"]) for point in points]
            parts.append(f"{int(points[0]['env_steps']):,}: {statistics.mean(values):.2f}")
        greedy = [float(found[-1]["greedy_return"]) for found in runs.values()]
        spread = ", ".join(f"{value:.2f}" for value in sorted(greedy))
        print(f"{task:12} {critic:6} {'  '.join(parts)}  greedy {statistics.mean(greedy):.2f} ({spread})")


if __name__ == "__main__":
    main()

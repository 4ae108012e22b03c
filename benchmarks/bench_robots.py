"""Policies of MaskedArm by what their critic or teacher sees: greedy returns of several seeds, in results/robots.csv.

* ``symmetric``: neither actor nor critic observes velocities, masses, damping and gain (``--drop-observations``).
* ``asymmetric``: only the critic does (``--critic-observations``).
* ``teacher``: the actor does, too.
* ``student``: ``recurl distill`` of the teacher of the same seed, without them (``--teacher-observations``).

Each run is a process on the CPU, several at once; a row is the mean return of greedy episodes in fresh environments.
Rows that are there for this commit are skipped. Usage::

    python benchmarks/bench_robots.py --parallel 12
"""

from __future__ import annotations

import argparse
import csv
import datetime
import re
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from results_file import append, commit

RESULTS = Path(__file__).parent / "results" / "robots.csv"
ENV = "--env recurl/MaskedArm-v0 --num-envs 64 --rollout-steps 64 --gamma 0.95 --device cpu --logger none"
PPO = f"train ppo {ENV} --sequence-length 32 --learning-rate 0.001"
CASES = {
    "symmetric": f"{PPO} --drop-observations privileged",
    "asymmetric": f"{PPO} --critic-observations privileged",
    "teacher": PPO,
    "student": f"train distill {ENV} --teacher-observations privileged",
}
FOUND = re.compile(r"Greedy evaluation.*: return (\S+) \(95% interval (\S+) to ([^,]+),", re.DOTALL)
WALL = re.compile(r"training took \S+ s of CPU time \((\S+) s wall\)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--total-steps", type=int, default=4_000_000)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--commit", default=commit(), help="what to write into the column 'commit'")
    options = parser.parse_args()
    rows = csv.DictReader(options.csv.open()) if options.csv.exists() else ()
    done = {(row["case"], int(row["seed"])) for row in rows if row["commit"] == options.commit}
    writing = threading.Lock()

    def run(folder: Path, case: str, seed: int) -> None:
        words = [sys.executable, "-m", "recurl", *CASES[case].split(), "--seed", str(seed)]
        words += ["--total-steps", str(options.total_steps), "--eval-episodes", str(options.episodes)]
        words += ["--teacher", str(folder / f"teacher{seed}")] * (case == "student")
        made = subprocess.run(
            [*words, "--run-dir", str(folder / f"{case}{seed}")], capture_output=True, text=True, check=False
        )
        found, wall = FOUND.search(made.stdout), WALL.search(made.stdout)
        if found is None or wall is None:
            print(case, seed, made.stdout[-500:], made.stderr[-1000:], flush=True)
            return
        row = {
            "date": datetime.date.today().isoformat(),
            "case": case,
            "seed": seed,
            "steps": options.total_steps,
            "return": found[1],
            "low": found[2],
            "high": found[3],
            "episodes": options.episodes,
            "wall_s": wall[1],
        }
        with writing:
            append(options.csv, {**row, "commit": options.commit, "torch": torch.__version__})
            print(*row.values(), flush=True)

    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(options.parallel) as pool:
        wanted = [(case, seed) for seed in range(options.seeds) for case in options.cases if (case, seed) not in done]
        first = {key: pool.submit(run, Path(name), *key) for key in wanted if key[0] == "teacher"}
        first |= {key: pool.submit(run, Path(name), *key) for key in wanted if key[0] not in ("teacher", "student")}
        for seed in range(options.seeds):
            if ("student", seed) in wanted:
                if ("teacher", seed) not in first:
                    sys.exit(f"The student of seed {seed} needs its teacher in the same call: --cases teacher student.")
                first["teacher", seed].result()
                first["student", seed] = pool.submit(run, Path(name), "student", seed)
        for future in first.values():
            future.result()


if __name__ == "__main__":
    main()

"""Effect of stale weights: A2C and IMPALA with an acting policy that is several updates old.

Each batch is collected with the weights of ``--delay`` updates before, as when many actors feed one learner. Every row
of results/stale_weights.csv is one run followed by greedy episodes; the table has interquartile means over the seeds
with bootstrap intervals. Each run is a process with one thread. Usage::

    python benchmarks/bench_stale_weights.py --jobs 16             # 4 learners x delays 0 and 5 x 5 seeds
    python benchmarks/bench_stale_weights.py --jobs 2 --seeds 1 --delays 5 --only impala
    python benchmarks/bench_stale_weights.py --list                # print the results

Runs of the same task that are already in the file are skipped.
"""

from __future__ import annotations

import argparse
import copy
import csv
import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase

import recurl
from recurl.collectors import Collector
from recurl.envs import EnvBase
from recurl.trainers import evaluate_policy, find_algorithm, make_env
from recurl.trainers.networks.agent import collecting
from recurl.trainers.study.statistics import bootstrap_interval, interquartile_mean
from results_file import append, commit

RESULTS = Path(__file__).parent / "results" / "stale_weights.csv"
ENV = "recurl/MaskedCartPole-v1"
SHAPE = {"num_envs": 16, "rollout_steps": 16, "max_grad_norm": 10.0}
LEARNERS: dict[str, tuple[str, dict[str, Any]]] = {
    "a2c": ("a2c", {"gae_lambda": 1.0}),  # V-trace's return where all weights are 1: only the correction differs
    "impala": ("impala", {}),
    "impala, clipped": ("impala", {"clip_epsilon": 0.2}),
    "ppo": ("ppo", {"minibatches": 1, "epochs": 1, "sequence_length": 16, "gae_lambda": 1.0}),
}
POINTS = 10
_WRITING = threading.Lock()


class Task(NamedTuple):
    """Task on which all learners are compared."""

    env: str
    total_steps: int
    learning_rate: float


def delayed(kind: type[Any], delay: int) -> type[Any]:
    """Return a learner whose collector acts with the weights of ``delay`` updates before."""

    class Delayed(kind):
        def _collector(self, env: EnvBase) -> Collector:
            self.acting = copy.deepcopy(self.agent)
            self.past: deque[dict[str, torch.Tensor]] = deque(maxlen=delay + 1)
            policy, config = collecting(self.acting.policy), self.config
            return Collector(env, policy, frames_per_batch=config.frames_per_batch, device=config.device)

        def collect(self) -> TensorDictBase:
            self.past.append(copy.deepcopy(self.agent.state_dict()))
            self.acting.load_state_dict(self.past[0])
            return super().collect()

    return Delayed


def measure(learner: str, delay: int, seed: int, task: Task) -> dict[str, object]:
    """Train and evaluate; return a row of the table."""
    algorithm, options = LEARNERS[learner]
    entry = find_algorithm(algorithm)
    config = entry.config(**task._asdict(), seed=seed, **SHAPE, **options)
    began, run = time.process_time(), delayed(entry.learner, delay)(config)
    curve, divergence = [], []
    for update in range(1, config.updates + 1):
        learned = run.learn(run.collect())
        divergence.append(learned.get("kl_behaviour", float("nan")))
        if update % max(1, config.updates // POINTS) == 0:
            curve.append(f"{run.env_steps}:{evaluated(run.agent, config, 20):.1f}")
    score = evaluated(run.agent, config, 100)
    run.close()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "recurl": recurl.__version__,
        "torch": torch.__version__,
        **task._asdict(),
        "learner": learner,
        "delay": delay,
        "seed": seed,
        "cpu_s": round(time.process_time() - began, 1),
        "greedy_return": round(score, 2),
        "kl_behaviour": round(float(np.mean(divergence)), 6),
        "curve": " ".join(curve),
    }


def evaluated(agent: Any, config: Any, episodes: int) -> float:
    """Return the mean return of greedy episodes with the current weights."""
    with make_env(config, 20, policy=agent.policy) as env:
        env.set_seed(1_000_000)
        return evaluate_policy(agent.actor, env, episodes=episodes).mean_return


def rows() -> list[dict[str, str]]:
    """Return the rows of the results."""
    if not RESULTS.exists():
        return []
    with RESULTS.open(newline="") as file:
        return list(csv.DictReader(file))


def same(row: dict[str, str], task: Task) -> bool:
    """Return whether a row belongs to this task."""
    return all(row[name] == str(value) for name, value in task._asdict().items())


def table(task: Task) -> str:
    """Return interquartile means, one line for each learner and delay."""
    lines = [str(task), f"{'learner':<20} {'delay':>5} {'runs':>5}  greedy return (95 % interval)"]
    chosen = [row for row in rows() if same(row, task)]
    for learner, delay in sorted({(row["learner"], int(row["delay"])) for row in chosen}):
        of = [float(r["greedy_return"]) for r in chosen if (r["learner"], int(r["delay"])) == (learner, delay)]
        scores = np.array(of)
        low, high = bootstrap_interval(scores)
        mean = float(interquartile_mean(scores))
        lines.append(f"{learner:<20} {delay:>5} {len(of):>5}  {mean:7.1f} ({float(low):.1f} to {float(high):.1f})")
    return "\n".join(lines)


def in_process(learner: str, delay: int, seed: int, task: Task) -> str | None:
    """Measure in a separate process and add the row; return the name of the run if it failed."""
    name = f"{learner}, delay {delay}, seed {seed}"
    words = ["--one", learner, str(delay), str(seed), "--steps", str(task.total_steps), "--env", task.env]
    words += ["--learning-rate", str(task.learning_rate)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *words]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return name
    row = json.loads(done.stdout.splitlines()[-1])
    with _WRITING:
        append(RESULTS, row)
    print(f"{name}: {row['greedy_return']}", flush=True)
    return None


def main() -> None:
    """Run the missing measurements, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--seeds", type=int, default=5, help="seeds of each, from 0")
    parser.add_argument("--delays", type=int, nargs="+", default=[0, 5], help="age of the weights in updates")
    parser.add_argument("--steps", type=int, default=150_000, help="environment steps of a run")
    parser.add_argument("--learning-rate", type=float, default=2e-2, help="large steps, so that age has an effect")
    parser.add_argument("--env", default=ENV, help="the environment")
    parser.add_argument("--only", default="", help="learners whose name contains this")
    parser.add_argument("--list", action="store_true", help="print the results")
    parser.add_argument("--one", nargs=3, metavar=("LEARNER", "DELAY", "SEED"), help="one run, in this process")
    chosen = parser.parse_args()
    batch = SHAPE["num_envs"] * SHAPE["rollout_steps"]
    task = Task(chosen.env, int(chosen.steps // batch * batch), chosen.learning_rate)
    if chosen.one:
        learner, delay, seed = chosen.one
        print(json.dumps(measure(learner, int(delay), int(seed), task)))
        return
    if not chosen.list:
        done = {(r["learner"], int(r["delay"]), int(r["seed"])) for r in rows() if same(r, task)}
        wanted = product(range(chosen.seeds), chosen.delays, [name for name in LEARNERS if chosen.only in name])
        jobs = [(name, delay, seed) for seed, delay, name in wanted if (name, delay, seed) not in done]
        with ThreadPoolExecutor(chosen.jobs) as pool:
            failed = list(filter(None, pool.map(lambda job: in_process(*job, task), jobs)))
        if failed:
            sys.exit(f"These failed: {'; '.join(failed)}")
    print(table(task))


if __name__ == "__main__":
    main()

"""Wall time of ``recurl train ppo`` with and without ``--overlap``; appends to results/overlap.csv.

Masked CartPole with the default sizes (8 environments x 128 steps, LSTM 64, 4 epochs x 4 minibatches). The two learners
are measured in turn. Overlapping needs two free cores; on a busy machine it has no effect. Usage::

    python benchmarks/bench_overlap.py            # half a minute
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from recurl.trainers import PPO, PPOConfig
from results_file import append, commit

RESULTS = Path(__file__).parent / "results" / "overlap.csv"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--updates", type=int, default=15, help="updates per round")
    parser.add_argument("--num-envs", type=int, default=8)
    options = parser.parse_args()
    learners = {overlap: learner(overlap, options.num_envs) for overlap in (False, True)}
    speeds: dict[bool, list[float]] = {overlap: [] for overlap in learners}
    for number in range(options.rounds + 1):
        for overlap, ppo in learners.items():
            steps, start = ppo.env_steps, time.perf_counter()
            for _ in range(options.updates):
                ppo.learn(ppo.collect())
            if number:  # the first is a warm-up
                speeds[overlap].append((ppo.env_steps - steps) / (time.perf_counter() - start))
    for ppo in learners.values():
        ppo.close()
    write(options, speeds)


def learner(overlap: bool, num_envs: int) -> PPO:
    return PPO(PPOConfig(env="recurl/MaskedCartPole-v1", overlap=overlap, num_envs=num_envs, total_steps=10**8))


def write(options: argparse.Namespace, speeds: dict[bool, list[float]]) -> None:
    row = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "device": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "num_envs": options.num_envs,
        "rounds": options.rounds,
        "updates_per_round": options.updates,
        "steps_per_s": round(statistics.median(speeds[False])),
        "overlap_steps_per_s": round(statistics.median(speeds[True])),
        "ratio": round(statistics.median(b / a for a, b in zip(speeds[False], speeds[True], strict=True)), 2),
    }
    append(RESULTS, row)
    print(row)


if __name__ == "__main__":
    main()

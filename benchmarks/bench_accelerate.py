"""End-to-end PPO of other libraries with and without ``recurl.accelerate``: appends to results/accelerate.csv.

Each system of bench_ppo.py runs twice, in processes of their own that are measured in turn, round by round: as it is,
and with its networks accelerated. The measure is CPU time of the process per environment step, collection and learning
included (on a GPU: wall-clock time); the gain is the median of the ratios within a round. Usage::

    python benchmarks/bench_accelerate.py                                  # at the sizes of bench_ppo.py
    python benchmarks/bench_accelerate.py --hidden-size 256 --rounds 5 --systems sb3 cleanrl
    python benchmarks/bench_accelerate.py --hidden-size 256 --num-envs 64 --device cuda
    python benchmarks/bench_accelerate.py --hidden-size 256 --num-envs 256 --rollout-steps 24 --systems rsl_rl skrl
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path

from bench_ppo import SYSTEMS, Peer, about
from results_file import append

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "accelerate.csv"
OTHERS = ("sb3", "sb3-shared", "cleanrl", "torchrl", "torchrl-best", "rsl_rl", "skrl")
"""Systems of bench_ppo.py that aren't recurl."""


def main() -> None:
    """Measure the requested systems."""
    options = parse()
    for name in options.systems:
        SYSTEMS[f"{name}+recurl"] = replace(SYSTEMS[name], accelerated=True)
        row = measured(name, options)
        if row is not None:
            append(RESULTS, row)
            print(*row.values(), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=OTHERS, default=list(OTHERS))
    parser.add_argument("--task", choices=("cartpole", "pendulum"), default="cartpole")
    parser.add_argument(
        "--python", nargs="*", default=[], metavar="NAME=PATH", help="interpreter of peers, with recurl"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2048, help="environment steps of a round")
    parser.add_argument("--warmup", type=int, default=2048, help="environment steps before")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--rollout-steps", type=int, default=128, help="steps per environment in a batch")
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="device of the networks")
    options = parser.parse_args()
    options.python = {"peers": sys.executable, **dict(entry.split("=", 1) for entry in options.python)}
    options.solve, options.before = 0, ""
    return options


def measured(name: str, options: argparse.Namespace) -> dict[str, object] | None:
    """Return the row of one system, or None if it can't run."""
    names = (name, f"{name}+recurl")
    clock = "cpu_s" if options.device == "cpu" else "wall_s"
    peers = {one: Peer(one, options.num_envs, options) for one in names}
    facts = {one: peer.answer() for one, peer in peers.items()}
    times: dict[str, list[float]] = {one: [] for one in names}
    learned: dict[str, list[float]] = {one: [] for one in names}
    try:
        if any(fact is None for fact in facts.values()):
            return None
        for _ in range(options.rounds):
            for one, peer in peers.items():
                whole, collected = (peer.measure(what, options.steps) for what in ("train", "collect"))
                if whole is None or collected is None:
                    return None
                per_step = [1e6 * found[clock] / found["steps"] for found in (whole, collected)]
                times[one].append(per_step[0])
                learned[one].append(per_step[0] - per_step[1])
    finally:
        for peer in peers.values():
            peer.close()
    plain, ours = names
    return about(name, facts[plain] or {}, options) | {
        "hidden_size": options.hidden_size,
        "num_envs": options.num_envs,
        "rollout_steps": options.rollout_steps,
        "rounds": options.rounds,
        "train_us": f"{statistics.median(times[plain]):.1f}",
        "accelerated_us": f"{statistics.median(times[ours]):.1f}",
        "gain": f"{ratio(times[plain], times[ours]):.2f}",
        "gain_of_learning": f"{ratio(learned[plain], learned[ours]):.2f}",
    }


def ratio(one: list[float], other: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


if __name__ == "__main__":
    main()

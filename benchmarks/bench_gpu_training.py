"""End-to-end training on a GPU: whole updates of recurrent PPO on masked CartPole, with tasks stepped on the device.

First, batches of the captured collector are compared bitwise with those of individual launches, compiled and not. Then
medians of whole updates (collection, advantages, all epochs, statistics) and their parts, and the same work in an
all-JAX program (peers/jax_ppo.py, best of three unrollings of its scans) if JAX is installed. Appends to
results/gpu_training.csv. Usage::

    python benchmarks/bench_gpu_training.py                      # all cases
    python benchmarks/bench_gpu_training.py --only 0 1 --no-jax  # some
    python benchmarks/bench_gpu_training.py --solve 5            # time to a mean return of 475, five seeds

Rows of ``--solve`` are written to results/gpu_solved.csv. The first updates, in which steps are compiled and graphs
captured, count as setup; in the training time, each counts as an update of median duration.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from recurl import __version__
from recurl.collectors import Collector
from recurl.core.keys import DONE, NEXT, REWARD
from recurl.trainers import PPO, PPOConfig
from recurl.trainers.networks.agent import collecting
from recurl.trainers.run.episodes import EpisodeStats
from results_file import append, commit

RESULTS = Path(__file__).parent / "results" / "gpu_training.csv"
SOLVED = Path(__file__).parent / "results" / "gpu_solved.csv"
RECORDED = 4  # updates after which nothing more is compiled or captured
TARGET = 475.0
LIMIT = 100  # updates
JAX = Path(__file__).parent / "peers" / "jax_ppo.py"


class Case(NamedTuple):
    """Environments, steps of each, width of the memory, epochs, minibatches."""

    envs: int
    steps: int
    hidden: int
    epochs: int
    minibatches: int


class Peer(NamedTuple):
    """Million steps per second of whole updates, and milliseconds of collection alone."""

    rate: float
    collect_ms: float


CASES = [
    Case(4096, 64, 128, 4, 4),
    Case(1024, 128, 64, 4, 4),
    Case(4096, 32, 256, 4, 4),
    Case(16384, 32, 128, 2, 8),
]
SMALL = Case(1024, 32, 64, 4, 4)  # learns from fewer steps


def main() -> None:
    """Check, then measure every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="*", default=range(len(CASES)), help="numbers of cases")
    parser.add_argument("--cells", nargs="*", default=["lstm", "gru"])
    parser.add_argument("--jax", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--unroll", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--solve", type=int, default=0, metavar="SEEDS", help="learn two cases instead")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    torch.set_float32_matmul_precision("high")  # as recurl train does on a GPU, and JAX
    if options.solve:
        for case, seed in itertools.product((CASES[0], SMALL), range(options.solve)):
            solve(case, seed, options.csv or SOLVED)
        return
    check()
    for case in (CASES[index] for index in options.only):
        peer = jax_best(case, options.unroll) if options.jax else None
        for cell in options.cells:
            measure(case, cell, peer if cell == "lstm" else None, options)


def config_of(case: Case, cell: str, **changes: Any) -> PPOConfig:
    options: dict[str, Any] = {
        "env": "recurl/MaskedCartPole-v1",
        "vectorization": "device",
        "device": "cuda",
        "cell": cell,
        "hidden_size": case.hidden,
        "num_envs": case.envs,
        "rollout_steps": case.steps,
        "sequence_length": case.steps,
        "epochs": case.epochs,
        "minibatches": case.minibatches,
        "total_steps": 10**12,
        "cuda_graph": True,
        "compile": True,
        "shared_trunk": True,
        "normalize_observations": False,
        "scale_rewards": False,
        **changes,
    }
    return PPOConfig(**options)


def check() -> None:
    """Compare captured batches with individual launches."""
    case = Case(256, 16, 64, 1, 1)
    for compiled in (False, True):
        batches = []
        for captured in (False, True):
            learner = PPO(config_of(case, "lstm", cuda_graph=False, compile=False))
            collector = Collector(
                learner.collector.env,
                collecting(learner.agent.policy),
                frames_per_batch=case.envs * case.steps,
                device="cuda",
                cuda_graph=captured,
                compile_step=compiled,
            )
            torch.manual_seed(0)
            batches.append([collector.collect().exclude(("collector", "traj_ids")) for _ in range(6)])
        for index, (alone, together) in enumerate(zip(*batches, strict=True)):
            wrong = [key for key in alone.keys(True, True) if not torch.equal(alone[key], together[key])]
            if wrong:
                sys.exit(f"Batch {index}: a captured collector gives other bits than single launches in {wrong}.")
    print("captured batches have the bits of single launches, compiled and not")


def measure(case: Case, cell: str, peer: Peer | None, options: argparse.Namespace) -> None:
    began = time.perf_counter()
    learner = PPO(config_of(case, cell))
    torch.cuda.reset_peak_memory_stats()
    for _ in range(5):
        learner.learn(learner.collect())
    torch.cuda.synchronize()
    setup = time.perf_counter() - began
    times: dict[str, list[float]] = {"update": [], "collect": [], "learn": []}
    batch: Any = None

    def collect() -> None:
        nonlocal batch
        batch = learner.collect()

    for _ in range(options.updates):
        times["update"].append(wall(lambda: learner.learn(learner.collect())))
    for _ in range(2 * options.updates):  # successive updates, as in the timing of the JAX program
        times["collect"].append(wall(collect))
    for _ in range(options.updates):
        times["learn"].append(wall(lambda: learner.learn(batch)))
    medians = {name: statistics.median(values) for name, values in times.items()}
    rate = case.envs * case.steps / medians["update"] / 1e6
    row = {
        **stamp(),
        "precision": torch.get_float32_matmul_precision(),
        "cell": cell,
        **case._asdict(),
        "update_ms": round(medians["update"] * 1e3, 2),
        "collect_ms": round(medians["collect"] * 1e3, 2),
        "learn_ms": round(medians["learn"] * 1e3, 2),
        "M_steps_per_s": round(rate, 3),
        "jax_M_steps_per_s": "" if peer is None else round(peer.rate, 3),
        "ratio": "" if peer is None else round(rate / peer.rate, 2),
        "peak_GB": round(torch.cuda.max_memory_allocated() / 1e9, 2),
        "setup_s": round(setup, 1),
        "jax_collect_ms": "" if peer is None else peer.collect_ms,
    }
    append(options.csv or RESULTS, row)
    print(
        f"{cell:5s} {tuple(case)!s:28s} update {row['update_ms']:8.2f} ms (collect {row['collect_ms']:.2f}, learn "
        f"{row['learn_ms']:.2f}) {rate:6.2f} M steps/s, JAX {row['jax_M_steps_per_s']} x {row['ratio']}, "
        f"{row['peak_GB']} GB, set-up {setup:.1f} s",
        flush=True,
    )
    learner.close()


def solve(case: Case, seed: int, path: Path) -> None:
    """Learn until the mean return of the last 20 episodes is 475."""
    began = time.perf_counter()
    scaled = {"scale_rewards": True, "normalize_observations": True}  # the defaults, without which it learns slowly
    learner = PPO(config_of(case, "lstm", seed=seed, learning_rate=2e-3, **scaled))
    stats = EpisodeStats(case.envs)
    times: list[float] = []

    def update() -> None:
        batch = learner.collect()
        stats.update(batch[NEXT, REWARD][..., 0], batch[NEXT, DONE][..., 0])
        learner.learn(batch)

    while not stats.reached(TARGET) and len(times) < LIMIT:
        times.append(wall(update))
        if len(times) == RECORDED:
            setup = time.perf_counter() - began
    median = statistics.median(times[RECORDED:])
    seconds = sum(times[RECORDED:]) + RECORDED * median
    row = {
        **stamp(),
        "seed": seed,
        **case._asdict(),
        "updates": len(times),
        "mean_return": round(stats.mean_return, 1),
        "training_s": round(seconds, 3),
        "setup_s": round(setup, 1),
    }
    append(path, row)
    print(
        f"{tuple(case)} seed {seed}: {len(times)} updates, return {stats.mean_return:.0f}, {seconds:.3f} s, "
        f"set-up {setup:.1f} s"
    )
    learner.close()


def stamp() -> dict[str, str]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "device": torch.cuda.get_device_name(),
        "recurl": __version__,
        "torch": torch.__version__,
    }


def wall(run: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def jax_best(case: Case, unrolls: list[int]) -> Peer | None:
    """Return the best results of the all-JAX program over unrollings, or None if JAX is missing."""
    found: list[Peer] = []
    for unroll in unrolls:
        command = [sys.executable, str(JAX), *map(str, case), "20", str(unroll)]
        variables = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # torch holds memory too
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
        figures = re.search(r"= ([\d.]+) M steps/s; collection ([\d.]+) ms", done.stdout)
        if figures is None:
            print(f"jax_ppo.py {case}: {done.stderr.strip().splitlines()[-1:]}", flush=True)
            continue
        found.append(Peer(*map(float, figures.groups())))
        print(done.stdout.strip().splitlines()[-1], flush=True)
    return Peer(max(peer.rate for peer in found), min(peer.collect_ms for peer in found)) if found else None


if __name__ == "__main__":
    main()

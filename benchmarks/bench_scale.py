"""Weak scaling of Ray actors on this machine, and their overhead; appends to results/scale_ray.csv.

Environments sleep 25 ms per vector step and actions are random, so that actors need little CPU time: N actors should
make N times the steps of one. Each actor collects its own batches (``sync=False``). Startup is excluded, and CPU time
is that of the actors only. The overhead of a batch is the time of a collector with two workers for an environment that
doesn't sleep, minus the time of one ``Collector`` for the steps of one worker. Then whole updates of recurrent PPO with
the same environments, whose batches sleep for a second: with actors that wait for the learner, with actors that are an
update ahead, and with RLlib, if its interpreter is given (``peers/rllib_actors.py``). Usage::

    python benchmarks/bench_scale.py                 # a quarter of an hour, most of it imports of torch in the actors
    python benchmarks/bench_scale.py --actors 1 2 --batches 4 --repeats 20 --dry   # tries it out, writes nothing
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ray
import torch

from peers.sleeping import ROWS, SECONDS, STEPS, Sleeping
from recurl.collectors import Collector, MultiSyncCollector, RayCollector
from recurl.envs import GymWrapper
from recurl.trainers import PPO, PPOConfig
from results_file import append, commit

RESULTS = Path(__file__).parent / "results" / "scale_ray.csv"
HIDDEN = 64


def sleeping(seconds: float = SECONDS, num_envs: int = ROWS) -> GymWrapper:
    return GymWrapper(Sleeping(num_envs, seconds), categorical_action_encoding=True)


def cpu_seconds(processes: list[int]) -> float:
    """Return the CPU time used by processes."""
    ticks = 0
    for process in processes:
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(words[11]) + int(words[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def scaling(actors: int, batches: int) -> dict[str, float]:
    """Return the vector steps per second with this many actors, and the CPU milliseconds per step."""
    create = functools.partial(sleeping, SECONDS)
    with RayCollector(create, num_collectors=actors, frames_per_batch=ROWS * STEPS, sync=False) as collector:
        for _ in range(2 * actors):
            collector.collect()
        processes = collector.processes
        cpu, start = cpu_seconds(processes), time.perf_counter()
        for _ in range(batches * actors):
            collector.collect()
        seconds = time.perf_counter() - start
        steps = batches * actors * STEPS
        return {"steps_per_s": steps / seconds, "cpu_ms_per_step": (cpu_seconds(processes) - cpu) / steps * 1e3}


def overhead(repeats: int) -> dict[str, float]:
    """Return the milliseconds per batch of two workers in addition to the steps."""
    create = functools.partial(sleeping, 0.0)
    frames = 2 * ROWS * STEPS
    collectors: dict[str, Any] = {
        "one": Collector(create, frames_per_batch=ROWS * STEPS),
        "MultiSyncCollector": MultiSyncCollector([create] * 2, frames_per_batch=frames, timeout=60.0),
        "RayCollector": RayCollector(create, num_collectors=2, frames_per_batch=frames),
    }
    times: dict[str, list[float]] = {name: [] for name in collectors}
    for number in range(repeats + 3):
        for name, collector in collectors.items():
            start = time.perf_counter()
            collector.collect()
            if number >= 3:  # the first ones are a warm-up
                times[name].append(time.perf_counter() - start)
    for collector in collectors.values():
        collector.shutdown()
    medians = {name: statistics.median(values) * 1e3 for name, values in times.items()}
    return {name: value - medians["one"] for name, value in medians.items() if name != "one"}


def ppo(actors: int, batches: int, max_lag: int) -> dict[str, float]:
    """Return vector steps per second of whole updates, with one pass over each batch."""
    config = PPOConfig(
        env=sleeping,
        num_envs=ROWS * actors,
        rollout_steps=STEPS,
        sequence_length=STEPS,
        collectors=f"ray:{actors}",
        max_lag=max_lag,
        hidden_size=HIDDEN,
        epochs=1,
        minibatches=4,
        shared_trunk=True,
        device="cpu",
        total_steps=10**9,
    )
    learner = PPO(config)
    for _ in range(2):
        learner.learn(learner.collect())
    start = time.perf_counter()
    for _ in range(batches):
        learner.learn(learner.collect())
    seconds = time.perf_counter() - start
    learner.close()
    return {"steps_per_s": batches * actors * STEPS / seconds}


def rllib(python: str, actors: list[int], batches: int) -> list[dict[str, float]]:
    """Return the same for RLlib."""
    folder = Path(__file__).parent / "peers"
    words = [python, "rllib_actors.py", "--batches", str(batches), "--hidden-size", str(HIDDEN)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*words, "--actors", *map(str, actors)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        print(f"RLlib ended with status {done.returncode}:\n{done.stderr[-2000:]}", flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, nargs="*", default=[1, 4, 16, 32])
    parser.add_argument("--batches", type=int, default=20, help="batches of each actor, a second each")
    parser.add_argument("--repeats", type=int, default=200, help="batches of the overhead measurement; 0 skips it")
    parser.add_argument("--ppo", type=int, nargs="*", default=[1, 4, 16], help="actors of the runs of PPO")
    parser.add_argument("--rllib", help="a Python interpreter with RLlib installed")
    parser.add_argument("--csv", type=Path, default=RESULTS, help="results file")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(None if options.dry else options.csv)
    for actors in options.actors:
        table.add("random policy", actors, scaling(actors, options.batches))
    for name, milliseconds in (overhead(options.repeats) if options.repeats else {}).items():
        table.add(name, 2, {"overhead_ms_per_batch": milliseconds})
    for lag in (0, 1):
        for actors in options.ppo:
            table.add(f"PPO, --max-lag {lag}", actors, ppo(actors, options.batches, lag))
    for row in rllib(options.rllib, options.ppo, options.batches) if options.rllib else ():
        table.add("PPO of RLlib", int(row["actors"]), row)


class Table:
    """Table of results, which are printed and added to a file.

    Args:
        file: the file, if there is one.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._alone: dict[str, float] = {}
        self._about = {
            "date": datetime.now(UTC).date().isoformat(),
            "commit": commit(),
            "device": f"{platform.machine()} CPU, {len(os.sched_getaffinity(0))} cores",
            "torch": torch.__version__,
            "ray": ray.__version__,
        }

    def add(self, what: str, actors: int, found: dict[str, float]) -> None:
        """Add a row; efficiency is relative to one actor, or to the smallest number of them."""
        if "steps_per_s" in found:
            alone = self._alone.setdefault(what, found["steps_per_s"] / actors)
            found = {**found, "efficiency": found["steps_per_s"] / (alone * actors)}
        numbers = ("steps_per_s", "efficiency", "cpu_ms_per_step", "overhead_ms_per_batch")
        row = {**self._about, "what": what, "actors": actors}
        row |= {name: round(found[name], 3) if name in found else "" for name in numbers}
        texts = [f"{name} {row[name]}" for name in numbers if name in found]
        print(f"{what:20} {actors:3} actors  {', '.join(texts)}", flush=True)
        if self._file is not None:
            append(self._file, row)


if __name__ == "__main__":
    main()

"""Weak scaling of actors of Ray on this machine, and their overhead; appends to results/scale_ray.csv.

Environments sleep 25 ms per step of a vector and actions are random, so that actors need little of the CPU: N actors
should make N times the steps of one. Each collects parts of its own (``sync=False``). Start-up is left out, CPU time
is that of the actors alone. The overhead of a batch is what a collector of two workers takes for an environment that
doesn't sleep, less what one ``Collector`` takes for the steps of one worker. Usage::

    python benchmarks/bench_scale.py                 # a quarter of an hour, most of it imports of torch in the actors
    python benchmarks/bench_scale.py --actors 1 2 --batches 4 --repeats 20   # a dry run: nothing is written with --dry
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import ray
import torch

from recurl.collectors import Collector, MultiSyncCollector, RayCollector
from recurl.envs import GymWrapper
from results_file import append, commit

RESULTS = Path(__file__).parent / "results" / "scale_ray.csv"
SECONDS = 0.025
ROWS = 8
STEPS = 40  # of a vector, in a batch of one actor: a second of sleep


class Sleeping(gym.vector.VectorEnv):
    """Observes zeros; a step sleeps."""

    metadata: dict[str, Any] = {"autoreset_mode": gym.vector.AutoresetMode.DISABLED}  # noqa: RUF012 - as in gymnasium

    def __init__(self, rows: int, seconds: float) -> None:
        self.num_envs = rows
        self.single_observation_space = gym.spaces.Box(-1, 1, (4,))
        self.single_action_space = gym.spaces.Discrete(2)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, rows)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, rows)
        self._seconds = seconds

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        return np.zeros((self.num_envs, 4), np.float32), {}

    def step(self, actions: np.ndarray) -> Any:
        time.sleep(self._seconds)
        never = np.zeros(self.num_envs, bool)
        return np.zeros((self.num_envs, 4), np.float32), np.ones(self.num_envs), never, never, {}


def sleeping(seconds: float) -> GymWrapper:
    return GymWrapper(Sleeping(ROWS, seconds))


def cpu_seconds(processes: list[int]) -> float:
    """CPU time that processes have taken."""
    ticks = 0
    for process in processes:
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(words[11]) + int(words[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def scaling(actors: int, batches: int) -> dict[str, float]:
    """Steps of vectors per second of so many actors, and the CPU milliseconds of a step."""
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
    """Milliseconds per batch of two workers beyond those of the steps."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--batches", type=int, default=20, help="batches of each actor, a second each")
    parser.add_argument("--repeats", type=int, default=200, help="batches of the overhead")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    options = parser.parse_args()
    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "device": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "ray": ray.__version__,
    }
    alone = None
    for actors in options.actors:
        found = scaling(actors, options.batches)
        alone = found["steps_per_s"] / actors if alone is None else alone
        efficiency = found["steps_per_s"] / (alone * actors)
        write(about, actors, {**found, "efficiency": efficiency}, dry=options.dry)
    for name, milliseconds in overhead(options.repeats).items():
        write({**about, "what": name}, 2, {"overhead_ms_per_batch": milliseconds}, dry=options.dry)


def write(about: dict[str, Any], actors: int, found: dict[str, float], *, dry: bool) -> None:
    numbers = ("steps_per_s", "efficiency", "cpu_ms_per_step", "overhead_ms_per_batch")
    row = {**about, "what": about.get("what", "scaling"), "actors": actors}
    row |= {name: round(found[name], 3) if name in found else "" for name in numbers}
    print(row, flush=True)
    if not dry:
        append(RESULTS, row)


if __name__ == "__main__":
    main()

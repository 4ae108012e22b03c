"""Kill Ray actors and remove nodes during collection, and compare delivered with executed steps.

Environments append every step to a file. Appends to results/soak_ray.csv the numbers of delivered steps that were
duplicated, out of order or never executed, the numbers of executed steps that were not delivered and of those reported
as lost, and the numbers of remaining processes and the remaining shared memory. Linux only. Usage::

    python benchmarks/soak_ray.py                          # half an hour
    python benchmarks/soak_ray.py --sync --max-lag 1
    python benchmarks/soak_ray.py --kills 3 --nodes 1 --dry
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import platform
import random
import signal
import tempfile
import time
import warnings
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster
from tensordict import TensorDict

from logged_steps import delivered, executed, logged
from recurl.collectors import RayCollector
from results_file import append, commit

RESULTS = Path(__file__).parent / "results" / "soak_ray.csv"
ACTORS = 4
STEPS, ROWS = 20, 2
SIZE = {"num_cpus": 2, "object_store_memory": 80 * 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--sync", action="store_true", help="all actors together, instead of each on its own")
    parser.add_argument(
        "--max-lag", type=int, help="batches that actors may be ahead, with --sync: 1 kills them at work"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry", action="store_true", help="write nothing")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "Collector actor")
    begin, memory, files = time.monotonic(), shared_memory(), set(os.listdir("/dev/shm"))
    cluster = Cluster(initialize_head=True, head_node_args={**SIZE, "num_cpus": 1, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        found = attack(cluster, Path(folder) / "steps", options)
    ray.shutdown()
    cluster.shutdown()
    end = time.monotonic() + 90  # Ray's own helpers give up after a minute
    while any(map(alive, found["processes"])) and time.monotonic() < end:
        time.sleep(0.5)
    orphans = sum(map(alive, found.pop("processes")))
    row = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "device": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "ray": ray.__version__,
        "sync": options.sync,
        "max_lag": options.max_lag if options.max_lag is not None else 0 if options.sync else "",
        "kills": options.kills,
        "nodes_removed": options.nodes,
        **found,
        "orphans": orphans,
        "shared_files_left": len(set(os.listdir("/dev/shm")) - files),
        "shared_mib_left": round(max(0.0, shared_memory() - memory), 1),
        "seconds": round(time.monotonic() - begin),
    }
    print(row)
    if not options.dry:
        append(RESULTS, row)


def attack(cluster: Any, file: Path, options: argparse.Namespace) -> dict[str, Any]:
    draw = random.Random(options.seed)
    nodes = [cluster.add_node(**SIZE) for _ in range(2)]
    create = functools.partial(logged, file, rows=ROWS, seconds=0.002)
    frames = ROWS * STEPS * (ACTORS if options.sync else 1)
    attacks = ["kill"] * options.kills + ["node"] * options.nodes
    draw.shuffle(attacks)
    batches: list[TensorDict] = []
    processes: set[int] = set()
    asked = 0
    how = {"frames_per_batch": frames, "sync": options.sync, "max_lag": options.max_lag}
    with RayCollector(create, num_collectors=ACTORS, **how) as collector:
        for what in attacks:
            count = draw.randint(3, 12)
            asked += count
            batches += [collector.collect() for _ in range(count)]
            processes.update(collector.processes)
            time.sleep(draw.random() * 0.1)  # any place in the actors' batches
            victims = [process for process in collector.processes if alive(process)]
            if what == "kill" and victims:
                os.kill(draw.choice(victims), signal.SIGKILL)
            elif what == "node":
                cluster.remove_node(nodes.pop(draw.randrange(2)), allow_graceful=False)
                nodes.append(cluster.add_node(**SIZE))
        asked += 3 * ACTORS
        batches += [collector.collect() for _ in range(3 * ACTORS)]
        processes.update(collector.processes)
    reported = collector.lost_frames + collector.discarded_frames
    return {**compared(batches, file), "asked": asked * frames, "processes": processes,
            "replaced": len(collector.replacements), "undelivered_reported": reported}  # fmt: skip


def compared(batches: list[TensorDict], file: Path) -> dict[str, int]:
    """Count the errors in delivered steps."""
    steps, done = delivered(batches), executed(file)
    given = Counter((number, step) for number, each in steps.items() for step in each)
    return {
        "delivered": given.total(),
        "executed": len(done),
        "executed_twice": len(done) - len(set(done)),
        "doubled": sum(count - 1 for count in given.values()),
        "out_of_order": sum(each != list(range(1, len(each) + 1)) for each in steps.values()),
        "never_executed": len(set(given) - set(done)),
        "undelivered": len(set(done) - set(given)),
    }


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def shared_memory() -> float:
    """Return the shared memory in use on this machine, in MiB."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Shmem:"))


if __name__ == "__main__":
    main()

"""Repeatedly kill ranks of a run under torchrun, and compare the run with an undisturbed one.

torchrun restarts the ranks after each kill (``--max-restarts``), and they resume from the newest checkpoint. Kills
occur at random times, a fifth of them while the ranks are starting. At the end, the run must have every update once,
with bitwise equal weights and metrics. Appends to results/soak_ranks.csv. Linux only. Usage::

    python benchmarks/soak_ranks.py                  # ten minutes
    python benchmarks/soak_ranks.py --kills 2 --dry
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from recurl.trainers import RunFolder
from recurl.trainers.checkpoint import latest_checkpoint, load_checkpoint
from results_file import append, commit

RESULTS = Path(__file__).parent / "results" / "soak_ranks.csv"
UPDATES = 40  # between two kills
ENVS, STEPS = 4, 16
OF_CLOCKS = ("wall_s", "cpu_s", "steps_per_s")
TASK = ["--env", "recurl/RepeatPrevious-v0", "--env-kwargs", "k=2", "episode_length=16", "--hidden-size", 16]
TASK += ["--num-envs", ENVS, "--rollout-steps", STEPS, "--sequence-length", 8, "--minibatches", 2]
TASK += ["--checkpoint-every", 3, "--eval-episodes", 1, "--logger", "none", "--threads", 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry", action="store_true", help="write nothing")
    options = parser.parse_args()
    begin, files = time.monotonic(), set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as place:
        quiet, attacked = RunFolder(Path(place) / "quiet"), RunFolder(Path(place) / "attacked")
        launched(quiet, options).wait()
        found = attack(attacked, options)
        result = compared(quiet, attacked)
    row = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "device": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "ranks": options.ranks,
        **found,
        **result,
        "shared_files_left": len(set(os.listdir("/dev/shm")) - files),
        "seconds": round(time.monotonic() - begin),
    }
    print(row)
    if not options.dry:
        append(RESULTS, row)


def launched(folder: RunFolder, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start a run, with its output in a file next to its folder."""
    steps = ENVS * STEPS * options.ranks * UPDATES * (options.kills + 1)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", options.ranks]
    words += ["--max-restarts", options.kills, "-m", "recurl", "train", "ppo", *TASK]
    words += ["--total-steps", steps, "--run-dir", folder.path]
    with folder.path.with_suffix(".txt").open("wb") as out:
        return subprocess.Popen(
            [sys.executable, *map(str, words)],
            stdout=out,
            stderr=out,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )


def attack(folder: RunFolder, options: argparse.Namespace) -> dict[str, Any]:
    draw = random.Random(options.seed)
    launch = launched(folder, options)
    early, slowest = 0, 0.0
    seen: set[int] = set()
    for kill in range(options.kills):
        await_(lambda kill=kill: len(ranks_of(launch.pid, kill)) == options.ranks, launch, folder)
        if draw.random() < 0.2:
            early += 1
            time.sleep(4 * draw.random())
        else:
            goal = updates(folder) + draw.randint(5, UPDATES)
            await_(lambda goal=goal: updates(folder) >= goal, launch, folder)
            time.sleep(0.1 * draw.random())
        victims = ranks_of(launch.pid, kill)
        seen.update(victims)
        os.kill(draw.choice(victims), signal.SIGKILL)
        begin = time.monotonic()
        await_(lambda victims=victims: not any(map(alive, victims)), launch, folder)
        slowest = max(slowest, time.monotonic() - begin)
    status = launch.wait()
    return {
        "kills": options.kills,
        "kills_while_starting": early,
        "status": status,
        "others_ended_s_max": round(slowest, 1),
        "orphans": sum(map(alive, seen)) + len(in_session(launch.pid)),
    }


def compared(quiet: RunFolder, attacked: RunFolder) -> dict[str, int]:
    """Count the differences between two runs."""
    wanted, found = rows(quiet), rows(attacked)
    numbers = [row["update"] for row in found]
    weights, other = weights_of(quiet), weights_of(attacked)
    return {
        "updates": len(wanted),
        "updates_missing": len({row["update"] for row in wanted} - set(numbers)),
        "updates_doubled": len(numbers) - len(set(numbers)),
        "rows_that_differ": sum(row != other for row, other in zip(wanted, found, strict=False)),
        "weights_that_differ": sum(not torch.equal(value, other[name]) for name, value in weights.items()),
        "files_left": len(names(attacked) - names(quiet)),
    }


def rows(folder: RunFolder) -> list[dict[str, str]]:
    with folder.metrics.open(newline="") as file:
        return [{name: value for name, value in row.items() if name not in OF_CLOCKS} for row in csv.DictReader(file)]


def weights_of(folder: RunFolder) -> dict[str, torch.Tensor]:
    return load_checkpoint(latest_checkpoint(folder.checkpoints))["algorithm"]["agent"]


def names(folder: RunFolder) -> set[str]:
    return {str(path.relative_to(folder.path)) for path in Path(folder.path).rglob("*")}


def updates(folder: RunFolder) -> int:
    return folder.metrics.read_bytes().count(b"\n") - 1 if folder.metrics.exists() else 0


def await_(there: Callable[[], bool], launch: subprocess.Popen[bytes], folder: RunFolder) -> None:
    end = time.monotonic() + 120
    while not there():
        if launch.poll() is not None or time.monotonic() > end:
            sys.exit(f"The run ended, or did not continue:\n{folder.path.with_suffix('.txt').read_text()[-4000:]}")
        time.sleep(0.01)


def in_session(session: int) -> list[int]:
    """Return the processes started by torchrun, and their descendants."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(its) == session and state != "Z" and int(path.parent.name) != session:
            found.append(int(path.parent.name))
    return found


def ranks_of(launch: int, attempt: int) -> list[int]:
    """Return the processes of the ranks in an attempt of torchrun."""
    wanted = f"TORCHELASTIC_RESTART_COUNT={attempt}".encode()
    found = []
    for process in Path(f"/proc/{launch}/task/{launch}/children").read_text().split():
        try:
            if wanted in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
                found.append(int(process))
        except OSError:
            continue
    return found


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    main()

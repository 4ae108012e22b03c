"""Seconds from the start of a process to its first update, of recurl and of peers: results/start.csv.

recurl runs as typed, ``recurl train ppo`` on masked CartPole, and its first update is the first row of metrics.csv. On
a GPU, the first update runs uncompiled; with ``--updates 1 4``, the start is also timed to the end of the fourth one,
by when everything is compiled and captured. A peer is a command that prints a line after its first update, as those in
``peers/`` do with ``--warmup`` of one batch. Each program starts with empty caches of compilers (``cold``), and then
with those that it has filled (``cached``): alternating with the others, medians of several starts. Byte code of Python
is kept in a folder of its own and is always there, as pip compiles what it installs. CPU time is that of the process
and of those it has waited for. Usage::

    python benchmarks/bench_start.py                                 # a CPU, 8 and 1,024 environments
    python benchmarks/bench_start.py --device cuda --num-envs 1024 --updates 1 4
    python benchmarks/bench_start.py --peer sb3 "$HOME/peers/bin/python benchmarks/peers/run_sb3.py --warmup 1024"
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from results_file import append, commit

RESULTS = Path(__file__).parent / "results" / "start.csv"
LIMIT = 180  # seconds
TICKS = os.sysconf("SC_CLK_TCK")


class Start(NamedTuple):
    """Seconds of a start."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Program:
    """A program to start.

    Attributes:
        name: the name in the table.
        num_envs: number of environments, or 0 if the command says it.
        updates: numbers of updates until it counts as started, in ascending order.
        command: returns the command, given a folder.
        made: returns the number of updates that were made, given the folder and what was printed.
    """

    name: str
    num_envs: int
    updates: tuple[int, ...]
    command: Callable[[Path], list[str]]
    made: Callable[[Path, bytes], int]


def recurl(num_envs: int, options: argparse.Namespace) -> Program:
    """Return recurl's own command."""
    words = ["-m", "recurl", "train", "ppo", "--env", "recurl/MaskedCartPole-v1", "--logger", "none"]
    words += ["--num-envs", str(num_envs), "--total-steps", str(10**9), "--device", options.device, *options.options]

    def command(folder: Path) -> list[str]:
        return [sys.executable, *words, "--run-dir", str(folder / "run")]

    def made(folder: Path, _: bytes) -> int:
        metrics = folder / "run" / "metrics.csv"
        return metrics.read_bytes().count(b"\n") - 1 if metrics.exists() else 0

    return Program("recurl", num_envs, tuple(sorted(options.updates)), command, made)


def peer(name: str, command: str) -> Program:
    """Return a peer, which prints a line after its first update."""
    return Program(name, 0, (1,), lambda _: shlex.split(command), lambda _, printed: printed.count(b"\n"))


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and of the children that it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / TICKS


def start(program: Program, environment: dict[str, str]) -> list[Start]:
    """Start a program, stop it after its updates, and return the start to each number of them."""
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile() as output:
        folder, begin = Path(name), time.perf_counter()
        process = subprocess.Popen(
            program.command(folder),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        starts: list[Start] = []
        try:
            while len(starts) < len(program.updates):
                if program.made(folder, os.pread(output.fileno(), 2**20, 0)) >= program.updates[len(starts)]:
                    starts.append(Start(time.perf_counter() - begin, cpu_seconds(process.pid)))
                    continue
                if process.poll() is not None or time.perf_counter() - begin > LIMIT:
                    printed = os.pread(output.fileno(), 2**20, 0).decode(errors="replace")
                    sys.exit(f"{program.name} made no update:\n{printed[-2000:]}")
                time.sleep(0.002)
            return starts
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--num-envs", type=int, nargs="+", default=[8, 1024])
    parser.add_argument("--updates", type=int, nargs="+", default=[1])
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="further options of recurl train")
    parser.add_argument("--peer", nargs=2, action="append", default=[], metavar=("NAME", "COMMAND"))
    parser.add_argument("--repeats", type=int, default=5, help="cached starts of each program")
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--commit", default=commit(), help="what to write into the column 'commit'")
    options = parser.parse_args()
    programs = [recurl(number, options) for number in options.num_envs]
    programs += [peer(*words) for words in options.peer]

    def record(program: Program, caches: str, times: list[list[Start]]) -> None:
        for updates, starts in zip(program.updates, zip(*times, strict=True), strict=True):
            row = {
                "date": datetime.date.today().isoformat(),
                "program": program.name,
                "num_envs": program.num_envs or "",
                "updates": updates,
                "device": options.device,
                "options": " ".join(options.options) if program.name == "recurl" else "",
                "caches": caches,
                "wall_s": round(statistics.median(one.wall for one in starts), 2),
                "cpu_s": round(statistics.median(one.cpu for one in starts), 2),
                "starts": len(starts),
            }
            append(options.csv, {**row, "commit": options.commit, "torch": importlib.metadata.version("torch")})
            print(*row.values(), flush=True)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        common = {"PYTHONPYCACHEPREFIX": f"{name}/bytecode", "PYTHONDONTWRITEBYTECODE": "", "PYTHONUNBUFFERED": "1"}

        def environment(number: int) -> dict[str, str]:
            caches = {"RECURL_CACHE_DIR": "recurl", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
            return common | {variable: f"{name}/{number}/{folder}" for variable, folder in caches.items()}

        for number, program in enumerate(programs):
            start(program, common | {"RECURL_CACHE_DIR": f"{name}/bytecode-only"})
            record(program, "cold", [start(program, environment(number))])
        cached: dict[Program, list[list[Start]]] = {program: [] for program in programs}
        for _ in range(options.repeats):
            for number, program in enumerate(programs):
                cached[program].append(start(program, environment(number)))
        for program, starts in cached.items():
            record(program, "cached", starts)


if __name__ == "__main__":
    main()

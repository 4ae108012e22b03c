"""Recurrent PPO from end to end beside other libraries: appends to results/ppo.csv and draws docs/ppo_speed.png.

Every system collects and learns in a process of its own, with the same environment physics, sizes and numbers (8
environments x 128 steps, LSTM 64, 4 epochs x 4 minibatches, one thread); peers/README.md says how, and how to install
the peers. Systems take turns within each repetition, so that a slower spell of the machine hits all of them. What
counts is the CPU time of the process per environment step; ratios are medians of the ratios within a repetition. A
system that can't run is named with its reason and left out. Usage::

    python benchmarks/bench_ppo.py                               # masked CartPole
    python benchmarks/bench_ppo.py --python pufferlib=/tmp/p/bin/python peers=/tmp/q/bin/python
    python benchmarks/bench_ppo.py --task pendulum               # continuous actions; r2d2: recurl alone
    python benchmarks/bench_ppo.py --num-envs 1 8 64 256 --systems recurl pufferlib sb3
    python benchmarks/bench_ppo.py --solve 200000 --repeats 1    # steps and seconds to a mean return of 475
    python benchmarks/bench_ppo.py --profile                     # where recurl's time goes, stage by stage
    python benchmarks/bench_ppo.py --profile --top 3             # and the three hottest lines of each stage
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

import recurl

HERE = Path(__file__).parent
SPEED, SOLVED = HERE / "results" / "ppo.csv", HERE / "results" / "ppo_solved.csv"
PICTURE = HERE.parent / "docs" / "ppo_speed.png"
SMALLEST = 8192
"""Environment steps that are measured at least; twice as many for a system that is fast."""


@dataclass(frozen=True)
class System:
    """A script in peers/, and the interpreter that has what it needs."""

    script: str
    variant: str = "default"
    python: str = "peers"
    faster: int = 1
    """How many times more steps are measured."""


SYSTEMS = {
    "recurl": System("run_recurl.py", python="recurl", faster=4),
    "pufferlib": System("run_pufferlib.py", python="pufferlib", faster=4),
    "torchrl": System("run_torchrl.py"),
    "torchrl-best": System("run_torchrl.py", "best"),
    "sb3": System("run_sb3.py"),
    "sb3-shared": System("run_sb3.py", "shared"),
    "cleanrl": System("run_cleanrl.py"),
}


def main() -> None:
    """Measure what is asked for."""
    options = parse()
    if options.profile:
        for rows in options.num_envs:
            subprocess.run([*command("recurl", rows, options), "--profile", f"--top={options.top}"], check=True)
        return
    check_tests()
    for rows in options.num_envs:
        found = measure(rows, options)
        for row in solved_rows(found, rows, options) if options.solve else speed_rows(found, rows, options):
            append(SOLVED if options.solve else SPEED, row)
    if not options.solve:
        draw()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=("cartpole", "pendulum", "r2d2"), default="cartpole")
    parser.add_argument("--num-envs", type=int, nargs="+", default=[8])
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--python", nargs="*", default=[], metavar="NAME=PATH", help="interpreters of peers, pufferlib")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=SMALLEST, help="environment steps measured, of fast systems more")
    parser.add_argument("--warmup", type=int, default=2048, help="environment steps before")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--solve", type=int, default=0, help="train until solved, at most so many steps")
    parser.add_argument("--profile", action="store_true", help="recurl's stages")
    parser.add_argument("--top", type=int, default=0, help="lines of code to show for each stage of a profile")
    options = parser.parse_args()
    if options.task == "r2d2":
        options.systems = ["recurl"]
    options.python = {"recurl": sys.executable, **dict(entry.split("=", 1) for entry in options.python)}
    return options


def check_tests() -> None:
    """Refuse to measure what is broken."""
    tests = HERE.parent / "tests" / "trainers" / "test_ppo.py"
    if subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", str(tests)], check=False).returncode:
        sys.exit("The tests of PPO fail: no numbers before they pass.")


def command(name: str, rows: int, options: argparse.Namespace, seed: int = 0) -> list[str]:
    """The command line that measures one system once."""
    system = SYSTEMS[name]
    python = options.python.get(system.python, sys.executable)
    batch = rows * 128
    values = {
        "task": options.task,
        "variant": system.variant,
        "num-envs": rows,
        "steps": max(options.steps * system.faster, 2 * batch),
        "warmup": max(options.warmup, batch),
        "threads": options.threads,
        "solve": options.solve,
        "seed": seed,
    }
    return [python, str(HERE / "peers" / system.script), *(f"--{key}={value}" for key, value in values.items())]


def measure(rows: int, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Run all systems in turn, ``repeats`` times; return what each printed."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in options.systems}
    for repeat in range(options.repeats):
        for name in list(found):
            line = run_once(command(name, rows, options, seed=repeat), options.threads)
            if isinstance(line, str):
                print(f"{name} is left out: {line}", flush=True)
                del found[name]
                continue
            found[name].append(line)
            show = {key: line[key] for key in line if key not in ("parameters", "versions")}
            print(f"{time.strftime('%H:%M:%S')} {name:13s} {json.dumps(show)}", flush=True)
    return found


def run_once(line: list[str], threads: int) -> dict[str, Any] | str:
    """Return what a peer measured, or why it couldn't."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return json.loads(done.stdout.strip().splitlines()[-1])


def per_step(line: dict[str, Any], what: str, clock: str = "cpu") -> float:
    """Microseconds per environment step."""
    return line[f"{what}_{clock}_s"] / line[f"{what}_steps"] * 1e6


def speed_rows(
    found: dict[str, list[dict[str, Any]]], rows: int, options: argparse.Namespace
) -> list[dict[str, object]]:
    """One row per system: medians, and the ratio to recurl."""
    out: list[dict[str, object]] = []
    for name, lines in found.items():
        row = about(name, lines, options) | {"num_envs": rows, "steps": lines[0]["train_steps"]}
        for what in ("train", "collect"):
            times = sorted(per_step(line, what) for line in lines)
            row[f"{what}_us"] = round(statistics.median(times), 1)
            row[f"{what}_us_min"] = round(times[0], 1)
            row[f"{what}_wall_us"] = round(statistics.median(per_step(line, what, "wall") for line in lines), 1)
            own = found.get("recurl", [])
            ratios = [per_step(line, what) / per_step(mine, what) for line, mine in zip(lines, own, strict=False)]
            row[f"{what}_us_over_recurl"] = round(statistics.median(ratios), 2) if ratios else ""
        out.append(row)
    return out


def solved_rows(
    found: dict[str, list[dict[str, Any]]], rows: int, options: argparse.Namespace
) -> list[dict[str, object]]:
    """One row per run."""
    return [
        about(name, [line], options)
        | {"num_envs": rows, "seed": seed, "solved": line["solved"], "steps": line["train_steps"]}
        | {"cpu_s": round(line["train_cpu_s"], 1), "wall_s": round(line["train_wall_s"], 1)}
        for name, lines in found.items()
        for seed, line in enumerate(lines)
    ]


def about(name: str, lines: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, object]:
    """What the numbers depend on."""
    git = ["git", "-C", str(Path(recurl.__file__).parent), "describe", "--always", "--dirty"]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip(),
        "device": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "threads": options.threads,
        "task": f"masked-{options.task}" if options.task != "r2d2" else "masked-cartpole-r2d2",
        "system": name,
        "versions": " ".join(f"{package} {version}" for package, version in lines[0]["versions"].items()),
        "parameters": lines[0]["parameters"],
        "repeats": len(lines),
    }


def append(path: Path, row: dict[str, object]) -> None:
    """Add a row to the results and show it."""
    path.parent.mkdir(exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        if new:
            writer.writeheader()
        writer.writerow(row)
    print(json.dumps(row), flush=True)


def draw() -> None:
    """Draw the newest row of every system: masked CartPole, 8 environments."""
    newest: dict[str, dict[str, str]] = {}
    with SPEED.open(newline="") as file:
        for row in csv.DictReader(file):
            if (row["task"], row["num_envs"], row["threads"]) == ("masked-cartpole", "8", "1"):
                newest[row["system"]] = row
    if not newest:
        return
    rows = sorted(newest.values(), key=lambda row: -float(row["train_us"]))
    figure, axes = plt.subplots(figsize=(6, 0.4 * len(rows) + 1), layout="constrained")
    names = [row["system"] for row in rows]
    axes.barh(names, [float(row["train_us"]) for row in rows], color="#c7d3e3", label="training")
    axes.barh(names, [float(row["collect_us"]) for row in rows], height=0.4, color="#3b6ea8", label="collection alone")
    for position, row in enumerate(rows):
        axes.annotate(f" {float(row['train_us']):.0f}", (float(row["train_us"]), position), va="center")
    axes.set_xlabel("CPU microseconds per environment step, one thread")
    axes.set_title("Recurrent PPO, masked CartPole, 8 x 128, LSTM 64", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(PICTURE, dpi=80)


if __name__ == "__main__":
    main()

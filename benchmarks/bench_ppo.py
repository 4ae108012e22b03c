"""End-to-end recurrent PPO compared with other libraries: appends to results/ppo.csv and draws docs/ppo_speed.png.

Every system collects and learns in a separate process, with the same environment physics and sizes (8 environments x
128 steps, LSTM 64, 4 epochs x 4 minibatches, one thread); see peers/README.md for details and the installation of the
peers. All are started and warmed up first, and then measured in turn, about a second each, so that variations of the
machine's speed affect all of them. The measure is CPU time of the process per environment step; ratios are medians of
the ratios within a round. A system that can't run is reported with the reason and skipped. Usage::

    python benchmarks/bench_ppo.py                               # masked CartPole
    python benchmarks/bench_ppo.py --python pufferlib=/tmp/p/bin/python peers=/tmp/q/bin/python
    python benchmarks/bench_ppo.py --systems recurl recurl-before --python before=/tmp/r/bin/python --before abc12
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
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from recurl.experiments.bench_rnn import device_name
from results_file import append, commit

HERE = Path(__file__).resolve().parent
SPEED, SOLVED = HERE / "results" / "ppo.csv", HERE / "results" / "ppo_solved.csv"
COMMITS = HERE / "results" / "ppo_commits.csv"
PICTURE = HERE.parent / "docs" / "ppo_speed.png"


@dataclass(frozen=True)
class System:
    """A script in peers/, and an interpreter with its dependencies."""

    script: str
    variant: str = "default"
    python: str = "peers"
    faster: int = 1
    """Factor for the number of steps per round."""
    accelerated: bool = False
    """Whether ``recurl.accelerate`` changes its networks."""


BEFORE = "recurl-before"
"""Another commit of recurl, measured only if an interpreter that imports it is given."""
SYSTEMS = {
    "recurl": System("run_recurl.py", python="recurl", faster=4),
    BEFORE: System("run_recurl.py", python="before", faster=4),
    "pufferlib": System("run_pufferlib.py", python="pufferlib", faster=4),
    "torchrl": System("run_torchrl.py"),
    "torchrl-best": System("run_torchrl.py", "best"),
    "sb3": System("run_sb3.py"),
    "sb3-shared": System("run_sb3.py", "shared"),
    "cleanrl": System("run_cleanrl.py"),
    "rsl_rl": System("run_rsl_rl.py"),
    "skrl": System("run_skrl.py"),
}


def main() -> None:
    """Run the requested measurements."""
    options = parse()
    if options.profile:
        for rows in options.num_envs:
            sampled = [f"--profile={options.steps * 8}", f"--top={options.top}"]
            subprocess.run([*command("recurl", rows, options), *sampled], check=True)
        return
    check_tests()
    for rows in options.num_envs:
        if options.solve:
            for row in solve(rows, options):
                report(SOLVED, row)
        else:
            for row in speed(rows, options):
                report(COMMITS if BEFORE in options.systems else SPEED, row)
    if not options.solve and BEFORE not in options.systems:
        draw()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=("cartpole", "pendulum", "r2d2"), default="cartpole")
    parser.add_argument("--num-envs", type=int, nargs="+", help="8 by default, 16 for r2d2")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=[s for s in SYSTEMS if s != BEFORE])
    parser.add_argument("--python", nargs="*", default=[], metavar="NAME=PATH", help="interpreters of peers, pufferlib")
    parser.add_argument("--before", default="", help="the commit of recurl-before")
    parser.add_argument("--repeats", type=int, default=9, help="rounds; with --solve: seeds")
    parser.add_argument("--steps", type=int, default=2048, help="environment steps of a round; of fast systems 4 x")
    parser.add_argument("--warmup", type=int, default=2048, help="environment steps before")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--rollout-steps", type=int, default=128, help="steps per environment in a batch")
    parser.add_argument("--solve", type=int, default=0, help="train until solved, for at most this many steps")
    parser.add_argument("--profile", action="store_true", help="recurl's stages")
    parser.add_argument("--top", type=int, default=0, help="lines of code to show for each stage of a profile")
    options = parser.parse_args()
    options.device = "cpu"
    options.num_envs = options.num_envs or [16 if options.task == "r2d2" else 8]
    if options.task == "r2d2":
        options.systems = ["recurl"]
    options.python = {"recurl": sys.executable, **dict(entry.split("=", 1) for entry in options.python)}
    return options


def check_tests(place: str = "algorithms/test_ppo.py") -> None:
    """Exit if the tests at this place in tests/trainers fail."""
    tests = HERE.parent / "tests" / "trainers" / place
    if subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", str(tests)], check=False).returncode:
        sys.exit(f"The tests in {tests} fail: no numbers before they pass.")


def command(name: str, rows: int, options: argparse.Namespace, seed: int = 0) -> list[str]:
    """Return the command line that starts one system."""
    system = SYSTEMS[name]
    python = options.python.get(system.python, sys.executable)
    values = {
        "task": options.task,
        "variant": system.variant,
        "num-envs": rows,
        "rollout-steps": options.rollout_steps,
        "hidden-size": options.hidden_size,
        "warmup": max(options.warmup, rows * options.rollout_steps),
        "threads": options.threads,
        "solve": options.solve,
        "seed": seed,
        "device": options.device,
    }
    given = [f"--{key}={value}" for key, value in values.items()]
    return [python, str(HERE / "peers" / system.script), *given, *["--accelerate"] * system.accelerated]


class Peer:
    """A system in a separate process, which executes requests and waits in between."""

    def __init__(self, name: str, rows: int, options: argparse.Namespace, seed: int = 0) -> None:
        self.name, self.faster = name, SYSTEMS[name].faster
        self._folder = tempfile.TemporaryDirectory()  # some leave files in the working directory
        self._errors = Path(self._folder.name, "errors.txt")
        threads = str(options.threads)
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                command(name, rows, options, seed),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=self._folder.name,
                env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
            )

    def answer(self) -> dict[str, Any] | None:
        """Wait for the next line of output; if the process has ended, print the reason and return None."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        reason = (self._errors.read_text().strip().splitlines() or ["no word"])[-1]
        print(f"{self.name} is left out: {reason}", flush=True)
        return None

    def measure(self, what: str, steps: int) -> dict[str, Any] | None:
        """Let it collect or train."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what} {steps * self.faster}\n")
        self._process.stdin.flush()
        return self.answer()

    def end(self) -> None:
        """Ask the process to exit."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close(self) -> None:
        """Wait for the process to exit."""
        self.end()
        self._process.wait()
        self._folder.cleanup()


def speed(rows: int, options: argparse.Namespace) -> list[dict[str, object]]:
    """Measure all systems side by side; one row per system."""
    peers: dict[str, Peer] = {}
    facts: dict[str, dict[str, Any]] = {}
    for name in options.systems:
        peer = Peer(name, rows, options)
        words = peer.answer()
        if words is None:
            peer.close()
        else:
            peers[name], facts[name] = peer, words
    times: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for turn in range(options.repeats):
        for what in ("collect", "train"):
            for name, peer in peers.items():
                found = peer.measure(what, options.steps)
                if found is None:
                    sys.exit(f"{name} ended while measured.")
                for clock in ("cpu", "wall"):
                    times[name, what, clock].append(found[f"{clock}_s"] / found["steps"] * 1e6)
            now = ", ".join(f"{name} {times[name, what, 'cpu'][-1]:.1f}" for name in peers)
            print(f"round {turn + 1}, {what}, CPU us per step: {now}", flush=True)
    for peer in peers.values():
        peer.end()
    for peer in peers.values():
        peer.close()
    return [
        about(name, facts[name], options)
        | {"num_envs": rows, "rounds": options.repeats, "steps_per_round": options.steps * peer.faster}
        | {entry: value for what in ("train", "collect") for entry, value in summary(times, name, what).items()}
        for name, peer in peers.items()
    ]


def summary(times: dict[tuple[str, str, str], list[float]], name: str, what: str) -> dict[str, object]:
    """Return medians over the rounds, and of the ratios to recurl within each round."""
    cpu, own = times[name, what, "cpu"], times.get(("recurl", what, "cpu"), [])
    ratios = [mine / theirs for mine, theirs in zip(own, cpu, strict=False)]
    return {
        f"{what}_us": round(statistics.median(cpu), 1),
        f"{what}_us_min": round(min(cpu), 1),
        f"{what}_wall_us": round(statistics.median(times[name, what, "wall"]), 1),
        f"{what}_recurl_over_it": round(statistics.median(ratios), 3) if ratios else "",
    }


def solve(rows: int, options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Train every system until solved, with every seed; one row per run."""
    for seed in range(options.repeats):
        for name in options.systems:
            peer = Peer(name, rows, options, seed)
            found = peer.answer()
            peer.close()
            if found is not None:
                yield about(name, found, options) | {
                    "num_envs": rows,
                    "seed": seed,
                    "solved": found["solved"],
                    "steps": found["steps"],
                    "cpu_s": round(found["cpu_s"], 1),
                    "wall_s": round(found["wall_s"], 1),
                }


def about(name: str, words: dict[str, Any], options: argparse.Namespace) -> dict[str, object]:
    """Return the factors that results depend on."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": options.before if name == BEFORE else commit(),
        "device": f"{device_name(options.device)}, {os.cpu_count()} cores",
        "threads": options.threads,
        "task": {"r2d2": "masked-cartpole-r2d2", "frames": "frames"}.get(options.task, f"masked-{options.task}"),
        "system": name,
        "versions": " ".join(f"{package} {version}" for package, version in words["versions"].items()),
        "parameters": words["parameters"],
    }


def report(path: Path, row: dict[str, object]) -> None:
    """Add a row to the results and print it."""
    append(path, row)
    print(json.dumps(row), flush=True)


def newest() -> list[dict[str, str]]:
    """Return the newest run with every system: masked CartPole, 8 environments, one thread; the slowest first."""
    runs: dict[str, dict[str, dict[str, str]]] = {}
    with SPEED.open(newline="") as file:
        for row in csv.DictReader(file):
            if (row["task"], row["num_envs"], row["threads"]) == ("masked-cartpole", "8", "1"):
                runs.setdefault(row["commit"], {})[row["system"]] = row
    most = max(map(len, runs.values()), default=0)
    complete = [run for run in runs.values() if len(run) == most]
    return sorted(complete[-1].values(), key=lambda row: -float(row["train_us"])) if complete else []


def drawn(rows: list[dict[str, str]]) -> str:
    """Return the values of a figure as text, which is stored in the figure's file."""
    return "; ".join(f"{row['system']} {row['train_us']} {row['collect_us']} {row['commit']}" for row in rows)


def draw() -> None:
    """Draw the newest run with every system."""
    rows = newest()
    if not rows:
        return
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
    figure.savefig(PICTURE, dpi=80, metadata={"Description": drawn(rows)})


if __name__ == "__main__":
    main()

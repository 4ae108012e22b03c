"""Runs with the options that recurl chooses on a machine with a GPU, beside the same runs with other flags.

A case is an algorithm, a task, a cell, a size and a number of steps. Its options are left to recurl (``--device
auto``), and then changed: the other device, without CUDA graphs, without compilation, without worker processes. Updates
are timed as ``recurl bench train`` does, and the time of the whole run is that of its updates plus that of a cached
start (``bench_start.py``). ``share`` is the shortest time of all variants divided by that of the defaults: 1 if nothing
is faster. Appends to results/defaults.csv; cases that are already there for this commit are skipped. Usage::

    python benchmarks/bench_defaults.py --seconds 300
    python benchmarks/bench_defaults.py --warm 4 --part 0     # before: only compile a fourth of the cases
"""

from __future__ import annotations

import argparse
import csv
import datetime
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from recurl.trainers import ALGORITHMS, RunConfig
from recurl.trainers.run.update_times import time_run
from results_file import append, commit

RESULTS = Path(__file__).parent / "results" / "defaults.csv"
CASES = (
    "ppo --env recurl/MaskedCartPole-v1 --total-steps 150000",
    "ppo --env recurl/popgym-AutoencodeEasy-v0 --total-steps 10000000 --cell lru --hidden-size 80",
    "a2c --env recurl/TMaze-v0 --total-steps 1000000 --hidden-size 48",
    "impala --env recurl/TMaze-v0 --total-steps 3000000 --cell gru --hidden-size 80",
    "sac --env recurl/MaskedPendulum-v1 --total-steps 100000 --cell gru",
    "r2d2 --env recurl/RepeatPrevious-v0 --total-steps 200000 --hidden-size 100",
    "td3 --env recurl/MaskedPendulum-v1 --total-steps 50000 --hidden-size 72",
    "ppo --env CartPole-v1 --total-steps 300000",
    "dqn --env recurl/TMaze-v0 --total-steps 200000 --cell s5",
    "ppo --env recurl/MaskedCartPole-v1 --total-steps 2000000 --cell gru --hidden-size 96",
    "ppo --env recurl/RepeatPrevious-v0 --total-steps 20000000 --hidden-size 160",
    "ppo --env recurl/TMaze-v0 --total-steps 5000000 --cell mingru --hidden-size 128",
    "ppo --env recurl/popgym-CountRecallEasy-v0 --total-steps 2000000 --cell gru --hidden-size 256",
)
CPU_START, GPU_START, COMPILED = 2.5, 6.5, 2.5  # seconds of a cached start, and more until programs are loaded
WARM_UP, UPDATES = 4, 6


def options_of(case: str) -> RunConfig:
    """Return the options of a case, as the command line reads them."""
    algorithm, *words = shlex.split(case)
    values = dict(zip((word.removeprefix("--").replace("-", "_") for word in words[::2]), words[1::2], strict=True))
    typed: dict[str, Any] = {name: int(value) if value.isdigit() else value for name, value in values.items()}
    return ALGORITHMS[algorithm].config(**typed)


def variants_of(config: RunConfig) -> dict[str, RunConfig]:
    """Return the chosen options, and others with the same networks and number of environments."""
    found = {"default": config}
    other: dict[str, Any] = {
        "device": "cpu",
        "cuda_graph": False,
        "compile": False,
        "num_envs": type(config).usual_envs,
    }
    if config.device == "cpu":
        other = {"device": "cuda", "cuda_graph": True, "compile": True}
    found["the other device"] = replace(config, **other)
    on_gpu = config if config.device != "cpu" else found["the other device"]
    for name in ("cuda_graph", "compile"):
        found[f"--no-{name.replace('_', '-')}"] = replace(on_gpu, **{name: False})
    if config.env_workers:
        found["--env-workers 0"] = replace(config, env_workers=0, env_groups=1)
    return found


def seconds_of(config: RunConfig) -> float:
    """Return the seconds of a whole run."""
    found = time_run(config, WARM_UP, UPDATES)
    start = CPU_START if config.device == "cpu" else GPU_START + COMPILED * bool(getattr(config, "compile", False))
    return start + config.total_steps / found.frames * found.wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="begin no case after this time")
    parser.add_argument("--warm", type=int, help="only compile, in this number of processes")
    parser.add_argument("--part", type=int, default=0, help="number of this process, with --warm")
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--commit", default=commit(), help="what to write into the column 'commit'")
    options = parser.parse_args()
    begin = time.perf_counter()
    rows = csv.DictReader(options.csv.open()) if options.csv.exists() else ()
    done = {row["case"] for row in rows if row["commit"] == options.commit}
    if options.warm:
        for case in [case for case in CASES if case not in done][options.part :: options.warm]:
            for config in variants_of(options_of(case)).values():
                if getattr(config, "compile", False):
                    time_run(config, WARM_UP, 1)
        return
    for case in CASES:
        if case in done or time.perf_counter() - begin > options.seconds:
            continue
        config = options_of(case)
        times = {name: seconds_of(variant) for name, variant in variants_of(config).items()}
        best = min(times, key=lambda name: times[name])
        row = {
            "date": datetime.date.today().isoformat(),
            "case": case,
            "chosen": f"{config.device}, {config.num_envs} environments",
            "expected_s": round(config.choice.seconds.get(config.device, float("nan")), 1),
            "default_s": round(times["default"], 1),
            "best": best,
            "best_s": round(times[best], 1),
            "share": round(times[best] / times["default"], 2),
            "others": "; ".join(f"{name} {times[name]:.1f}" for name in times if name != "default"),
        }
        machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        append(options.csv, {**row, "device": machine, "commit": options.commit, "torch": torch.__version__})
        print(*row.values(), sep=" | ", flush=True)


if __name__ == "__main__":
    main()

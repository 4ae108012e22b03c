"""Learning from replay on a GPU without the host: SAC and R2D2 with slices drawn on the device, captured or not.

First, weights and rows of captured updates must be bitwise equal to those of individual launches (also compiled for the
timed ones), and a captured update is checked for synchronizations (``set_sync_debug_mode``). Then whole updates are
timed as ``recurl train`` runs them, with slices drawn on the host, on the device, on the device in a CUDA graph, and in
a graph of compiled steps. Appends to results/sac_gpu.csv. Usage::

    python benchmarks/bench_sac_gpu.py
    python benchmarks/bench_sac_gpu.py --check        # without timings
    python benchmarks/bench_sac_gpu.py --updates 50 --algorithms sac
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from recurl import __version__
from recurl.trainers import ALGORITHMS
from recurl.trainers.optim.gradient_step import GradientStep
from results_file import append, commit

RESULTS = Path(__file__).parent / "results" / "sac_gpu.csv"
ENVS = {"sac": "recurl/MaskedPendulum-v1", "td3": "recurl/MaskedPendulum-v1"}
OTHER = "recurl/MaskedCartPole-v1"
SMALL = {"num_envs": 16, "rollout_steps": 8, "slices": 8, "slice_length": 16, "learning_starts": 200, "hidden_size": 32}
FULL = {"num_envs": 256, "rollout_steps": 8, "slices": 64, "slice_length": 32, "learning_starts": 5_000}
MODES = {
    "host": {"drawn_on": "host"},
    "device": {"drawn_on": "device"},
    "graph": {"cuda_graph": True},
    "graph, compiled": {"cuda_graph": True, "compile": True},
}
CHECKED = {  # with these options; whether also compiled
    "dqn": ({**SMALL, "target_interval": 16, "drawn_by": "trajectory"}, False),
    "r2d2": (FULL, True),
    "sac": ({**FULL, "burn_in": 4}, True),
    "sac, choices": ({**SMALL, "env": OTHER, "prioritized": True}, False),
    "td3": ({**SMALL, "prioritized": True, "gradient_steps": 3}, False),
}
UPDATES = 14  # number of compared updates
WARM_UP = 5  # updates in which steps are compiled and graphs captured


def main() -> None:
    """Check, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="*", default=["sac", "r2d2"])
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("--no-compile", action="store_true", help="skip compiled steps")
    parser.add_argument("--csv", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")  # as recurl train does on a GPU
    for name, (changes, compiled) in CHECKED.items():
        for programs in (False, True) if compiled and not options.no_compile else (False,):
            check(name, {**changes, "compile": programs})
    if options.check:
        return
    print(
        f"{'algorithm':10} {'slices':16} {'update ms':>10} {'learning ms':>12} {'gradient steps/s':>17} "
        f"{'env steps/s':>12}"
    )
    for kind in options.algorithms:
        for mode, changes in MODES.items():
            if not (options.no_compile and "compile" in changes):
                measure(kind, mode, options)


def learner_of(kind: str, changes: dict[str, Any]) -> Any:
    """Return a learner on the GPU."""
    kind = kind.partition(",")[0]
    options = {"env": ENVS.get(kind, OTHER), "cell": "gru", "device": "cuda", "total_steps": 10**9, **changes}
    return ALGORITHMS[kind].learner(ALGORITHMS[kind].config(**options))


def check(name: str, options: dict[str, Any]) -> None:
    """Compare captured updates with individual launches, and check for synchronizations."""
    (rows, weights), (captured_rows, captured_weights) = (
        run(name, options, captured=captured) for captured in (False, True)
    )
    same = [torch.equal(value, other) for value, other in zip(weights, captured_weights, strict=True)]
    said = f"{name}{', compiled' * options['compile']}: captured updates"
    if not all(same) or repr(rows) != repr(captured_rows):
        sys.exit(f"{said} differ, in {same.count(False)} of {len(same)} weights:\n{rows}\n{captured_rows}")
    print(f"{said} are those that are launched one operation after another, bit for bit", flush=True)


def run(name: str, options: dict[str, Any], *, captured: bool) -> tuple[list[dict[str, float]], list[torch.Tensor]]:
    """Return the rows and the weights of some updates."""
    learner = learner_of(name, {**options, "drawn_on": "device", "cuda_graph": captured})
    if not captured:  # the same optimizer, with its state on the GPU
        for part in learner.parts().values():
            if isinstance(part, GradientStep):
                make_capturable(part)
    rows = [learner.learn(learner.collect()) for _ in range(UPDATES)]
    weights = [parameter.detach().clone() for parameter in learner.loss.parameters()]
    if captured:
        look_for_waits(name, learner)
    learner.close()
    return rows, weights


def make_capturable(step: GradientStep) -> None:
    """Let the optimizer keep its step size on the GPU, as in a graph."""
    for group in step.optimizer.param_groups:
        group["capturable"] = True
        group["lr"] = torch.tensor(group["lr"], device="cuda")


def look_for_waits(name: str, learner: Any) -> None:
    """Report where a captured update waits for the GPU before its metrics are read."""
    batch = learner.collect()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        learner.learn_later(batch)
    except RuntimeError as error:
        print(f"{name}: a captured update WAITS for the GPU: {error}", flush=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def measure(kind: str, mode: str, options: argparse.Namespace) -> None:
    """Time whole updates, and learning only."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    learner = learner_of(kind, {**FULL, **MODES[mode]})
    config = learner.config
    begin = time.perf_counter()
    while learner.env_steps < config.learning_starts:
        learner.learn(learner.collect())
    for _ in range(WARM_UP):
        learner.learn(learner.collect())
    set_up = time.perf_counter() - begin
    learning = list[float]()
    torch.cuda.synchronize()
    begin, read = time.perf_counter(), None
    for _ in range(options.updates):  # one update ahead of the GPU, as in a run
        launched = learner.learn_later(learner.collect())
        if read is not None:
            read()
        read = launched
    if read is not None:
        read()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begin) / options.updates
    for _ in range(options.updates):
        batch = learner.collect()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        learner.learn(batch)
        torch.cuda.synchronize()
        learning.append(time.perf_counter() - begin)
    learner.close()
    learned = statistics.median(learning)
    row = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "recurl": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "algorithm": kind,
        "mode": mode,
        "cell": config.cell,
        "hidden_size": config.hidden_size,
        "num_envs": config.num_envs,
        "rollout_steps": config.rollout_steps,
        "gradient_steps": config.gradient_steps,
        "tokens": config.slices * config.slice_length,
        "update_ms": round(seconds * 1e3, 3),
        "learning_ms": round(learned * 1e3, 3),
        "gradient_steps_per_s": round(config.gradient_steps / learned, 1),
        "env_steps_per_s": round(config.frames_per_batch / seconds),
        "set_up_s": round(set_up, 1),
        "peak_GB": round(torch.cuda.max_memory_allocated() / 1e9, 3),
    }
    append(options.csv, row)
    print(
        f"{kind:10} {mode:16} {row['update_ms']:10.2f} {row['learning_ms']:12.2f} {row['gradient_steps_per_s']:17,.0f} "
        f"{row['env_steps_per_s']:12,}",
        flush=True,
    )


if __name__ == "__main__":
    main()

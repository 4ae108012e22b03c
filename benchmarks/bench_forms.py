"""Price of each faster form: the same training with the form and without it, in one process.

Every learner is built and warmed up with one form taken out of its table, then all are timed in alternating rounds, so
that variations of the machine's speed affect all of them. Ratios are medians of the ratios within a round: 1.05 means
that the work takes 5 % longer without the form. Appends to results/forms.csv. Usage::

    python benchmarks/bench_forms.py                 # on a GPU if there is one, captured and compiled, else on a CPU
    python benchmarks/bench_forms.py --cases ppo     # some cases
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import time
import timeit
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from recurl.execution.executor import FORMS
from recurl.trainers import ALGORITHMS
from recurl.trainers.policies.steps import AgentStep
from results_file import append, commit

RESULTS = Path(__file__).parent / "results" / "forms.csv"
CARTPOLE, PENDULUM = "recurl/MaskedCartPole-v1", "recurl/MaskedPendulum-v1"
ON_GPU = {"vectorization": "device", "device": "cuda", "cuda_graph": True, "compile": True}
REPLAY = {"slices": 64, "slice_length": 32, "gradient_steps": 8, "learning_starts": 4096, "prioritized": True}
SCALED = {"normalize_observations": False, "scale_rewards": False}
CPU_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("ppo", {"env": CARTPOLE, "num_envs": 8, "rollout_steps": 128, "hidden_size": 64}),
    "ppo, pendulum": ("ppo", {"env": PENDULUM, "num_envs": 8, "rollout_steps": 128, "hidden_size": 64}),
    "a2c": ("a2c", {"env": CARTPOLE, "num_envs": 8, "rollout_steps": 32, "hidden_size": 64}),
    "sac": ("sac", {"env": PENDULUM, "num_envs": 4, "rollout_steps": 32, "hidden_size": 64, "gradient_steps": 4}),
}
GPU_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    f"ppo, {cell}, {envs} x {steps}": (
        "ppo",
        {
            "env": CARTPOLE,
            "cell": cell,
            "hidden_size": hidden,
            "num_envs": envs,
            "rollout_steps": steps,
            "sequence_length": steps,
            "epochs": 4,
            "minibatches": 4,
            **SCALED,
            **ON_GPU,
        },
    )
    for cell, envs, steps, hidden in (("gru", 4096, 64, 128), ("gru", 1024, 128, 64), ("lstm", 1024, 128, 64))
} | {
    "sac": ("sac", {"env": PENDULUM, "cell": "gru", "num_envs": 256, "rollout_steps": 16, **REPLAY, **ON_GPU}),
    "r2d2": ("r2d2", {"env": CARTPOLE, "cell": "gru", "num_envs": 256, "rollout_steps": 16, **REPLAY, **ON_GPU}),
}

STEP = "recurl.trainers.optim.gradient_step:GradientStep.reference_step"


@contextmanager
def without(form: str) -> Generator[None]:
    """Take a form out of its table inside the block."""

    def no_columns(graph: Any, rows: int, count: int) -> Any:
        *_, output = graph.graph.nodes
        return graph, [None] * count, [None] * len(output.args[0])

    with {
        "nothing": lambda: patch.dict(FORMS),
        "fused PPO": lambda: patch.dict(FORMS, {"recurl.objectives.ppo:ClipPPOLoss.gradients": []}),
        "C++ losses": lambda: patch.dict(FORMS, {method: [] for method in FORMS if method != STEP}),
        "flat Adam": lambda: patch.dict(FORMS, {STEP: []}),
        "C++ policy": lambda: patch("recurl.collectors.collector.CompiledNetwork", lambda network: network),
        "Triton step": lambda: patch("recurl.recurrence.stack._is_on_gpu", lambda x: False),
        "small products": lambda: patch("recurl.execution.traced.small_product", lambda *_: None),
        "columns": lambda: patch.multiple(
            "recurl.execution.traced", scalarize_loop=no_columns, take_constants=lambda graph: {}
        ),
    }[form]():
        yield


CPU_FORMS = ("nothing", "fused PPO", "C++ losses", "flat Adam", "C++ policy")
GPU_FORMS = ("nothing", "flat Adam", "Triton step", "columns", "small products")


def main() -> None:
    """Measure every case, and the steps of an exported policy."""
    gpu = torch.cuda.is_available()
    cases = GPU_CASES if gpu else CPU_CASES
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=[*cases, "export"], help="beginnings of their names")
    parser.add_argument("--forms", nargs="*", default=GPU_FORMS if gpu else CPU_FORMS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--commit", default=commit(), help="what to write into the column 'commit'")
    parser.add_argument("--csv", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high" if gpu else "highest")
    for name, (algorithm, changes) in cases.items():
        if name.startswith(tuple(options.cases)):
            for row in measure(algorithm, changes, options.forms, options.rounds):
                report(name, row, options)
    if not gpu and "export" in options.cases:
        report("step of an exported policy, one row", one_row(), options)


def measure(algorithm: str, changes: dict[str, Any], forms: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each form that is taken out."""
    learners: dict[str, Any] = {}
    for form in dict.fromkeys(["nothing", *forms]):
        with without(form):
            learner: Any = ALGORITHMS[algorithm].learner(ALGORITHMS[algorithm].config(total_steps=10**9, **changes))
            while learner.env_steps < getattr(learner.config, "learning_starts", 0):
                learner.learn(learner.collect())
            for _ in range(5):
                learner.learn(learner.collect())
            learners[form] = learner
    times: dict[tuple[str, str], list[float]] = {
        (form, what): [] for form in learners for what in ("update", "collect")
    }
    for number in range(rounds):
        for form, learner in list(learners.items())[:: 1 if number % 2 else -1]:
            with without(form):
                times[form, "update"].append(timed(lambda learner=learner: learner.learn(learner.collect())))
                times[form, "collect"].append(timed(learner.collect))
    for form in learners:
        row: dict[str, Any] = {"without": form}
        for what in ("update", "collect"):
            ratios = [a / b for a, b in zip(times[form, what], times["nothing", what], strict=True)]
            row[f"{what}_ms"] = round(statistics.median(times[form, what]), 3)
            row[f"{what}_ratio"] = round(statistics.median(ratios), 3)
        yield row
    for learner in learners.values():
        learner.close()
    gc.collect()


def timed(run: Callable[[], Any]) -> float:
    """Return the milliseconds of a call: of the GPU if there is one, else of the process's CPU time."""
    if not torch.cuda.is_available():
        begin = time.process_time()
        run()
        return (time.process_time() - begin) * 1e3
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def one_row() -> dict[str, Any]:
    """Compare a step on NumPy arrays in place with the same program on tensors."""
    learner: Any = ALGORITHMS["ppo"].learner(ALGORITHMS["ppo"].config(total_steps=10**6, **CPU_CASES["ppo"][1]))
    _, function = AgentStep(learner.agent.eval().requires_grad_(False), learner.collector.env).compiled()
    row, tensors = function.one_row(), [torch.zeros(1, *port.shape, dtype=port.dtype) for port in function.inputs]
    found = {"nothing": [], "NumPy one-row form": []}
    for _ in range(15):
        found["nothing"].append(min(timeit.repeat(row.run, number=2000, repeat=3)) / 2)
        found["NumPy one-row form"].append(min(timeit.repeat(lambda: function(tensors), number=2000, repeat=3)) / 2)
    learner.close()
    base, other = (statistics.median(times) for times in found.values())
    return {"without": "NumPy one-row form", "update_ms": round(other, 5), "update_ratio": round(other / base, 3)}


def report(case: str, row: dict[str, Any], options: argparse.Namespace) -> None:
    """Append a row to the results and print it."""
    device = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()}, {os.cpu_count()} cores"
    )
    stamp = {"date": time.strftime("%Y-%m-%d"), "commit": options.commit, "device": device, "torch": torch.__version__}
    empty = {"update_ms": "", "update_ratio": "", "collect_ms": "", "collect_ratio": ""}
    append(options.csv, {**stamp, "case": case, "without": row["without"], **empty, **row})
    print(case, row, flush=True)


if __name__ == "__main__":
    main()

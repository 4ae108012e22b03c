"""Recurrent modules under torch.compile on a GPU, compared with eager mode and torch.nn: results/compile_gpu.csv.

First checks each case: the compiled module is one graph, gives eager mode's features and gradients, and launches the
same kernels of recurl, by name and count, except for the one that finds the slots of a batch, which the operators of
the forward and backward passes each launch. No times are printed if a check fails. Then milliseconds of forward and
backward:

* busy: GPU time without host gaps.
* wall: successive calls, waiting for the GPU after each.

Usage::

    python benchmarks/bench_compile_gpu.py
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench_eager_gpu import SHAPES, Case, Problem, Step, compile_in_parallel, cudnn
from bench_rnn_gpu import busy, wall
from recurl.core.relative_error import relative_error
from results_file import append, commit

RESULTS = Path(__file__).parent / "results" / "compile_gpu.csv"
CASES = [Case(cell, *shape, 0.02) for shape in SHAPES[1:] for cell in ("lstm", "gru")]
ERROR = 1e-5  # relative: pointwise operations around the layer may be rounded differently
WALKS = ("forward_kernel", "backward_kernel", "arrange_kernel", "restore_kernel", "sums_kernel", "previous_kernel")


def compiled(problem: Problem) -> Step:
    """Return the problem's step with a compiled module."""
    module = torch.compile(problem.module, fullgraph=True, dynamic=False)

    def step() -> tuple[Tensor, ...]:
        data = TensorDict({"o": problem.x, "is_init": problem.is_init, **problem.states}, problem.shape)
        features = module(data)["f"]
        gradients = torch.autograd.grad(features, [problem.x, *problem.module.parameters()], problem.grad)
        return features.detach(), *gradients

    return step


def kernels_of(step: Step) -> Counter[str]:
    """Count the launches of each of recurl's kernels in a step."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    return Counter({event.key: event.count for event in found.key_averages() if event.key.endswith(WALKS)})


def check(case: Case, eager: Step, quick: Step) -> bool:
    """Check a case, and print failures."""
    worst = max(relative_error(a, b) for a, b in zip(quick(), eager(), strict=True))
    mine, theirs = kernels_of(quick), kernels_of(eager)
    results = {f"error {worst:.1e} <= {ERROR}": worst <= ERROR}
    results[f"kernels {dict(mine)}, in eager mode {dict(theirs)}"] = bool(mine) and mine == theirs
    for name, passed in results.items():
        if not passed:
            print("FAIL", case, name)
    return all(results.values())


def main() -> None:
    """Check, time, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="", help="value of the column 'commit'; read from git by default")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    compile_in_parallel()
    versions = {"commit": options.commit or commit(), "device": torch.cuda.get_device_name()}
    versions |= {package: importlib.metadata.version(package) for package in ("torch", "triton")}
    passed, rows = True, list[dict[str, Any]]()
    for case in CASES:
        torch._dynamo.reset()  # otherwise it stops compiling after a number of sizes
        problem = Problem(case)
        steps = {"compiled": compiled(problem), "eager": problem.step, "cudnn": cudnn(case, problem)}
        passed = check(case, steps["eager"], steps["compiled"]) and passed
        keys = {"cell": case.cell, "H": case.hidden, "B": case.rows, "T": case.length, "resets": case.resets}
        for what, step in steps.items() if passed else ():
            rows.append({**keys, "what": what, "busy": round(busy(step)[0], 4), "wall": round(wall(step), 4)})
    if not passed:
        sys.exit("No times: see above.")
    for row in rows:
        append(options.csv, {**row, **versions})
        print(*(f"{key}={value}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    main()

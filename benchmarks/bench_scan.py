"""The scan backend under torch.compile against torchrl's own eager scan on the CPU; appends to results/scan.csv.

Batches, checks and timing are those of ``bench_rnn_cpu.py``: one pass of the module and the gradients of x and of every
weight, same Parameters, one thread, CPU time of the process, implementations in turn. Compilation is not included.
torchrl is in the extra ``peers`` and needs hoptorch for its scan; without them there are no ratios. Usage::

    python benchmarks/bench_scan.py                                       # the whole table, about 15 minutes
    python benchmarks/bench_scan.py --cells gru --hidden 64 --mean 20
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import nn

import recurl.modules
from bench_rnn_cpu import EQUAL, NETS, TOLERANCE, gradients, machine, make_batch, module_of, peer
from recurl.core.relative_error import relative_error
from recurl.diagnostics import take_turns
from results_file import append

RESULTS = Path(__file__).parent / "results" / "scan.csv"
COMPILED, EAGER, PEER = "scan compiled", "scan eager", "torchrl scan eager"


def main() -> None:
    """Measure every requested combination."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=["lstm", "gru"])
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096])
    parser.add_argument("--mean", nargs="+", default=["20", "100", EQUAL], help="mean tokens of a segment")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30, help="no new round of one case after this many")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for case in itertools.product(options.cells, options.hidden, options.tokens, options.mean):
        measure(*case, options)


def measure(cell: str, hidden: int, tokens: int, mean: str, options: argparse.Namespace) -> None:
    """Check, time and record one case."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    net = NETS[cell](hidden, hidden, batch_first=True)
    batch = make_batch(cell, hidden, tokens, mean)
    modules: dict[str, nn.Module] = {
        COMPILED: torch.compile(module_of(recurl.modules, net, batch, "scan"), fullgraph=True),
        EAGER: module_of(recurl.modules, net, batch, "scan"),
    }
    torchrl = peer()
    if torchrl is not None:
        modules[PEER] = module_of(torchrl, net, batch, "scan")
    cotangent = torch.randn(*batch.shape, hidden)
    calls = {name: lambda module=module: run(module, net, batch, cotangent) for name, module in modules.items()}
    exact = run(module_of(recurl.modules, net, batch, "loop"), net, batch, cotangent)
    for name, call in calls.items():
        for found, expected in zip(call(), exact, strict=True):
            error = relative_error(found, expected)
            if not error <= TOLERANCE:
                sys.exit(f"{name} differs from the step loop by {error:.1e}: no numbers.")
    times = take_turns(calls, options.rounds, options.seconds, clock=time.process_time)
    write(times, {"cell": cell, "H": hidden, "N": tokens, "mean_segment": mean})


def run(module: nn.Module, net: nn.Module, batch: TensorDict, cotangent: torch.Tensor) -> list[torch.Tensor]:
    """Run one pass and compute its gradients."""

    def features(x: torch.Tensor) -> torch.Tensor:
        with recurl.modules.set_recurrent_mode(True):  # torchrl's modules too
            return module(batch.copy().set("x", x))["y"]

    return gradients(features, net, batch, cotangent)


def write(times: dict[str, list[float]], case: dict[str, object]) -> None:
    """Append a row to the results and print it."""
    medians = {name: statistics.median(values) * 1e3 for name, values in times.items()}
    row = {
        **machine(),
        **case,
        **{f"{name}_ms": f"{medians[name]:.1f}" if name in medians else "" for name in (COMPILED, EAGER, PEER)},
        "rounds": len(times[COMPILED]),
        "torchrl_over_compiled": f"{medians[PEER] / medians[COMPILED]:.2f}" if PEER in medians else "",
    }
    append(RESULTS, row)
    print(*(f"{name}={value}" for name, value in list(row.items())[6:]), flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main()

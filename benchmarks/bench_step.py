"""A step of recurrent modules on the CPU against torchrl's and torch.nn; appends to results/step.csv.

Timed is the cost of a policy per environment step: one call of the module on a TensorDict of B rows, without gradients,
which reads value, states and ``is_init`` and writes features and states. torch.nn is called on tensors; it does not
support resets, and there are none. All have the same Parameters. First, their results are compared with float64, and
nothing is printed if they differ. Times are CPU time of the process, with one thread; implementations are measured in
turn. torchrl is in the extra ``peers``; without it, ratios to it stay empty. Usage::

    python benchmarks/bench_step.py                       # the whole table, about a minute
    python benchmarks/bench_step.py --cells gru --batch 1
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

import recurl.modules
from bench_rnn_cpu import NETS, machine, peer
from recurl.core.relative_error import relative_error
from results_file import append

RESULTS = Path(__file__).parent / "results" / "step.csv"
OURS, PEER, NN = "recurl", "torchrl", "torch.nn"
TOLERANCE = 1e-5


def main() -> None:
    """Measure every requested combination."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=["lstm", "gru"])
    parser.add_argument("--hidden", type=int, nargs="+", default=[64])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--calls", type=int, default=100, help="calls per round")
    options = parser.parse_args()
    tests = Path(__file__).parents[1] / "tests" / "recurrence" / "test_cpu_step.py"
    if subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", str(tests)], check=False).returncode:
        sys.exit("The tests of the step fail: no numbers before they pass.")
    torch.set_num_threads(1)
    for case in itertools.product(options.cells, options.hidden, options.batch, options.layers):
        with torch.no_grad():
            measure(*case, options)


def measure(cell: str, hidden: int, batch: int, layers: int, options: argparse.Namespace) -> None:
    """Check, time and record all implementations of one case."""
    torch.manual_seed(0)
    net = NETS[cell](hidden, hidden, layers, batch_first=True)
    states = ("h", "c")[: 1 + (cell == "lstm")]
    given = {name: torch.randn(batch, layers, hidden) for name in states}
    data = TensorDict(
        {"x": torch.randn(batch, hidden), "is_init": torch.zeros(batch, 1, dtype=torch.bool), **given}, [batch]
    )
    calls: dict[str, Callable[[], Tensor]] = {OURS: module_call(recurl.modules, net, data)}
    torchrl = peer()
    if torchrl is not None:
        calls[PEER] = module_call(torchrl, net, data)
    calls[NN] = torch_call(net, data)
    exact = torch_call(copy.deepcopy(net).double(), data.apply(lambda value: value.double()))()
    for name, call in calls.items():
        error = relative_error(call(), exact)
        if not error <= TOLERANCE:
            sys.exit(f"{name} differs from float64 by {error:.1e}: no numbers.")
    write(take_turns(calls, options), {"cell": cell, "H": hidden, "B": batch, "layers": layers})


def module_call(modules: Any, net: nn.Module, data: TensorDict) -> Callable[[], Tensor]:
    """Return a recurrent module of recurl or torchrl around ``net``, in sequential mode."""
    cell = "lstm" if isinstance(net, nn.LSTM) else "gru"
    states = [key for key in ("h", "c") if key in data]
    out_keys = ["y", *(("next", key) for key in states)]
    module = {"lstm": modules.LSTMModule, "gru": modules.GRUModule}[cell](
        **{cell: net}, in_keys=["x", *states], out_keys=out_keys
    )
    own = data.clone()
    return lambda: module(own)["y"]


def torch_call(net: nn.Module, data: TensorDict) -> Callable[[], Tensor]:
    """Return a call of torch.nn on a sequence of length 1."""
    x = data["x"].unsqueeze(1)
    states = tuple(data[key].transpose(0, 1).contiguous() for key in ("h", "c") if key in data)
    return lambda: net(x, states if len(states) == 2 else states[0])[0][:, 0]


def take_turns(calls: dict[str, Callable[[], Tensor]], options: argparse.Namespace) -> dict[str, float]:
    """Return the median microseconds of each call, measured in rounds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(options.rounds):
        for name, call in calls.items():
            start = time.process_time()
            for _ in range(options.calls):
                call()
            times[name].append((time.process_time() - start) / options.calls * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def write(medians: dict[str, float], case: dict[str, object]) -> None:
    """Append a row to the results and print it."""
    ours = medians[OURS]
    row = {
        **machine(),
        **case,
        **{f"{name}_us": f"{medians[name]:.1f}" if name in medians else "" for name in (OURS, PEER, NN)},
        **{f"{OURS}_over_{name}": f"{ours / medians[name]:.2f}" if name in medians else "" for name in (PEER, NN)},
    }
    append(RESULTS, row)
    print(*(f"{name}={value}" for name, value in list(row.items())[6:]), flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="torchrl")
    main()

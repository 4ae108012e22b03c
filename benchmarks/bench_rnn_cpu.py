"""Forward and backward of recurrent modules on the CPU against torchrl's and torch.nn; appends to results/rnn_cpu.csv.

Every implementation has the same Parameters and gets the same batch: rows of 512 tokens with random resets, cut into
segments of a given mean length ("512": no resets, equal rows; "512-ragged": rows of 2048 tokens, with resets). Timed
are one pass of the module over the batch and the gradients of x and of every weight. First, all features and gradients
are compared with a float64 step loop, and nothing is printed if they differ. Times are CPU time of the process with one
thread, else wall time; implementations are measured in turn. torch.nn runs equal rows only. torchrl is in the extra
``peers``; without it, ratios to its ``pad`` stay empty. Usage::

    python benchmarks/bench_rnn_cpu.py                                    # the whole table, about 15 minutes
    python benchmarks/bench_rnn_cpu.py --cells lstm --hidden 64 --tokens 4096
    python benchmarks/bench_rnn_cpu.py --threads 2
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.metadata
import itertools
import platform
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

import recurl
import recurl.modules
from recurl.core.relative_error import relative_error
from recurl.diagnostics import take_turns
from recurl.recurrence.cpu import instruction_sets
from results_file import append, commit

ROW = 512
EQUAL, RAGGED = "512", "512-ragged"
RESULTS = Path(__file__).parent / "results" / "rnn_cpu.csv"
NETS = {"lstm": nn.LSTM, "gru": nn.GRU}
PAD, NN = "torchrl-pad", "torch.nn"
TOLERANCE = 2e-5

Run = Callable[[Tensor], Tensor]


def main() -> None:
    """Measure every requested combination."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=["lstm", "gru"])
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--mean", nargs="+", default=["20", "100", EQUAL, RAGGED], help="mean tokens of a segment")
    parser.add_argument("--backends", nargs="+", default=["cpu", "loop"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=25, help="no new round of one case after this many")
    options = parser.parse_args()
    check_tests()
    torch.set_num_threads(options.threads)
    for case in itertools.product(options.cells, options.hidden, options.tokens, options.mean):
        measure(*case, options)


def check_tests() -> None:
    """Exit if the tests fail."""
    tests = Path(__file__).parents[1] / "tests" / "recurrence" / "test_cpu.py"
    if subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", str(tests)], check=False).returncode:
        sys.exit("The tests of the cpu backend fail: no numbers before they pass.")


def measure(cell: str, hidden: int, tokens: int, mean: str, options: argparse.Namespace) -> None:
    """Check, time and record all implementations of one case."""
    torch.manual_seed(0)
    net = NETS[cell](hidden, hidden, batch_first=True)
    batch = make_batch(cell, hidden, tokens, mean)
    runs: dict[str, Run] = {name: module_run(recurl.modules, net, batch, name) for name in options.backends}
    torchrl = peer()
    if torchrl is not None:
        runs[PAD] = module_run(torchrl, net, batch, "pad")
    if mean == EQUAL:
        runs[NN] = torch_run(net, batch)
    cotangent = torch.randn(*batch.shape, hidden)
    double = copy.deepcopy(net).double()
    in_double = batch.apply(lambda value: value if value.dtype == torch.bool else value.double())
    exact = gradients(module_run(recurl.modules, double, in_double, "loop"), double, batch, cotangent)
    for name, run in runs.items():
        for found, expected in zip(gradients(run, net, batch, cotangent), exact, strict=True):
            error = relative_error(found, expected)
            if not error <= TOLERANCE:
                sys.exit(f"{name} differs from the float64 step loop by {error:.1e}: no numbers.")
    times = take_turns(
        {name: lambda run=run: gradients(run, net, batch, cotangent) for name, run in runs.items()},
        options.rounds,
        options.seconds,
        clock=time.process_time if options.threads == 1 else time.perf_counter,
    )
    segments = int(batch["is_init"].sum())
    write(times, {"cell": cell, "H": hidden, "N": tokens, "mean_segment": mean, "segments": segments}, options)


def make_batch(cell: str, hidden: int, tokens: int, mean: str) -> TensorDict:
    """Return rows with random resets and a stored state at every token."""
    generator = torch.Generator().manual_seed(1)
    row = 4 * ROW if mean == RAGGED else ROW
    shape = (tokens // row, row)
    is_init = torch.zeros(*shape, 1, dtype=torch.bool)
    if mean != EQUAL:
        is_init = torch.rand(*shape, 1, generator=generator) < 1 / int(mean.removesuffix("-ragged"))
    is_init[:, 0] = True
    states = {
        name: torch.randn(*shape, 1, hidden, generator=generator) * 0.3 for name in ("h", "c")[: 1 + (cell == "lstm")]
    }
    return TensorDict({"x": torch.randn(*shape, hidden, generator=generator), "is_init": is_init, **states}, shape)


def module_of(modules: Any, net: nn.Module, batch: TensorDict, backend: str) -> Any:
    """Return a recurrent module of recurl or torchrl around ``net``."""
    cell = "lstm" if isinstance(net, nn.LSTM) else "gru"
    states = [key for key in ("h", "c") if key in batch]
    return {"lstm": modules.LSTMModule, "gru": modules.GRUModule}[cell](
        **{cell: net},
        in_keys=["x", *states],
        out_keys=["y", *(("next", key) for key in states)],
        recurrent_backend=backend,
    )


def module_run(modules: Any, net: nn.Module, batch: TensorDict, backend: str) -> Run:
    """Return the pass of such a module over whole sequences."""
    module = module_of(modules, net, batch, backend)

    def run(x: Tensor) -> Tensor:
        with modules.set_recurrent_mode(True):
            return module(batch.copy().set("x", x))["y"]

    return run


def torch_run(net: nn.Module, batch: TensorDict) -> Run:
    """Return the pass of torch.nn over equal rows."""
    states = [batch[key][:, 0].transpose(0, 1).contiguous() for key in ("h", "c") if key in batch]
    return lambda x: net(x, tuple(states) if len(states) == 2 else states[0])[0]


def gradients(run: Run, net: nn.Module, batch: TensorDict, cotangent: Tensor) -> list[Tensor]:
    """Return features, and gradients of x and all weights; this is the timed function."""
    x = batch["x"].to(net.weight_ih_l0.dtype).requires_grad_()
    y = run(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *net.parameters()], cotangent.to(y.dtype))]


def peer() -> Any:
    """Return ``torchrl.modules``, or None."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module("torchrl.modules")
        except ImportError:
            return None


def write(times: dict[str, list[float]], case: dict[str, object], options: argparse.Namespace) -> None:
    """Append one row per implementation to the results and print it."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, median in medians.items():
        ratios = {
            f"{other}_over_this": f"{medians[other] / median:.2f}" if other in medians else "" for other in (PAD, NN)
        }
        row = {
            **machine(),
            "threads": options.threads,
            "clock": "cpu" if options.threads == 1 else "wall",
            **case,
            "implementation": name,
            "median_ms": f"{median * 1e3:.2f}",
            "rounds": len(times[name]),
            **ratios,
        }
        append(RESULTS, row)
        print(*case.values(), name, row["median_ms"], "ms", *ratios.values(), flush=True)


def machine() -> dict[str, object]:
    """Return the factors other than the options that results depend on."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "device": f"{platform.machine()} CPU, {instruction_sets()[-1]}",
        "recurl": recurl.__version__,
        "torch": torch.__version__,
        "torchrl": importlib.metadata.version("torchrl") if peer() is not None else "",
    }


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="torchrl")
    main()

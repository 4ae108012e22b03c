"""Forward and backward of a recurrent module on TensorDicts in eager mode, and of torch.nn: results/eager_gpu.csv.

First checks: float32 products in tf32 against float64; bitwise equality of the first call, launched by Triton, and
later ones, which launch the compiled kernels directly; unaligned tensors; a captured CUDA graph on other inputs.
Nothing is timed if a check fails. Then milliseconds of each case:

* busy: GPU time without host gaps.
* wall: successive calls, waiting for the GPU after each.
* host: calls issued without waiting, if the GPU is faster than the host; "one thread" with autograd's
  backward pass in the calling thread (``torch.autograd.set_multithreading_enabled(False)``).

Works with any version of recurl, so that versions can be compared with ``--label``. Usage::

    python benchmarks/bench_eager_gpu.py
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from bench_rnn_gpu import busy, wall
from recurl.core.relative_error import relative_error
from recurl.modules import GRUModule, LSTMModule
from results_file import append, commit

RESULTS = Path(__file__).parent / "results" / "eager_gpu.csv"
DEVICE = torch.device("cuda")
SHAPES = [(16, 16, 64), (64, 64, 512), (128, 512, 64), (256, 64, 512)]
CELLS = ("lstm", "gru")
MODULES = {"lstm": LSTMModule, "gru": GRUModule}
PEERS = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}
GATE = 2e-3  # relative error of tf32
HOST_CALLS = 100
Step = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """A module with H inputs and H units on B rows of T steps; steps begin an episode with probability ``resets``."""

    cell: str
    hidden: int
    rows: int
    length: int
    resets: float = 0.0


class Problem:
    """A case with its data."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator(DEVICE).manual_seed(1)
        self.case, hidden = case, case.hidden
        self.shape = (case.rows, case.length)
        keys = ["h", "c"] if case.cell == "lstm" else ["h"]
        self.module = MODULES[case.cell](
            input_size=hidden, hidden_size=hidden, in_keys=["o", *keys],
            out_keys=["f", *(("next", key) for key in keys)], recurrent_backend="triton",
            default_recurrent_mode=True, recurrent_matmul_precision="tf32", device=DEVICE,
        )  # fmt: skip

        def normal(*shape: int) -> Tensor:
            return torch.randn(*self.shape, *shape, generator=generator, device=DEVICE)

        self.x = normal(hidden).requires_grad_()
        self.states = {key: normal(1, hidden) for key in keys}
        self.is_init = torch.rand(*self.shape, 1, generator=generator, device=DEVICE) < case.resets
        self.grad = normal(hidden)

    def step(self) -> tuple[Tensor, ...]:
        """Return features, and the gradients of the input and all weights."""
        data = TensorDict({"o": self.x, "is_init": self.is_init, **self.states}, self.shape)
        features = self.module(data)["f"]
        gradients = torch.autograd.grad(features, [self.x, *self.module.parameters()], self.grad)
        return features.detach(), *gradients  # a graph kept alive would tie later captures to this stream

    def exact(self) -> tuple[Tensor, ...]:
        """Return the same in float64, computed step by step."""
        weights = {name: value.double() for name, value in self.module.state_dict().items()}
        module = MODULES[self.case.cell](
            input_size=self.case.hidden, hidden_size=self.case.hidden, in_keys=self.module.in_keys[:-1],
            out_keys=self.module.out_keys, recurrent_backend="loop", default_recurrent_mode=True, device=DEVICE,
            dtype=torch.float64,
        )  # fmt: skip
        module.load_state_dict(weights)
        x = self.x.detach().double().requires_grad_()
        states = {key: state.double() for key, state in self.states.items()}
        features = module(TensorDict({"o": x, "is_init": self.is_init, **states}, self.shape))["f"]
        return features, *torch.autograd.grad(features, [x, *module.parameters()], self.grad.double())

    def unaligned(self) -> None:
        """Shift all user-provided tensors by four bytes."""

        def moved(value: Tensor) -> Tensor:
            flat = value.new_empty(value.numel() + 1)[1:]
            return flat.view_as(value).copy_(value)

        with torch.no_grad():
            self.states = {key: moved(state) for key, state in self.states.items()}
            self.grad = moved(self.grad)
            self.x = moved(self.x.detach()).requires_grad_()


def cudnn(case: Case, one: Problem) -> Step:
    """Return the step of torch.nn's layer over the same rows, which does not support resets."""
    module = PEERS[case.cell](case.hidden, case.hidden, batch_first=True, device=DEVICE)
    return lambda: torch.autograd.grad(module(one.x)[0], [one.x, *module.parameters()], one.grad)


def equal(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(first, second) for first, second in zip(a, b, strict=True))


def captured_agrees(problem: Problem) -> bool:
    """Return whether a captured step, replayed on other inputs and resets, is bitwise equal to an eager one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        problem.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = problem.step()
    with torch.no_grad():
        problem.x.copy_(torch.randn_like(problem.x))
        problem.is_init.copy_(torch.rand(problem.is_init.shape, device=DEVICE) < 0.1)
        for parameter in problem.module.parameters():
            parameter.mul_(0.9)
    graph.replay()
    return equal(found, problem.step())


def check(case: Case) -> bool:
    """Check a case, and print failures."""
    problem = Problem(case)
    first, second, third = (problem.step() for _ in range(3))
    exact = problem.exact()
    error = max(relative_error(a, b) for a, b in zip(third, exact, strict=True))
    results = {"later calls have the first one's bits": equal(first, second) and equal(second, third)}
    results[f"error {error:.1e} <= {GATE}"] = error <= GATE
    problem.unaligned()
    results["unaligned tensors"] = equal(problem.step(), problem.step())
    moved = max(relative_error(a, b) for a, b in zip(problem.step(), third, strict=True))
    results[f"unaligned tensors: difference {moved:.1e} <= {GATE}"] = moved <= GATE
    results["captured"] = captured_agrees(problem)
    for name, passed in results.items():
        if not passed:
            print("FAIL", case, name)
    return all(results.values())


def host(step: Step) -> float:
    """Return the milliseconds in which the host issues a call; more if the GPU is slower."""
    for _ in range(5):
        step()
    times: list[float] = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(HOST_CALLS):
            step()
        times.append((time.perf_counter() - begin) / HOST_CALLS * 1e3)
    torch.cuda.synchronize()
    return sorted(times)[len(times) // 2]


def measure(step: Step, small: bool) -> dict[str, float | str]:
    """Return the times of one implementation in one case."""
    found: dict[str, float | str] = {"busy": busy(step)[0], "wall": wall(step, 40)}
    with torch.autograd.set_multithreading_enabled(False):
        found["wall_one_thread"] = wall(step, 40)
        found["host_one_thread"] = host(step) if small else ""
    found["host"] = host(step) if small else ""
    return found


def rows_of(case: Case) -> list[dict[str, Any]]:
    """Time recurl and, without resets, torch.nn."""
    problem, small = Problem(case), case.hidden == SHAPES[0][0]
    steps: dict[str, Step] = {"recurl": problem.step}
    if case.resets == 0.0:
        steps["cudnn"] = cudnn(case, problem)
    keys = {"cell": case.cell, "H": case.hidden, "B": case.rows, "T": case.length, "resets": case.resets}
    return [{**keys, "what": what, **measure(step, small)} for what, step in steps.items()]


def compile_in_parallel() -> None:
    """Fill Triton's cache with one process for each size and cell."""
    command = [sys.executable, __file__, "--compile"]
    started = [subprocess.Popen([*command, cell, str(h), str(b), str(t)]) for cell in CELLS for h, b, t in SHAPES]
    for process in started:
        process.wait()


def main() -> None:
    """Check, time, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--label", default="", help="value of the column 'label'")
    parser.add_argument("--commit", default="", help="value of the column 'commit'; read from git by default")
    parser.add_argument("--compile", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    if options.compile:
        Problem(Case(options.compile[0], *map(int, options.compile[1:]))).step()
        return
    compile_in_parallel()
    cases = [Case(cell, *shape, resets) for shape in SHAPES for cell in CELLS for resets in (0.0, 0.02)]
    passed = [check(case) for case in cases]
    if not all(passed):
        sys.exit("Nothing is timed: see above.")
    print("checks passed", flush=True)
    versions = {"label": options.label, "commit": options.commit or commit(), "device": torch.cuda.get_device_name()}
    versions |= {package: importlib.metadata.version(package) for package in ("torch", "triton")}
    for case in cases:
        for row in rows_of(case):
            rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
            append(options.csv, {**rounded, **versions})
            print(*(f"{key}={value}" for key, value in rounded.items() if value != ""), flush=True)


if __name__ == "__main__":
    main()

"""Checks and timings of linear recurrences, forward and backward; appends to results/linear_recurrence.csv.

On a GPU, checks compare results and gradients with a scan in float64, and test determinism, NaN in one segment and a
replayed CUDA graph. Then milliseconds of a replayed graph (forward, backward, the gradients of a and b) are compared
with the lower bound from the device's memory bandwidth, and with peers if they are installed. On a CPU, the fraction of
the bandwidth of a copy, and the loop in ATen. Nothing is timed if a check fails. Usage::

    python benchmarks/bench_linear_recurrence.py                     # a GPU, less than three minutes
    python benchmarks/bench_linear_recurrence.py --sweep --forms real bf16 --csv chunks.csv
    python benchmarks/bench_linear_recurrence.py --device cpu --threads 2
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linear_recurrence_peers import PEERS
from recurl.core.relative_error import relative_error
from recurl.recurrence import Boundaries
from recurl.recurrence.backend import OperatorSupport
from recurl.recurrence.built_in import LINEAR
from recurl.recurrence.cuda.linear.backend import TritonLinear
from recurl.recurrence.cuda.linear.config import Chunk
from recurl.recurrence.linear.kernels import LinearInputs, LinearKernels
from results_file import append, commit

RESULTS = Path(__file__).parent / "results" / "linear_recurrence.csv"
WIDTH, SHAPES, RESETS = 256, [(64, 2048), (4096, 32), (1, 131_072)], [0.0, 0.02]
BANDWIDTHS = {"H200": 4.3e12, "H100": 3.0e12}  # achieved bandwidth of copies, bytes per second
FORMS = {
    "real": (torch.float32, False),
    "real constant": (torch.float32, True),
    "complex": (torch.complex64, False),
    "complex constant": (torch.complex64, True),
    "bf16": (torch.bfloat16, False),
}
LIMITS = {torch.float32: 1e-5, torch.complex64: 1e-5, torch.bfloat16: 1e-2}
WANTED = (True, True, False)


@dataclass(frozen=True)
class Case:
    """Inputs of a recurrence, and a gradient of its result."""

    inputs: LinearInputs
    grad: Tensor

    def run(self, kernels: LinearKernels, needs: tuple[bool, bool, bool] = WANTED) -> tuple[Tensor | None, ...]:
        h = kernels.forward(self.inputs)
        return h, *kernels.backward(self.inputs, h, self.grad, needs)

    @property
    def floor(self) -> int:
        """Return the minimum bytes moved: a, b in, h out; a, h, its gradient in, the gradients of a and b out."""
        return (8 if self.inputs.a.ndim > 1 else 5) * self.grad.nbytes


def case_of(form: str, shape: tuple[int, int], resets: float, device: str, slowness: float = 0.1) -> Case:
    generator = torch.Generator(device).manual_seed(0)
    dtype, constant = FORMS[form]
    tokens = shape[0] * shape[1]
    wide = torch.complex64 if dtype.is_complex else torch.float32

    def random(*size: int, dtype: torch.dtype = wide) -> Tensor:
        return torch.randn(size, device=device, generator=generator, dtype=dtype)

    size = (WIDTH,) if constant else (tokens, WIDTH)
    a = 1 - slowness * torch.rand(size, device=device, generator=generator)
    if dtype.is_complex:
        a = torch.polar(a, random(*size, dtype=torch.float32))
    is_init = torch.rand(shape, device=device, generator=generator) < resets
    b, grad = (random(tokens, WIDTH).to(dtype) for _ in range(2))
    states = random(1, WIDTH).to(dtype).expand(tokens, WIDTH)
    return Case(LinearInputs(a.to(dtype), b, states, Boundaries.from_is_init(is_init)), grad)


def checks(kernels: LinearKernels, device: str, forms: list[str]) -> Iterator[tuple[str, bool, str]]:
    """Yield the name, the outcome and the numbers of each check."""
    cases = [((64, 512), 0.02, 0.1), ((1, 100_000), 0.0, 1e-5)]
    for form in forms:
        for shape, resets, slowness in cases if device == "cuda" else cases[:1]:
            case = case_of(form, shape, resets, device, slowness)
            found, again = (case.run(kernels, (True, True, True)) for _ in range(2))
            wide = torch.complex128 if case.grad.is_complex() else torch.float64
            a, b, states = (one.to(wide) for one in case.inputs[:3])
            exact = Case(LinearInputs(a, b, states, case.inputs.boundaries), case.grad.to(wide))
            expected = exact.run(LINEAR.named("scan"), (True, True, True))
            errors = [relative_error(one, other) for one, other in zip(found, expected, strict=True)]
            same = all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
            passed = max(errors) <= LIMITS[case.grad.dtype] and same
            numbers = " ".join(f"{error:.1e}" for error in errors)
            yield f"{form} {shape} {resets} {slowness}", passed, f"h, da, db, ds {numbers}, same bits {same}"
    case = case_of("real", (1, 4096), 0.0, device)
    case.inputs.boundaries.starts[[1000, 3000]] = True
    clean = case.run(kernels)
    case.inputs.b[2000] = torch.nan
    found = case.run(kernels)
    outside = torch.ones(4096, dtype=torch.bool, device=device)
    outside[1000:3000] = False
    kept = [torch.equal(one[outside], other[outside]) for one, other in zip(found[:3], clean[:3], strict=True)]
    yield "NaN stays in its segment", all(kept) and bool(found[0][2000:3000].isnan().all()), ""
    if device == "cuda":
        yield "graph", replays(kernels), "a captured call, replayed on other data"


def replays(kernels: LinearKernels) -> bool:
    case, other = (case_of("real", (8, 512), resets, "cuda") for resets in (0.1, 0.01))
    graph, results = captured(lambda: case.run(kernels))
    expected = other.run(kernels)
    for to, value in zip(case.inputs[:2], other.inputs[:2], strict=True):
        to.copy_(value)
    case.inputs.boundaries.starts.copy_(other.inputs.boundaries.starts)
    case.grad.copy_(other.grad)
    graph.replay()
    return all(torch.equal(one, two) for one, two in zip(results[:3], expected[:3], strict=True))


def captured(function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


def milliseconds(function: Callable[[], Any], device: str, repeat: int = 15) -> float:
    """Return the median over successive calls."""
    times = []
    for _ in range(repeat + 2):
        if device == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            function()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            function()
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def graphed(function: Callable[[], Any]) -> float:
    graph, _ = captured(function)
    return milliseconds(graph.replay, "cuda")


def outcomes(tried: Callable[..., str], ways: list[Any], seconds: float) -> dict[Any, str]:
    """Compile what a sweep times, in parallel; return what is wrong with each: "" for nothing, "late" if cut off."""
    began = time.monotonic()
    workers = ProcessPoolExecutor(
        max(1, (os.cpu_count() or 1) - 2), get_context("spawn"), torch.set_num_threads, initargs=(1,)
    )
    futures = {way: workers.submit(tried, *way) for way in ways}
    wait(futures.values(), seconds)
    workers.shutdown(cancel_futures=True)
    wrong = {way: "late" if future.cancelled() else future.result() for way, future in futures.items()}
    late = [*wrong.values()].count("late")
    print(f"compiled and checked {len(ways) - late} of {len(ways)} in {time.monotonic() - began:.0f} s", flush=True)
    return wrong


def copy_bandwidth(device: str) -> float:
    source = torch.randn(2**26 if device == "cuda" else 2**24, device=device)
    target = torch.empty_like(source)
    return 2e3 * source.nbytes / milliseconds(lambda: target.copy_(source), device)


def nominal_bandwidth(device: str) -> float:
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    return next((value for key, value in BANDWIDTHS.items() if key in name), 0.0) or copy_bandwidth(device)


def table(kernels: LinearKernels, args: argparse.Namespace) -> None:
    """Time all forms and shapes, then peers."""
    bandwidth = nominal_bandwidth("cuda")
    print(f"\n{bandwidth / 1e12:.2f} TB/s; a copy reaches {copy_bandwidth('cuda') / 1e12:.2f} TB/s")
    print(f"{'form':17}{'rows x length':>14}{'resets':>8}{'floor ms':>10}{'ms':>8}{'forward':>9}{'x floor':>9}")
    for form in args.forms:
        for shape in SHAPES:
            for resets in RESETS:
                case = case_of(form, shape, resets, "cuda")
                floor, took = 1e3 * case.floor / bandwidth, graphed(lambda case=case: case.run(kernels))
                forward = graphed(lambda case=case: kernels.forward(case.inputs))
                sizes = f"{shape[0]} x {shape[1]}"
                print(
                    f"{form:17}{sizes:>14}{resets:8}{floor:10.3f}{took:8.3f}{forward:9.3f}{took / floor:9.2f}",
                    flush=True,
                )
                write("triton", form, shape, resets, took, forward, floor)
    for name, package, make in PEERS:
        if package is not None and importlib.util.find_spec(package) is None:
            print(f"{name}: not installed ({package})")
            continue
        for shape in SHAPES:
            peer(name, make, shape, bandwidth)


def peer(name: str, make: Callable[..., Callable[[], Any]], shape: tuple[int, int], bandwidth: float) -> None:
    case = case_of("real", shape, 0.0, "cuda")
    a, b, grad = (one.view(*shape, WIDTH) for one in (case.inputs.a, case.inputs.b, case.grad))
    floor = 1e3 * case.floor / bandwidth
    try:
        took = milliseconds(make(a, b, grad), "cuda", repeat=5)
    except Exception as error:  # noqa: BLE001 - any error of a peer is printed
        print(f"{name}, {shape}: {type(error).__name__} {str(error)[:120]!r}", flush=True)
        return
    print(f"{name}, {shape[0]} x {shape[1]}: {took:.3f} ms, {took / floor:.1f} x floor", flush=True)
    write(name, "real", shape, 0.0, took, None, floor)


def write(name: str, form: str, shape: tuple[int, int], resets: float, took: float, forward: Any, floor: float) -> None:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    append(RESULTS, {
        "date": time.strftime("%Y-%m-%d"), "commit": commit(), "device": device, "torch": torch.__version__,
        "implementation": name, "form": form, "rows": shape[0], "length": shape[1], "width": WIDTH, "resets": resets,
        "ms": f"{took:.4f}", "forward_ms": "" if forward is None else f"{forward:.4f}", "floor_ms": f"{floor:.4f}",
        "over_floor": f"{took / floor:.3f}",
    })  # fmt: skip


WAYS = [  # steps, rows, bytes per row, registers; most promising first
    (16, 16, 64, 128), (16, 16, 64, 168), (16, 8, 128, 128), (16, 8, 128, 168), (8, 16, 64, 80), (8, 16, 64, 96),
    (16, 16, 64, 96), (8, 16, 64, 128), (8, 16, 128, 128), (16, 16, 64, None),
]  # fmt: skip
SWEPT = [((64, 2048), 0.0), ((4096, 32), 0.02), ((1, 131_072), 0.0)]


def bytes_of(direction: str, case: Case) -> int:
    """Return the minimum bytes moved by one pass."""
    varying = case.inputs.a.ndim > 1
    return case.grad.nbytes * {"forward": 2 + varying, "backward": 3 + 2 * varying}[direction]


def one_pass(direction: str, chunk: Chunk, case: Case, h: Tensor) -> Callable[[], tuple[Tensor | None, ...]]:
    kernels = TritonLinear(lambda *_: chunk)
    if direction == "forward":
        return lambda: (kernels.forward(case.inputs),)
    return lambda: kernels.backward(case.inputs, h, case.grad, WANTED)


def tried(direction: str, form: str, chunk: Chunk) -> str:
    """Compile a chunk's kernel, in a separate process, and check it; return a description of the error, if any."""
    try:
        return compared(direction, form, chunk)
    except Exception as error:  # noqa: BLE001 - the chunk is too large
        return f"{type(error).__name__} {str(error)[:80]!r}"


def compared(direction: str, form: str, chunk: Chunk) -> str:
    case = case_of(form, (4, 16_384), 0.0, "cuda", 1e-5)
    case.inputs.boundaries.starts[[77, 20_000, 40_001]] = True
    wide = torch.complex128 if case.grad.is_complex() else torch.float64
    a, b, states = (one.to(wide) for one in case.inputs[:3])
    exact = Case(LinearInputs(a, b, states, case.inputs.boundaries), case.grad.to(wide))
    h = LINEAR.named("scan").forward(exact.inputs)
    if direction == "forward":
        expected: tuple[Tensor | None, ...] = (h,)
    else:
        expected = LINEAR.named("scan").backward(exact.inputs, h, exact.grad, WANTED)
    run = one_pass(direction, chunk, case, h.to(case.grad.dtype))
    found, again = run(), run()
    pairs = [(x, y, z) for x, y, z in zip(found, again, expected, strict=True) if x is not None and z is not None]
    worst = max(relative_error(x, z) for x, _, z in pairs)
    same = all(torch.equal(x, y) for x, y, _ in pairs if y is not None)
    good = worst <= LIMITS[case.grad.dtype] and same
    return "" if good else f"error {worst:.1e}, same bits {same}"


def ways(form: str) -> list[Chunk]:
    """Return the candidate chunks of a form; numbers of fewer than four bytes take four on chip."""
    size = max(4, FORMS[form][0].itemsize)
    return [Chunk(steps, rows, width // size, registers) for steps, rows, width, registers in WAYS]


def sweep(args: argparse.Namespace) -> None:
    """Compile and check chunks in parallel, then time each; print the fastest, and write all to a table."""
    began, bandwidth = time.monotonic(), nominal_bandwidth("cuda")
    passes = [(direction, form) for form in args.forms for direction in args.directions]
    todo = [(direction, form, ways(form)[k]) for k in range(len(WAYS)) for direction, form in passes]
    wrong = outcomes(tried, todo, 0.65 * args.seconds)
    cases = {form: [case_of(form, shape, resets, "cuda") for shape, resets in SWEPT] for form in args.forms}
    hs = {form: [LINEAR.named("triton").forward(case.inputs) for case in cases[form]] for form in args.forms}
    rows: dict[tuple[str, str], list[Any]] = {one: [] for one in passes}
    for direction, form, chunk in todo:
        floor = 1e3 * bytes_of(direction, cases[form][0]) / bandwidth
        problem, times = wrong[direction, form, chunk], [float("inf")] * len(SWEPT)
        if not problem and time.monotonic() - began < args.seconds:
            pairs = zip(cases[form], hs[form], strict=True)
            times = [graphed(one_pass(direction, chunk, case, h)) for case, h in pairs]
        rows[direction, form].append((sum(times) / len(times) / floor, times, chunk, problem))
        if args.csv:
            append(args.csv, {
                "commit": commit(), "device": torch.cuda.get_device_name(), "direction": direction, "form": form,
                **asdict(chunk), "floor_ms": f"{floor:.4f}", "wrong": problem,
                **{"x".join(map(str, shape)): f"{ms:.4f}" for (shape, _), ms in zip(SWEPT, times, strict=True)},
            })  # fmt: skip
    for direction, form in passes:
        for over, times, chunk, problem in sorted(rows[direction, form], key=lambda one: one[0])[: args.best]:
            name = " ".join(str(one) for one in asdict(chunk).values())
            numbers = " ".join(f"{one:.4f}" for one in times)
            print(f"{form:17}{direction:9}{over:6.2f} x floor  {numbers}  {name} {problem}", flush=True)
        bad = {problem for *_, problem in rows[direction, form]} - {""}
        print(f"{form:17}{direction:9} wrong: {bad or 'none'}; steps rows columns registers group")


def on_cpu(args: argparse.Namespace) -> None:
    """Compare with the bandwidth of copies before and after, as it varies over minutes, and with the loop in ATen."""
    for form in args.forms:
        for shape in [(16, 2048), (1024, 32), (1, 32_768)]:
            for resets in RESETS:
                case = case_of(form, shape, resets, "cpu")
                before = copy_bandwidth("cpu")
                took = milliseconds(lambda case=case: case.run(LINEAR.named("cpu")), "cpu", 7)
                copied = (before + copy_bandwidth("cpu")) / 2
                forward = milliseconds(lambda case=case: LINEAR.named("cpu").forward(case.inputs), "cpu", 7)
                loop = milliseconds(lambda case=case: case.run(LINEAR.named("loop")), "cpu", 1)
                floor = 1e3 * case.floor / copied
                print(f"{form:17}{shape!s:>14}{resets:8} {took:8.1f} ms, {floor / took:.2f} of a copy's bandwidth "
                      f"({copied / 1e9:.0f} GB/s), loop {loop / took:.1f} x", flush=True)  # fmt: skip
                write("cpu", form, shape, resets, took, forward, floor)
                write("loop", form, shape, resets, loop, None, floor)


def keep_memory() -> None:
    """Keep malloc from returning memory, as in a long-running process: new pages cost more than a copy."""
    libc = ctypes.CDLL(None)
    for option, value in ((-4, 0), (-1, 2**31 - 1)):  # M_MMAP_MAX, M_TRIM_THRESHOLD
        libc.mallopt(option, value)


def main() -> None:
    """Check, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--threads", type=int, default=2, help="on a CPU")
    parser.add_argument("--sweep", action="store_true", help="check and time many chunk sizes instead")
    parser.add_argument("--csv", type=Path, help="file for a sweep's table")
    parser.add_argument("--best", type=int, default=6, help="number of printed lines of a sweep per pass")
    parser.add_argument("--seconds", type=float, default=110, help="time after which a sweep stops timing")
    parser.add_argument("--directions", nargs="+", choices=("forward", "backward"), default=["forward", "backward"])
    args = parser.parse_args()
    if args.sweep:
        sweep(args)
        return
    if args.device == "cpu":
        keep_memory()
        torch.set_num_threads(args.threads)
    support = OperatorSupport(torch.device(args.device), torch.float32)
    kernels = LINEAR.choose("triton" if args.device == "cuda" else "cpu", support)
    failed = 0
    for name, passed, numbers in checks(kernels, args.device, args.forms):
        print("ok  " if passed else "FAIL", name, numbers, flush=True)
        failed += not passed
    if failed:
        sys.exit(f"{failed} checks failed: nothing is timed")
    if args.device == "cpu":
        on_cpu(args)
    else:
        table(kernels, args)


if __name__ == "__main__":
    main()

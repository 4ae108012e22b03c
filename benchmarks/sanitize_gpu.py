"""compute-sanitizer on every kind of GPU kernel: results/sanitize_gpu.csv.

Each kind is one small case (few rows and steps, but at least two groups of programs), in a process of its own. It runs
three times or more: first plainly, which fills the caches of compiled kernels and lists the kernels that ran, then
under each tool, which only checks the project's kernels. Before anything is checked, every kernel in the sources must
have run in some kind, and memcheck must find a write out of bounds in a kernel that has one. Rows are written as
processes end; what is done for this commit and GPU is skipped. Exits with 1 if a tool found an error, or a process
failed or didn't end. Usage::

    python benchmarks/sanitize_gpu.py                                  # memcheck and racecheck of all kinds
    python benchmarks/sanitize_gpu.py --tools synccheck --only cluster "lstm tiles" --logs logs
"""

from __future__ import annotations

import argparse
import csv
import datetime
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue

import torch
import triton
import triton.language as tl
from torch.profiler import ProfilerActivity, profile

import bench_attention
import bench_matrix_recurrence
import recurl
from bench_step_gpu import Case
from recurl.envs.tasks.popgym.hunt_and_kill_gpu import carve
from recurl.recurrence import Boundaries
from recurl.recurrence.cuda.attention.backend import TritonAttention
from recurl.recurrence.cuda.kernel_step import KERNEL_STEP
from recurl.recurrence.cuda.linear.backend import TritonLinear
from recurl.recurrence.cuda.matrix.backend import TritonMatrix
from recurl.recurrence.cuda.matrix.config import plan_for
from recurl.recurrence.cuda.plan import only
from recurl.recurrence.cuda.products.launch import over_tokens, product
from recurl.recurrence.cuda.step.config import StepTile, tile_for_step
from recurl.recurrence.cuda.step.launch import run_step
from recurl.recurrence.linear.kernels import LinearInputs
from recurl.trainers import GradientStep
from results_file import append, commit
from rnn_gpu_layer import DEVICE, Layer, Problem, options_of

RESULTS = Path(__file__).parent / "results" / "sanitize_gpu.csv"
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
UNFILTERED = ("initcheck",)  # it must see the writes of torch's kernels too
PLANTED, PORT, PORTS = "planted", 49152, 16
DONE = ("ok", "errors")
SUMMARY = re.compile(r"RACECHECK SUMMARY: .*\((\d+) errors?, (\d+) warnings?\)|ERROR SUMMARY: (\d+) errors?")
SOURCES = {
    "*.py": re.compile(r"^@(?:triton|gluon)\.jit(?:\(.*\))?\ndef (\w+_kernel)\(", re.MULTILINE),
    "*.cu": re.compile(r"^KERNEL (\w+_kernel)\(", re.MULTILINE),
}
# By family: cells, H, precision, rows and steps. Comments say what a case adds to those before it.
LAYERS: dict[str, list[tuple[str, int, str, int, int]]] = {
    "tiles": [
        ("lstm gru", 288, "tf32", 449, 2),  # two groups per program
        ("lstm gru", 544, "tf32", 449, 2),  # 128 slots
        ("lstm gru", 544, "tf32", 193, 2),  # two warps share 16 slots
        ("lstm gru", 544, "ieee", 193, 2),
        ("lstm", 288, "ieee", 33, 3),  # streamed weights
        ("gru", 352, "ieee", 33, 3),
        ("lstm gru", 192, "tf32", 33, 3),  # float16 operands
        ("lstm gru", 160, "tf32", 33, 3),
        ("lstm gru", 160, "ieee", 33, 3),
        ("lstm gru", 160, "bf16", 33, 3),
    ],
    "resident": [
        ("lstm gru", 272, "bf16", 6, 3),
        ("gru", 272, "tf32", 6, 3),
        ("lstm gru", 160, "tf32", 6, 3),  # a group of programs
        ("lstm gru", 160, "ieee", 6, 3),
        ("lstm gru", 160, "bf16", 6, 3),
        ("lstm gru", 20, "tf32", 5, 3),
        ("lstm gru", 64, "tf32", 5, 3),
        ("lstm gru", 100, "tf32", 5, 3),  # weights in registers and shared memory
        ("lstm gru", 100, "bf16", 5, 3),
    ],
    "cluster": [
        ("lstm gru", 264, "tf32", 5, 3),  # eight CTAs
        ("lstm gru", 136, "ieee", 5, 3),  # four CTAs, weights in registers and shared memory
        ("lstm gru", 136, "bf16", 5, 3),
        ("lstm gru", 72, "tf32", 5, 3),
        ("lstm gru", 72, "ieee", 5, 3),
    ],
    "rows": [
        ("lstm gru", 20, "ieee", 5, 3),
        ("lstm gru", 64, "tf32", 5, 3),
        ("lstm gru", 96, "ieee", 5, 3),
        ("gru", 128, "ieee", 5, 3),
    ],
    "portable": [
        ("lstm gru", 136, "ieee", 6, 3),  # a group of programs
        ("lstm gru", 136, "bf16", 6, 3),
        ("lstm gru", 64, "tf32", 6, 3),  # resident weights
        ("lstm gru", 20, "ieee", 6, 3),
    ],
}


@dataclass(frozen=True)
class Kind:
    """A small case of one kind of kernel.

    Attributes:
        name: the name.
        run: runs the case.
        kernels: kernels that must run, so that no other family takes the case silently.
    """

    name: str
    run: Callable[[], object]
    kernels: tuple[str, ...]


@triton.jit
def planted_kernel(values, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201 - types of Triton
    """Write one number more than there is."""
    tl.store(values + tl.arange(0, BLOCK), 1.0)


def planted() -> None:
    """Write out of bounds."""
    planted_kernel[(1,)](torch.empty(127, device=DEVICE), BLOCK=128)


@contextmanager
def float32_products() -> Generator[None]:
    """Compute torch's bfloat16 products in float32: racecheck doesn't survive the bfloat16 kernels of cuBLAS."""
    mm, addmm = torch.mm, torch.addmm
    torch.mm = lambda a, b: mm(a.float(), b.float()).to(a.dtype)
    torch.addmm = lambda c, a, b: addmm(c.float(), a.float(), b.float()).to(a.dtype)
    try:
        yield
    finally:
        torch.mm, torch.addmm = mm, addmm


def layer(family: str, problem: Problem, precision: str, recompute: bool = False) -> None:
    """Run a recurrent layer forward and backward with the kernels of a family."""
    with only(family), float32_products() if precision == "bf16" else nullcontext():
        Layer(problem).step("triton", options_of(precision, recompute), stored=True)


def linear(dtype: torch.dtype, constant: bool) -> None:
    """Run a linear recurrence forward and backward, over several groups of chunks."""
    tokens, width = 4400, 20
    a = torch.full((width,) if constant else (tokens, width), 0.9, dtype=dtype, device=DEVICE)
    b, grad = (torch.ones(tokens, width, dtype=dtype, device=DEVICE) for _ in range(2))
    starts = torch.rand(1, tokens, device=DEVICE) < 0.01
    inputs = LinearInputs(a, b, torch.ones_like(b), Boundaries.from_is_init(starts))
    kernels = TritonLinear()
    kernels.backward(inputs, kernels.forward(inputs), grad, (True, True, True))


def products(exact: bool) -> None:
    """Run the large products: over tokens, with and without the states before them, and over columns."""
    tokens, rows, columns = 2100, 144, 140
    a, values = torch.ones(tokens, rows, device=DEVICE), torch.ones(tokens, columns, device=DEVICE)
    boundaries = Boundaries.from_is_init(torch.rand(21, tokens // 21, device=DEVICE) < 0.1)
    over_tokens(a, values, None, exact)
    over_tokens(a, values, (torch.zeros_like(values), boundaries), exact)
    if exact:
        product(a, torch.ones(columns, rows, device=DEVICE).t(), torch.ones(columns, device=DEVICE))


def step(cell: str, precision: str, large: bool) -> None:
    """Run one step of a layer, in the smallest tiles or in the largest."""
    case = Case(cell, 40, 140 if large else 33, torch.bfloat16 if precision == "bf16" else torch.float32)
    tile_for = (lambda *_: StepTile(128, 32, 32, 8, 3)) if large else tile_for_step
    run_step([case.weights], case.x, case.states, case.is_init, precision, tile_for)


def matrix(dtype: torch.dtype, delta: bool, size: int) -> None:
    """Run a matrix recurrence forward and backward, over rows in pieces."""
    case = bench_matrix_recurrence.case_of((1, 530), dtype, delta, "stored", True, (2, size, size + 3))
    case.run(TritonMatrix(lambda sizes: plan_for(replace(sizes, processors=1000))), needs=(True,) * 6)


def matrix_step(delta: bool) -> None:
    """Run one step of a matrix recurrence."""
    inputs = bench_matrix_recurrence.case_of((5, 1), torch.float32, delta, sizes=(2, 20, 23)).inputs
    TritonMatrix().step(*inputs[:5], torch.zeros(5, 2, 20, 23, device=DEVICE), delta=delta)


def attention(form: str, stored: int) -> None:
    """Run windowed attention forward and backward, with stored windows of so many numbers if any."""
    case = bench_attention.case_of(form, (3, 70), 30, DEVICE, (2, 20, 37), stored)
    case.run(TritonAttention("triton"))


def attention_step(form: str) -> None:
    """Run one step of windowed attention."""
    KERNEL_STEP.attend(*bench_attention.step_of(5, form, 33))


def mazes() -> None:
    """Carve three mazes."""
    side = 4
    chances = torch.rand(3 * (side**2 - 1), 3, dtype=torch.float64, device=DEVICE)
    carve(torch.zeros(3, dtype=torch.int64, device=DEVICE), chances, side)


def adam() -> None:
    """Make two steps of the optimizer on two parameters."""
    parameters = [torch.nn.Parameter(torch.ones(size, device=DEVICE)) for size in (2500, 7)]
    descend = GradientStep(parameters, learning_rate=1e-3, max_norm=0.5)
    for _ in range(2):
        descend(torch.stack([(parameter * parameter).sum() for parameter in parameters]).sum())


def kinds() -> Iterator[Kind]:
    """Yield the kinds, the slowest first."""
    for family, cases in LAYERS.items():
        prefix = "" if family == "portable" else f"{family}_"
        kernels = f"{prefix}forward_kernel", f"{prefix}backward_kernel"
        for cells, hidden, precision, rows, length in cases:
            for cell in cells.split():
                name = f"{cell} {family} {hidden} {precision} {rows}x{length}"
                yield Kind(name, partial(layer, family, Problem(cell, hidden, rows, length, 0.2), precision), kernels)
    for cell in ("lstm", "gru"):
        run = partial(layer, "portable", Problem(cell, 20, 6, 3, 0.2), "ieee", recompute=True)
        yield Kind(f"{cell} recompute", run, ("gates_kernel",))
    for exact in (False, True):
        kernels = "large_product_kernel", "turn_kernel"
        yield Kind(f"products {'ieee' if exact else 'tf32'}", partial(products, exact), kernels)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128):
        for constant in (False, True):
            name = f"linear {str(dtype).removeprefix('torch.')}{' constant' if constant else ''}"
            yield Kind(name, partial(linear, dtype, constant), ("forward_kernel", "backward_kernel"))
    for cell in ("lstm", "gru"):
        for precision, large in (("ieee", False), ("tf32", False), ("bf16", False), ("ieee", True), ("tf32", True)):
            name = f"{cell} step {precision}{' large' if large else ''}"
            yield Kind(name, partial(step, cell, precision, large), ("step_kernel",))
    yield from memories()
    yield Kind("mazes", mazes, ("carve_kernel",))
    yield Kind("adam", adam, ("squares_kernel", "decide_kernel", "adam_kernel"))
    yield Kind(PLANTED, planted, ("planted_kernel",))


def memories() -> Iterator[Kind]:
    """Yield the kinds of matrix recurrences and attention."""
    dtypes = torch.float32, torch.bfloat16, torch.float16
    for dtype, delta, size in itertools.product(dtypes, (False, True), (20, 70)):
        name = f"matrix {'delta' if delta else 'plain'} {str(dtype).removeprefix('torch.')} {size}"
        kernels = "forward_kernel", "maps_kernel", "carry_kernel", "backward_kernel"
        yield Kind(name, partial(matrix, dtype, delta, size), (*kernels, *("solve_kernel",) * delta))
    for delta in (False, True):
        yield Kind(f"matrix step {'delta' if delta else 'plain'}", partial(matrix_step, delta), ("step_kernel",))
    for form, stored in itertools.product(("ieee", "tf32", "bf16"), (0, 33)):
        kernels = "forward_kernel", "queries_kernel", "keys_kernel"
        reads = ("read_kernel", "read_backward_kernel") * bool(stored)
        name = f"attention {form}{' stored' if stored else ''}"
        yield Kind(name, partial(attention, form, stored), (*kernels, *reads))
    for form in ("ieee", "bf16"):
        yield Kind(f"attention step {form}", partial(attention_step, form), ("step_kernel",))


@cache
def kernels_in_sources() -> frozenset[str]:
    """Return the names of all kernels of the package."""
    root = Path(recurl.__file__).parent
    return frozenset(
        name
        for glob, kernel in SOURCES.items()
        for path in root.rglob(glob)
        for name in kernel.findall(path.read_text())
    )


def run_plainly(kind: Kind) -> None:
    """Run a case and print the kernels that ran."""
    kind.run()  # compiles, also what takes more than one call
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        kind.run()
        torch.cuda.synchronize()
    print("kernels", *{event.key for event in prof.key_averages()} & kernels_in_sources())


@dataclass(frozen=True)
class Ended:
    """A process that ended or was killed.

    Attributes:
        code: exit code, or None if it was killed.
        output: stdout and stderr.
        seconds: its run time.
    """

    code: int | None
    output: str
    seconds: float


def run_process(command: list[str], limit: float, environment: dict[str, str]) -> Ended:
    """Run a command; at the limit it is killed with its children."""
    begin = time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **environment},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=max(1.0, limit))
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        code = None
    return Ended(code, output, time.monotonic() - begin)


class Runner:
    """Runs kinds in processes of their own, several at once.

    Args:
        arguments: of the command line.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.until, self.limit = time.monotonic() + arguments.seconds, arguments.limit
        self.logs: Path | None = arguments.logs
        self.sanitizer: str = arguments.sanitizer
        asked = subprocess.run([self.sanitizer, "--help"], capture_output=True, text=True, check=False).stdout
        self._filter = "--kernel-name" if "--kernel-name" in asked else "--kernel-regex"
        self._ports: SimpleQueue[int] = SimpleQueue()  # sanitizers that run at once must not share ports
        for number in range(arguments.jobs):
            self._ports.put(PORT + number * PORTS)
        self._pool = ThreadPoolExecutor(arguments.jobs)

    def run(self, jobs: list[tuple[Kind, str]]) -> Iterator[tuple[Kind, str, Ended]]:
        """Run pairs of a kind and a tool ("" for none); yield them as they end, without those out of time."""
        running = {self._pool.submit(self._run, *job): job for job in jobs}
        for future in as_completed(running):
            ended = future.result()
            if ended is not None:
                yield (*running[future], ended)

    def _run(self, kind: Kind, tool: str) -> Ended | None:
        limit = min(self.limit, self.until - time.monotonic())
        if limit <= 0:
            return None
        command, environment = [sys.executable, __file__, "--run", kind.name], dict[str, str]()
        port = self._ports.get()
        try:
            if tool:
                names = () if tool in UNFILTERED else (*sorted(kernels_in_sources()), "planted_kernel")
                filters = [word for name in names for word in (self._filter, f"kne={name}")]
                options = ["--target-processes", "application-only", "--launch-timeout", "0", "--port", str(port)]
                command = [self.sanitizer, "--tool", tool, *options, *filters, *command, "--once"]
                environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # memcheck sees every tensor's end
            ended = run_process(command, limit, environment)
        finally:
            self._ports.put(port)
        if self.logs is not None:
            self.logs.mkdir(parents=True, exist_ok=True)
            (self.logs / f"{kind.name}_{tool or 'plain'}.txt".replace(" ", "_")).write_text(ended.output)
        return ended


def outcome(ended: Ended) -> dict[str, object]:
    """Return the columns errors, warnings, seconds and result."""
    found = SUMMARY.findall(ended.output)
    errors, warnings = sum(int(a or c) for a, _, c in found), sum(int(b or 0) for _, b, _ in found)
    result = "did not end" if ended.code is None else "errors" if errors else "ok" if found else "failed"
    if "Internal Sanitizer Error" in ended.output:  # counted as an error, but the tool's own
        errors, result = 0, "failed"
    elif result == "ok" and ended.code:
        result = "failed"
    return {"errors": errors, "warnings": warnings, "seconds": round(ended.seconds, 1), "result": result}


def prepare(runner: Runner, chosen: list[Kind], complete: bool) -> list[str]:
    """Run the kinds plainly and return what is wrong."""
    wrong, ran = list[str](), set[str]()
    waiting = {kind.name for kind in chosen}
    for kind, _, ended in runner.run([(kind, "") for kind in chosen]):
        waiting.discard(kind.name)
        lines = [line.split()[1:] for line in ended.output.splitlines() if line.startswith("kernels")]
        names = set(lines[0]) if lines else set[str]()
        ran |= names
        missing = [name for name in kind.kernels if name not in names]
        if ended.code != 0:
            reason = "did not end" if ended.code is None else "; ".join(ended.output.splitlines()[-1:])
            wrong.append(f"{kind.name}: fails without a sanitizer: {reason}")
        elif missing:
            wrong.append(f"{kind.name}: {' and '.join(missing)} did not run, but {' '.join(sorted(names))}")
    wrong += [f"{name}: not run, out of time" for name in sorted(waiting)]
    if complete and not wrong:
        wrong += [f"no kind runs {name}" for name in sorted(kernels_in_sources() - ran)]
    return wrong


def rows_of(path: Path, versions: dict[str, str]) -> dict[tuple[str, str], str]:
    """Return the last result of each kind and tool for this commit and GPU."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        same = [row for row in csv.DictReader(file) if all(row[name] == value for name, value in versions.items())]
    return {(row["kind"], row["tool"]): row["result"] for row in same}


def sanitize(runner: Runner, chosen: list[Kind], tools: list[str], path: Path, versions: dict[str, str]) -> bool:
    """Write one row per kind and tool, and return whether all are without errors."""
    results = rows_of(path, versions)
    wanted = [(kind, tool) for tool in tools for kind in chosen]
    jobs = [(kind, tool) for kind, tool in wanted if results.get((kind.name, tool)) not in DONE]
    print(f"{len(wanted) - len(jobs)} of {len(wanted)} are done, {len(jobs)} to run", flush=True)
    for kind, tool, ended in runner.run(jobs):
        row = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            **versions,
            "kind": kind.name,
            "tool": tool,
        }
        row |= outcome(ended)
        append(path, row)
        results[kind.name, tool] = row["result"]
        shown = f"{row['errors']} errors, {row['warnings']} warnings, {row['seconds']} s"
        print(f"{row['result']:<12}{kind.name}, {tool}: {shown}", flush=True)
        if row["result"] != "ok":
            print(*("    " + line for line in ended.output.splitlines()[:40]), sep="\n", flush=True)
    left = [f"{kind.name}, {tool}" for kind, tool in wanted if (kind.name, tool) not in results]
    for job in left:
        print("not run, out of time:", job, flush=True)
    passed = sum(results.get((kind.name, tool)) == "ok" for kind, tool in wanted)
    print(f"{passed} of {len(wanted)} passed", flush=True)
    return passed == len(wanted)


def passes(arguments: argparse.Namespace, named: dict[str, Kind]) -> bool:
    """Run what isn't done, and return whether everything passed."""
    versions = {"commit": arguments.commit, "device": torch.cuda.get_device_name()}
    versions |= {"torch": torch.__version__, "triton": triton.__version__}
    done = rows_of(arguments.csv, versions)
    chosen = [
        kind
        for kind in named.values()
        if kind.name != PLANTED and (not arguments.only or any(word in kind.name for word in arguments.only))
    ]
    left = [kind for kind in chosen if any(done.get((kind.name, tool)) not in DONE for tool in arguments.tools)]
    runner = Runner(arguments)
    wrong = prepare(runner, left, complete=len(left) == len(named) - 1)
    control = [outcome(ended)["errors"] for *_, ended in runner.run([(named[PLANTED], "memcheck")])]
    for line in wrong:
        print(line, flush=True)
    if not any(control):
        print("memcheck doesn't find the write out of bounds of planted_kernel", flush=True)
        return False
    failing = {line.partition(":")[0] for line in wrong}
    usable = [kind for kind in chosen if kind.name not in failing]
    passed = sanitize(runner, usable, arguments.tools, arguments.csv, versions)
    return passed and not wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", default=["memcheck", "racecheck"], choices=TOOLS)
    parser.add_argument("--only", nargs="*", help="only kinds whose names contain one of these")
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--commit", default=commit(), help="what to write into the column 'commit'")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at once")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of one process")
    parser.add_argument("--seconds", type=float, default=1e9, help="seconds of all; what is left is not run")
    parser.add_argument("--logs", type=Path, help="folder for the output of every process")
    parser.add_argument("--list", action="store_true", help="only print the kinds")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    named = {kind.name: kind for kind in kinds()}
    if arguments.list:
        print(*named, sep="\n")
        return
    for word in arguments.only or ():
        if not any(word in name for name in named if name != PLANTED):
            parser.error(f"--only: no kind has {word!r} in its name; --list prints them")
    if not torch.cuda.is_available():
        parser.error("it needs an NVIDIA GPU, and torch finds none")
    if arguments.run:
        kind = named[arguments.run]
        if arguments.once:
            kind.run()
            torch.cuda.synchronize()
        else:
            run_plainly(kind)
        return
    arguments.sanitizer = shutil.which("compute-sanitizer")
    if arguments.sanitizer is None:
        parser.error("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit, in its folder bin")
    if not arguments.commit:
        parser.error("the package is not in a git repository: pass --commit")
    sys.exit(not passes(arguments, named))


if __name__ == "__main__":
    main()

"""Checks and timings of one step of an LSTM or GRU on a GPU, as in acting; appends to results/step_gpu.csv.

Checks: results against float64, resets, independence of other rows, a captured CUDA graph, a compiled step. Then
microseconds of a step, over 100 dependent steps in one CUDA graph, compared with ``torch.lstm_cell`` and
``torch.gru_cell`` (without resets) at the same precision. Nothing is timed if a check fails. Usage::

    python benchmarks/bench_step_gpu.py                     # a minute, including compilation
    python benchmarks/bench_step_gpu.py --sweep             # compare other tiles with the default ones instead
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch
import triton
from torch import Tensor

from recurl.core.precision import resolve_precision
from recurl.core.relative_error import relative_error
from recurl.execution.traced import InductorFunction
from recurl.recurrence import CELLS, LayerWeights, Options, record_backends, step_stack
from recurl.recurrence.cuda.launch import processors_of
from recurl.recurrence.cuda.step.config import StepTile, pays, tile_for_step
from recurl.recurrence.cuda.step.launch import run_step
from results_file import append, commit

RESULTS = Path(__file__).parent / "results" / "step_gpu.csv"
HIDDEN, ROWS, STEPS = (32, 64, 128, 256), (1, 16, 64, 256, 1024, 4096, 16_384), 100
LIMITS = {"ieee": 2e-6, "tf32": 1.5e-3, "bf16": 1.5e-2}
OF_TORCH = {"ieee": "highest", "tf32": "high"}
PEERS = {"lstm": torch.lstm_cell, "gru": torch.gru_cell}
WORKERS = 14
VARIANTS = [
    StepTile(*tile)
    for tile in (
        (16, 8, 64, 2, 4), (16, 8, 64, 4, 4), (16, 16, 64, 4, 4), (16, 16, 64, 8, 4), (16, 16, 32, 4, 6),
        (16, 16, 128, 4, 3), (16, 32, 64, 8, 4), (32, 16, 64, 4, 4), (32, 32, 64, 8, 4), (32, 32, 32, 4, 4),
        (64, 16, 64, 4, 4), (64, 32, 32, 4, 4), (64, 32, 64, 8, 3), (64, 32, 32, 8, 4), (64, 64, 32, 8, 3),
        (128, 16, 32, 8, 4), (128, 32, 64, 8, 3), (128, 32, 32, 8, 4), (128, 32, 32, 4, 3), (128, 64, 32, 8, 3),
    )
]  # fmt: skip
ODD = [(1, 1, 3), (33, 40, 130), (100, 65, 1000), (256, 2048, 70)]
"""Hidden sizes, inputs and rows that are only checked."""
Job = tuple[str, str, StepTile, int, int]


class Case:
    """A layer with its inputs and states."""

    def __init__(self, cell: str, hidden: int, rows: int, dtype: torch.dtype = torch.float32, inputs: int = 0) -> None:
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (scale * torch.randn(shape, generator=generator, device="cuda")).to(dtype)

        inputs = inputs or hidden
        gates = {"lstm": 4, "gru": 3}[cell] * hidden
        scales = 1 / inputs**0.5, 1 / hidden**0.5
        self.cell = CELLS[cell]
        w_ih, w_hh = normal(gates, inputs, scale=scales[0]), normal(gates, hidden, scale=scales[1])
        self.weights = LayerWeights(w_ih, w_hh, normal(gates, scale=0.3), normal(gates, scale=0.3))
        self.x = normal(rows, inputs)
        self.states = tuple(normal(rows, 1, hidden, scale=0.5) for _ in self.cell.state_names)
        self.is_init = torch.rand(rows, 1, device="cuda", generator=generator) < 0.02

    def exact(self) -> list[Tensor]:
        """Compute the step from its definition, in float64."""
        wide = [LayerWeights(*(None if w is None else w.double() for w in self.weights))]
        states = tuple(state.double() for state in self.states)
        features, after = step_stack(self.cell, [wide], self.x.double(), states, fused=False, is_init=self.is_init)
        return [features, *after]

    def step(self, options: Options) -> list[Tensor]:
        """Compute the step as modules do."""
        features, after = step_stack(
            self.cell, [[self.weights]], self.x, self.states, is_init=self.is_init, options=options
        )
        return [features, *after]

    def run(self, precision: str, tile: StepTile) -> Callable[[], None]:
        """Return a function that makes many steps with a tile, each from the previous states."""

        def steps() -> None:
            states = self.states
            for _ in range(STEPS):
                _, states = run_step([self.weights], self.x, states, self.is_init, precision, lambda *_: tile)

        return steps

    def peer(self) -> Callable[[], None]:
        """Return the same function with torch's cell."""

        def steps() -> None:
            states = [state.squeeze(1) for state in self.states]
            for _ in range(STEPS):
                after = PEERS[self.cell.name](self.x, states if len(states) == 2 else states[0], *self.weights[:4])  # pyright: ignore[reportCallIssue, reportArgumentType]
                states = list(after) if len(states) == 2 else [after]

        return steps


def options_of(precision: str) -> Options:
    return Options(precision=precision if precision != "bf16" else "ieee")


def error_of(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    return max(relative_error(one, other) for one, other in zip(found, exact, strict=True))


def microseconds(function: Callable[[], None], replays: int = 7) -> float:
    """Return the microseconds per step of a captured function."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    graph.replay()
    times: list[float] = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / STEPS)
    return statistics.median(times)


def checks() -> Iterator[tuple[str, float, float]]:
    """Yield name, error and limit of each check."""
    for cell, precision in product(CELLS_TIMED, ("ieee", "tf32", "bf16")):
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        for hidden, inputs, rows in (
            *((hidden, hidden, rows) for hidden in HIDDEN for rows in ROWS),
            *ODD,
        ):
            case = Case(cell, hidden, rows, dtype, inputs)
            exact = case.exact()
            for state in case.states:
                state[case.is_init.squeeze(1)] = torch.nan
            with record_backends() as ran:
                found, again = (case.step(options_of(precision)) for _ in range(2))
            same = all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
            as_ruled = ran == ["triton_step"] * 2 if pays(rows, hidden, precision) else "triton_step" not in ran
            error = error_of(found, exact) if same and as_ruled else float("inf")
            yield f"{cell} {precision} H {hidden} I {inputs} rows {rows}", error, LIMITS[precision]
    for cell in CELLS_TIMED:
        yield f"{cell} captured", captured_differs(cell), 0
        yield f"{cell} compiled", compiled_error(cell), LIMITS["ieee"]


def captured_differs(cell: str) -> float:
    """Return the difference between a graph replayed on other inputs and an individually launched step."""
    case = Case(cell, 64, 100)
    graph = torch.cuda.CUDAGraph()
    case.step(Options())
    with torch.cuda.graph(graph):
        found = case.step(Options())
    case.x.normal_()
    case.is_init.logical_not_()
    graph.replay()
    return float(sum(not torch.equal(*pair) for pair in zip(found, case.step(Options()), strict=True)))


def compiled_error(cell: str) -> float:
    """Return the error of a step between other operations, compiled as in collectors and by ``torch.compile``."""
    case = Case(cell, 64, 100)

    def run(x: Tensor, is_init: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        options = Options(precision=resolve_precision("auto", x.device))
        features, after = step_stack(case.cell, [[case.weights]], x * 2, states, is_init=is_init, options=options)
        return features + 1, *after

    inputs = [case.x, case.is_init, *case.states]
    case.x = case.x * 2
    features, *after = case.exact()
    errors: list[float] = []
    for function in (InductorFunction(run, inputs), torch.compile(run, fullgraph=True)):
        with record_backends() as ran:
            found = function(*inputs)
        errors.append(error_of(found, [features + 1, *after]) if ran == ["triton_step"] else float("inf"))
    return max(errors)


def rows_differ() -> None:
    """Print how much a row's results depend on the number of other rows."""
    for cell, precision in product(CELLS_TIMED, ("ieee", "tf32")):
        case = Case(cell, 128, ROWS[-1])
        whole = case.step(options_of(precision))
        apart: list[str] = []
        for rows in ROWS[:-1]:
            part = Case(cell, 128, 1)
            part.weights, part.x, part.is_init = case.weights, case.x[:rows], case.is_init[:rows]
            part.states = tuple(state[:rows] for state in case.states)
            found = part.step(options_of(precision))
            same = all(torch.equal(a, b[:rows]) for a, b in zip(found, whole, strict=True))
            apart.append(f"{rows}: {'same' if same else f'{error_of(found, [w[:rows].double() for w in whole]):.0e}'}")
        print(f"bits of {cell} {precision} with {ROWS[-1]} rows:", ", ".join(apart))


def compile_all(jobs: Iterable[Job]) -> None:
    """Fill Triton's cache, compiling kernels in parallel."""
    begin = time.perf_counter()
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        failed = [text for text in pool.map(compile_one, list(jobs)) if text]
    print(f"compiled in {time.perf_counter() - begin:.0f} s", *failed, sep="\n", flush=True)


def compile_one(job: Job) -> str:
    """Compile one kernel; return the error message if that fails."""
    cell, precision, tile, hidden, inputs = job
    case = Case(cell, hidden, 16, torch.bfloat16 if precision == "bf16" else torch.float32, inputs)
    try:
        run_step([case.weights], case.x, case.states, case.is_init, precision, lambda *_: tile)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - the tile is too large
        return f"{job}: {type(error).__name__} {str(error)[:100]!r}"
    return ""


def table(out: Path) -> None:
    """Time the default tiles and torch's cells."""
    base = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    nothing = torch.zeros(1, device="cuda")
    print(
        f"a kernel that does nothing: {microseconds(lambda: [nothing.add_(1) for _ in range(STEPS)] and None):.2f} us"
    )
    print("cell    H   rows | highest: us, torch's, tile | high: us, torch's, tile")
    for cell, hidden, rows in product(CELLS_TIMED, HIDDEN, ROWS):
        line = f"{cell:4} {hidden:4} {rows:6}"
        for precision in OF_TORCH:
            case = Case(cell, hidden, rows)
            tile = tile_for_step(rows, hidden, processors_of(case.x.device))
            torch.set_float32_matmul_precision(OF_TORCH[precision])
            ours, peer = microseconds(case.run(precision, tile)), microseconds(case.peer())
            line += f" | {ours:6.2f} {peer:7.2f} {tile.rows}x{tile.units}"
            row = {"commit": commit_name, **base, "cell": cell, "H": hidden, "rows": rows, "precision": precision}
            row |= {"step_us": f"{ours:.2f}", "torch_us": f"{peer:.2f}", "ratio": f"{peer / ours:.2f}"}
            append(out, row | {"tile": f"{tile.rows}x{tile.units}x{tile.depth}, {tile.warps} warps"})
        print(line, flush=True)


def sweep() -> None:
    """Time non-default tiles; print all for the LSTM, and the best of each case."""
    print("tiles (rows, units, depth, warps, stages):")
    for index, tile in enumerate(VARIANTS):
        print(index, *(getattr(tile, name) for name in ("rows", "units", "depth", "warps", "stages")), end="; ")
    best: Counter[int] = Counter()
    for cell, precision, hidden, rows in product(CELLS_TIMED, OF_TORCH, HIDDEN, ROWS):
        case = Case(cell, hidden, rows)
        ruled = tile_for_step(rows, hidden, processors_of(case.x.device))
        rule_time = microseconds(case.run(precision, ruled), 3)
        times: dict[int, float] = {}
        for index, tile in enumerate(VARIANTS):
            if tile.units <= max(16, hidden) and tile.rows <= max(16, rows):
                try:
                    times[index] = microseconds(case.run(precision, tile), 3)
                except Exception:  # noqa: BLE001 - the tile is too large, as reported at compilation
                    continue
        ordered = sorted(times, key=lambda index: times[index])
        best[ordered[0]] += 1
        first = ", ".join(f"{index}: {times[index]:.2f}" for index in ordered[:5])
        print(f"\n{cell} {precision} {hidden} {rows}: rule {rule_time:.2f}; {first}", end="", flush=True)
    print("\nbest:", best.most_common())


CELLS_TIMED = ("lstm", "gru")
commit_name = commit()


def main() -> None:
    """Check, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="time non-default tiles, after the checks")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    processors = processors_of(torch.device("cuda", 0))
    sizes = [*((hidden, 32, rows) for hidden in HIDDEN for rows in ROWS), *ODD]
    ruled = {
        (
            cell,
            precision,
            tile_for_step(rows, hidden, processors),
            32 if hidden % 16 == 0 else hidden,
            inputs,
        )
        for cell, precision, (hidden, inputs, rows) in product(CELLS_TIMED, LIMITS, sizes)
    }
    more = set(product(CELLS_TIMED, OF_TORCH, VARIANTS, [32], [32])) if args.sweep else set()
    compile_all(sorted(ruled | more, key=str))
    failed, worst = 0, dict.fromkeys(LIMITS, 0.0)
    for name, error, limit in checks():
        passed = error <= limit  # false for NaN
        failed += not passed
        if not passed:
            print(f"FAIL {name}: {error:.1e}, allowed {limit:.1e}", flush=True)
        for precision in LIMITS:
            worst[precision] = max(worst[precision], error if precision in name else 0.0)
    if failed:
        sys.exit(f"{failed} checks failed: nothing is timed")
    print("all checks pass; largest errors:", *(f"{name} {error:.1e}" for name, error in worst.items()))
    rows_differ()
    if args.sweep:
        sweep()
    else:
        table(args.out)


if __name__ == "__main__":
    main()

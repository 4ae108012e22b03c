"""Checks and timings of gated matrix recurrences on a GPU; appends to results/matrix_recurrence.csv.

Checks compare outputs, states after segments and gradients with a loop in float64, and test determinism, NaN in one
segment and a replayed CUDA graph whose segments change. Then milliseconds, forward and forward with backward, of
replayed graphs and of eager calls, medians over calls, beside flash-linear-attention if it is installed (``simple_gla``
or ``gated_delta_rule``, segments as ``cu_seqlens``; where it refuses gradients, for its times) and beside an
associative scan over states. ``simple_gla`` has no rates: its time without the product of keys and rates ("fla") and
with it ("fla with rates"), which computes the same function. Nothing is timed if a check fails. Usage::

    python benchmarks/bench_matrix_recurrence.py
    python benchmarks/bench_matrix_recurrence.py --dtypes bf16 --forms delta --shapes 256x128
    python benchmarks/bench_matrix_recurrence.py --only checks       # or times, scan, step
    python benchmarks/bench_matrix_recurrence.py --only sweep --dtypes bf16 --forms delta
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench_linear_recurrence import captured, graphed, milliseconds, outcomes
from recurl.core.relative_error import relative_error
from recurl.recurrence import Boundaries
from recurl.recurrence.cuda.matrix.backend import TritonMatrix
from recurl.recurrence.cuda.matrix.config import Plan, Sizes, Tile, plan_for
from recurl.recurrence.matrix.kernels import MatrixInputs
from results_file import append, commit

RESULTS = Path(__file__).parent / "results" / "matrix_recurrence.csv"
SHAPES = {f"{rows}x{32_768 // rows}": (rows, 32_768 // rows) for rows in (1024, 256, 64, 32, 16, 8, 2, 1)}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FORMS = {"plain": False, "delta": True}
HEADS, SIZE = 4, 64
SEGMENTS = {"none": (0.0, False), "resets": (0.02, False), "stored": (0.02, True)}
SPARSE = "sparse"  # segments with states stored at the starts of rows only
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
WANTED = (True, True, True, True, True, False)
NAMES = ("query", "key", "value", "log_decay", "rate", "states")


@dataclass(frozen=True)
class Case:
    """Inputs of a recurrence, and gradients of its results."""

    inputs: MatrixInputs
    grad: Tensor
    grad_after: Tensor | None = None

    def forward(self, kernels: TritonMatrix, keep: bool = False) -> Any:
        return kernels.forward(self.inputs, keep)

    def run(self, kernels: TritonMatrix, needs: tuple[bool, ...] = WANTED) -> tuple[Tensor | None, ...]:
        after, saved = self.forward(kernels, keep=True)
        grads = (self.grad,) if self.grad_after is None else (self.grad, self.grad_after)
        found = list(kernels.backward(self.inputs, after, saved, grads, needs))
        if self.inputs.states is not None and found[5] is not None:
            found[5] = found[5][:: found[5].shape[0] // self.inputs.states.shape[0]]
        return after[0], after[1] if self.inputs.after else None, *found


def case_of(
    shape: tuple[int, int],
    dtype: torch.dtype,
    delta: bool,
    segments: str = "none",
    after: bool = False,
    sizes: tuple[int, int, int] = (HEADS, SIZE, SIZE),
    seed: int = 0,
) -> Case:
    """A case whose segments start at 2% of the tokens (of one that is sparse at 20%), or at row starts alone."""
    generator = torch.Generator("cuda").manual_seed(seed)
    tokens, (heads, keys, values) = shape[0] * shape[1], sizes
    resets, stored = SEGMENTS.get(segments, (0.2, True))

    def random(*size: int) -> Tensor:
        return torch.randn(tokens, heads, *size, device="cuda", generator=generator)

    query, key = random(keys) * keys**-0.5, torch.nn.functional.normalize(random(keys), dim=-1)
    log_decay = torch.nn.functional.logsigmoid(random() + 4)
    boundaries = Boundaries.from_is_init(torch.rand(shape, device="cuda", generator=generator) < resets)
    different = shape[0] if segments == SPARSE else 1
    states = torch.randn(different, heads, keys, values, device="cuda", generator=generator) if stored else None
    if states is not None and segments != SPARSE:
        states = states.expand(tokens, heads, keys, values)
    narrow = (one.to(dtype) for one in (query, key, random(values)))
    inputs = MatrixInputs(*narrow, log_decay, random().sigmoid(), states, boundaries, delta, after)
    boundaries.start_index  # noqa: B018 - cached, as for the layers of a model
    return Case(inputs, random(values).to(dtype), random(keys, values) if after else None)


def loop(case: Case) -> tuple[Tensor | None, ...]:
    """Return the results of :meth:`Case.run` and the gradient of the states, token by token in float64."""
    inputs = case.inputs
    given = [None if one is None else one.double().detach().requires_grad_() for one in inputs[:6]]
    query, key, value, log_decay, rate, states = given
    assert query is not None
    assert key is not None
    assert value is not None
    assert log_decay is not None
    assert rate is not None
    spacing = 1 if states is None else key.shape[0] // states.shape[0]
    outputs, after = [], []
    state = key.new_zeros(())
    for n, start in enumerate(inputs.boundaries.starts.tolist()):
        if start:
            state = key.new_zeros(*key.shape[1:], value.shape[-1])
            if states is not None and n % spacing == 0:
                state = states[n // spacing]
        k, b = key[n].unsqueeze(-1), rate[n][:, None, None]
        state = log_decay[n].exp()[:, None, None] * state
        seen = k.mT @ state if inputs.delta else 0
        state = state + b * k @ (value[n].unsqueeze(-2) - seen)
        outputs.append((state.mT @ query[n].unsqueeze(-1)).squeeze(-1))
        after.append(state)
    output, every = torch.stack(outputs), torch.stack(after)
    loss, ends = (output * case.grad).sum(), inputs.boundaries.ends[:, None, None, None]
    if case.grad_after is not None:
        loss = loss + (torch.where(ends, every, 0) * case.grad_after).sum()
    found = iter(torch.autograd.grad(loss, [one for one in given if one is not None]))
    gradients = [None if one is None else next(found) for one in given]
    kept = None if case.grad_after is None else torch.where(ends, every, 0).detach()
    return output.detach(), kept, *gradients


def compared(case: Case, kernels: TritonMatrix) -> tuple[bool, str]:
    """Return whether the results are those of the loop and the same bits twice, and the errors."""
    needs = (*WANTED[:5], case.inputs.states is not None)
    found, again = case.run(kernels, needs), case.run(kernels, needs)
    pairs = [(x, y, z) for x, y, z in zip(found, again, loop(case), strict=True) if x is not None and z is not None]
    errors = [relative_error(x, z) for x, _, z in pairs]
    same = all(y is not None and torch.equal(x, y) for x, y, _ in pairs)
    numbers = " ".join(f"{error:.0e}" for error in errors)
    return max(errors) <= LIMITS[case.grad.dtype] and same, f"{numbers}, same bits {same}"


def checks(dtypes: list[str], forms: list[str]) -> Iterator[tuple[str, bool, str]]:
    """Yield the name, the outcome and the numbers of each check."""
    kernels = TritonMatrix()
    shapes = {"rows": ((3, 37), (2, 5, 7)), "wide": ((2, 70), (1, 130, 40)), "long": ((1, 1500), (2, 64, 64))}
    for (name, (shape, sizes)), dtype, form in product(shapes.items(), dtypes, forms):
        for segments, after in (("none", False), ("stored", True), (SPARSE, False)):
            case = case_of(shape, DTYPES[dtype], FORMS[form], segments, after, sizes)
            yield f"{name} {dtype} {form} {segments}", *compared(case, kernels)
        fast = case.inputs._replace(log_decay=200 * case.inputs.log_decay)  # of a chunk: zero, its inverse is infinite
        yield f"{name} {dtype} {form} {segments}, fast decay", *compared(replace(case, inputs=fast), kernels)
    for form in forms:
        case = case_of((1, 500), torch.float32, FORMS[form])
        starts = case.inputs.boundaries.starts.clone()
        starts[[100, 300]] = True
        clean = replace(case, inputs=case.inputs._replace(boundaries=Boundaries(starts, (1, 500))))
        value = case.inputs.value.clone()
        value[200] = torch.nan
        expected, found = clean.run(kernels), replace(clean, inputs=clean.inputs._replace(value=value)).run(kernels)
        outside = torch.ones(500, dtype=torch.bool, device="cuda")
        outside[100:300] = False
        pairs = [(x, y) for x, y in zip(found, expected, strict=True) if x is not None and y is not None]
        kept = all(torch.equal(x[outside], y[outside]) for x, y in pairs)
        yield f"NaN stays in its segment, {form}", kept and bool(pairs[0][0][200:300].isnan().all()), ""
        yield f"graph, {form}", replays(kernels, FORMS[form]), "a captured call, replayed on other segments"


def replays(kernels: TritonMatrix, delta: bool) -> bool:
    case, other = (case_of((8, 512), torch.float32, delta, "resets", seed=seed) for seed in (0, 1))
    starts = case.inputs.boundaries.starts

    def run() -> tuple[Tensor | None, ...]:
        inputs = case.inputs._replace(boundaries=Boundaries(starts, (8, 512)))
        return replace(case, inputs=inputs).run(kernels)

    graph, results = captured(run)
    expected = other.run(kernels)
    for to, value in zip(case.inputs[:5], other.inputs[:5], strict=True):
        to.copy_(value)
    starts.copy_(other.inputs.boundaries.starts)
    case.grad.copy_(other.grad)
    graph.replay()
    pairs = zip(results, expected, strict=True)
    return all(torch.equal(one, two) for one, two in pairs if one is not None and two is not None)


@dataclass(frozen=True)
class Timed:
    """Milliseconds, forward and forward with backward, of replayed graphs and eager calls."""

    forward: float
    both: float
    eager_forward: float
    eager_both: float

    def __str__(self) -> str:
        return f"{self.forward:8.3f}{self.both:8.3f}{self.eager_forward:8.3f}{self.eager_both:8.3f}"


def timed(forward: Callable[[], Any], both: Callable[[], Any]) -> Timed:
    """Time functions; what fails, or can't be captured, takes infinitely long."""

    def attempt(measure: Callable[[Callable[[], Any]], float], function: Callable[[], Any]) -> float:
        try:
            return measure(function)
        except Exception as error:  # noqa: BLE001 - any error of a peer is printed
            print(f"{measure.__name__}: {type(error).__name__} {str(error)[:160]!r}", flush=True)
            torch.cuda.synchronize()
            return float("inf")

    times = [attempt(measure, function) for measure in (graphed, eager) for function in (forward, both)]
    return Timed(*times)


def eager(function: Callable[[], Any]) -> float:
    return milliseconds(function, "cuda")


def flash(case: Case, shape: tuple[int, int], rates: bool) -> Timed:
    """Time flash-linear-attention, in the plain form with or without the product of keys and rates."""
    inputs, delta = case.inputs, case.inputs.delta
    resets = int(inputs.boundaries.starts.sum()) > shape[0]
    view = (1, shape[0] * shape[1]) if resets else shape
    first = inputs.boundaries.starts.nonzero().squeeze(-1)
    offsets = torch.cat([first, first.new_tensor([inputs.key.shape[0]])]) if resets else None
    query, key, value, decay, rate = (one.reshape(*view, *one.shape[1:]).contiguous() for one in inputs[:5])
    given = [query, key, value, decay, *([rate] if rates else [])]
    for one in given:
        one.requires_grad_()
    grad = case.grad.reshape(value.shape)
    rest = {"scale": 1.0, "cu_seqlens": offsets}
    if delta:
        run = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        call = lambda: run(query, key, value, decay, rate, **rest)[0]  # noqa: E731
    else:
        run = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla

        def call() -> Tensor:
            written = key * rate.to(key.dtype).unsqueeze(-1) if rates else key
            return run(query, written, value, g=decay, **rest)[0]

    def forward() -> Tensor:
        with torch.no_grad():
            return call()

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(call(), given, grad)

    # It refuses gradients on Hopper before Triton 3.7.1, whose compiler gets them wrong (its issue 640), not slow.
    importlib.import_module("fla.ops.common.chunk_o").TRITON_ABOVE_3_7_1 = True
    return timed(forward, both)


def scanned(case: Case, shape: tuple[int, int]) -> Timed:
    """Time an associative scan over states, and with the delta rule over K x K matrices, of every token."""
    given = [one.float().reshape(*shape, *one.shape[1:]).requires_grad_() for one in case.inputs[:5]]
    query, key, value, decay, rate = given
    grad, eye = case.grad.float().reshape(value.shape), torch.eye(key.shape[-1], device="cuda")

    def scan(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        length = a.shape[1]
        if length == 1:
            return a, b
        even = length - length % 2
        multiply = torch.matmul if case.inputs.delta else torch.mul
        a0, b0, a1, b1 = a[:, :even:2], b[:, :even:2], a[:, 1:even:2], b[:, 1:even:2]
        odd_a, odd_b = scan(multiply(a1, a0), multiply(a1, b0) + b1)
        rest_a, rest_b = a[:, 2::2], b[:, 2::2]
        before_a, before_b = odd_a[:, : rest_a.shape[1]], odd_b[:, : rest_b.shape[1]]
        even_a = torch.cat([a[:, :1], multiply(rest_a, before_a)], 1)
        even_b = torch.cat([b[:, :1], multiply(rest_a, before_b) + rest_b], 1)
        return _interleaved(even_a, odd_a), _interleaved(even_b, odd_b)

    def call() -> Tensor:
        a = decay.exp()[..., None, None]
        written = rate[..., None, None] * key.unsqueeze(-1)
        if case.inputs.delta:
            a = a * (eye - written * key.unsqueeze(-2))
        _, states = scan(a, written * value.unsqueeze(-2))
        return (states.mT @ query.unsqueeze(-1)).squeeze(-1)

    def forward() -> Tensor:
        with torch.no_grad():
            return call()

    return timed(forward, lambda: torch.autograd.grad(call(), given, grad))


def _interleaved(even: Tensor, odd: Tensor) -> Tensor:
    result = even.new_empty(even.shape[0], even.shape[1] + odd.shape[1], *even.shape[2:])
    result[:, ::2], result[:, 1::2] = even, odd
    return result


def ours(case: Case, kernels: TritonMatrix) -> Timed:
    return timed(lambda: case.forward(kernels), lambda: case.run(kernels))


def peer(name: str, run: Callable[[], Timed]) -> Timed | None:
    """Return a peer's times; its errors are printed."""
    try:
        return run()
    except Exception as error:  # noqa: BLE001 - any error of a peer is printed
        print(f"{name}: {type(error).__name__} {str(error)[:160]!r}", flush=True)
        return None
    finally:
        torch.cuda.empty_cache()


PARTS = ("checks", "times", "scan", "step", "sweep")


def table(args: argparse.Namespace) -> None:
    """Time all cases; the last columns are the ratios to flash-linear-attention, of graphs if both were captured."""
    installed = importlib.util.find_spec("fla") is not None
    if not installed:
        print("flash-linear-attention is not installed (fla)")
    kernels = TritonMatrix(precision=args.precision)
    print(f"\n{'':32}{'graphs, ms':>16}{'eager, ms':>16}")
    print(f"{'':32}{'forward':>8}{'both':>8}{'forward':>8}{'both':>8}{'x fla':>8}{'x fla':>8}")
    for dtype, form, name, segments in product(args.dtypes, args.forms, args.shapes, args.segments):
        case = case_of(SHAPES[name], DTYPES[dtype], FORMS[form], segments)
        took = ours(case, kernels)
        write("triton", dtype, form, name, segments, took)
        line = f"{dtype} {form} {name} {segments:8}".ljust(32) + str(took)
        peers = {"fla": FORMS[form]} | ({} if FORMS[form] else {"fla with rates": True})  # whether they have rates
        for peer_name, rates in peers.items() if installed else ():
            other = peer(peer_name, partial(flash, case, SHAPES[name], rates))
            if other is not None:
                write(peer_name, dtype, form, name, segments, other)
                forward, both = (
                    (took.forward / other.forward, took.both / other.both)
                    if max(other.forward, other.both) < float("inf")
                    else (took.eager_forward / other.eager_forward, took.eager_both / other.eager_both)
                )
                line += f"{forward:8.2f}{both:8.2f}   {peer_name}{other}"
        print(line, flush=True)


def scans(args: argparse.Namespace) -> None:
    """Time an associative scan, at a small size and, where memory suffices, at 32,768 tokens."""
    kernels = TritonMatrix(precision=args.precision)
    for form, shape in product(args.forms, ((16, 128), SHAPES["256x128"])):
        name = "x".join(map(str, shape))
        case = case_of(shape, torch.float32, FORMS[form])
        took, other = ours(case, kernels), peer("scan", lambda case=case, shape=shape: scanned(case, shape))
        if other is not None:
            write("triton", "fp32", form, name, "none", took)
            write("associative scan", "fp32", form, name, "none", other)
            times = min(other.forward, other.eager_forward), min(other.both, other.eager_both)
            print(f"fp32 {form} {name}: an associative scan over states takes {times[0]:.3f} and {times[1]:.3f} ms, "
                  f"{times[0] / took.forward:.0f} and {times[1] / took.both:.0f} x ours", flush=True)  # fmt: skip


def write(name: str, dtype: str, form: str, shape: str, segments: str, took: Timed) -> None:
    append(RESULTS, {
        "date": time.strftime("%Y-%m-%d"), "commit": commit(), "device": torch.cuda.get_device_name(),
        "torch": torch.__version__, "implementation": name, "dtype": dtype, "form": form, "shape": shape,
        "segments": segments, "heads": HEADS, "size": SIZE, "forward_ms": f"{took.forward:.4f}",
        "both_ms": f"{took.both:.4f}", "eager_forward_ms": f"{took.eager_forward:.4f}",
        "eager_both_ms": f"{took.eager_both:.4f}",
    })  # fmt: skip


def steps(_: argparse.Namespace) -> None:
    """Time single steps in place, and print the bandwidth they reach."""
    kernels = TritonMatrix()
    for rows in (1, 16, 256, 4096, 16_384):
        case = case_of((rows, 1), torch.float32, True)
        states = torch.zeros(rows, HEADS, SIZE, SIZE, device="cuda")
        is_init = torch.zeros(rows, dtype=torch.bool, device="cuda")
        for form, delta in FORMS.items():
            step = partial(kernels.step, *case.inputs[:5], states, is_init, delta, in_place=True)
            took = graphed(step)
            print(f"step {form}, {rows} rows: {1e3 * took:.1f} us, {2e-9 * states.nbytes / took:.2f} TB/s", flush=True)


TILES = [Tile(*one, stages) for one, stages in product([(64, 4), (64, 8), (32, 4), (32, 2)], (1, 2, 3))]
CHUNKS = (16, 32)
PIECES = (8, 16, 32)


def planned(chunk: int, tile: Tile, piece: int | None = None) -> Callable[[Sizes], Plan]:
    """Return a rule for plans that are as usual but for a chunk, tiles of both passes, and the length of pieces."""

    def rule(sizes: Sizes) -> Plan:
        chunks, usual = -(-sizes.length // chunk), plan_for(sizes)
        length = max(1, usual.piece * usual.chunk // chunk) if piece is None else piece
        return replace(usual, chunk=chunk, piece=min(length, chunks), forward=tile, backward=tile)

    return rule


Way = tuple[str, str, int, Tile]


def tried(dtype: str, form: str, chunk: int, tile: Tile) -> str:
    """Compile the kernels of a plan, in a separate process, and check them; return what is wrong, if anything."""
    try:
        case = case_of((2, 128), DTYPES[dtype], FORMS[form], "resets")
        passed, numbers = compared(case, TritonMatrix(planned(chunk, tile)))
        case_of((2, 4096), DTYPES[dtype], FORMS[form]).run(TritonMatrix(planned(chunk, tile)))  # in pieces
    except Exception as error:  # noqa: BLE001 - the tile is too large
        return f"{type(error).__name__} {str(error)[:80]!r}"
    return "" if passed else numbers


def sweep(args: argparse.Namespace) -> None:
    """Compile and check plans in parallel, then time both passes of each apart; print the fastest.

    Both passes of a call have the same chunk; their tiles are free. Then lengths of pieces, for the best chunk.
    """
    ways: list[Way] = list(product(args.dtypes, args.forms, args.chunks, TILES))
    wrong = outcomes(tried, ways, args.seconds)
    for way, problem in wrong.items():
        if problem:
            print("wrong:", *way, problem)
    for dtype, form, name in product(args.dtypes, args.forms, args.shapes):
        case = case_of(SHAPES[name], DTYPES[dtype], FORMS[form], "resets" if args.resets else "none")
        both = [way for way, problem in wrong.items() if way[:2] == (dtype, form) and not problem]
        found = [(*split_times(case, planned(*way[2:])), *way[2:]) for way in both]
        best = {
            chunk: [sorted(((one[k], one[3]) for one in found if one[2] == chunk), key=itemgetter(0)) for k in (0, 1)]
            for chunk in args.chunks
        }
        best = {chunk: passes for chunk, passes in best.items() if passes[0]}
        for (chunk, passes), k in product(best.items(), (0, 1)):
            print(f"{dtype} {form} {name:8} chunk {chunk} {('forward', 'backward')[k]}:")
            for took, tile in passes[k][:6]:
                print(f"    {took:.4f} {tile}", flush=True)
        if SHAPES[name][1] > 1024 and best:
            chunk = min(best, key=lambda one: sum(passes[0][0] for passes in best[one]))
            for piece in PIECES:
                times = [split_times(case, planned(chunk, best[chunk][k][0][1], piece))[k] for k in (0, 1)]
                print(f"{dtype} {form} {name:8} chunk {chunk} pieces of {piece}: {times[0]:.4f} {times[1]:.4f}")


def split_times(case: Case, rule: Callable[[Sizes], Plan]) -> tuple[float, float]:
    """Return milliseconds of the forward pass that saves what the backward pass reads, and of the backward pass."""
    kernels = TritonMatrix(rule)
    after, saved = case.forward(kernels, keep=True)
    backward = graphed(lambda: kernels.backward(case.inputs, after, saved, (case.grad,), WANTED))
    return graphed(lambda: case.forward(kernels, keep=True)), backward


def main() -> None:
    """Check, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--segments", nargs="+", choices=list(SEGMENTS), default=list(SEGMENTS))
    parser.add_argument("--precision", choices=("tf32x3", "ieee", "tf32"), default="tf32x3", help="of float32 products")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS[:4]))
    parser.add_argument("--chunks", nargs="+", type=int, choices=CHUNKS, default=list(CHUNKS), help="of a sweep")
    parser.add_argument("--resets", action="store_true", help="sweep with segments")
    parser.add_argument("--seconds", type=float, default=300, help="time after which a sweep stops compiling")
    args = parser.parse_args()
    failed = 0
    for name, passed, numbers in checks(args.dtypes, args.forms) if "checks" in args.only else ():
        print("ok  " if passed else "FAIL", name, numbers, flush=True)
        failed += not passed
    if failed:
        sys.exit(f"{failed} checks failed: nothing is timed")
    for part, run in (("times", table), ("scan", scans), ("step", steps), ("sweep", sweep)):
        if part in args.only:
            run(args)


if __name__ == "__main__":
    main()

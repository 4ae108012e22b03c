"""Accuracy of the CUDA kernels against float64: relative (Frobenius) errors of features and every gradient.

Every case must pass its precision's gate, or, where inputs saturate the gates, stay within three times the error of
torch's own products in the same precision; and results must be deterministic. Also: permuted rows give the same bits,
NaN stays in its segment, torch.compile creates one graph, and a CUDA graph replays the step on other data.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial

import torch
from torch import Tensor

from recurl.core.relative_error import relative_error
from recurl.recurrence import BACKENDS, Boundaries, LayerCall, LayerWeights, Options, Support
from recurl.recurrence.cuda.products.launch import over_tokens, product
from recurl.recurrence.operation import arguments_of
from rnn_gpu_layer import DEVICE, Layer, Problem, guarded, options_of

GATES = {"ieee": 2e-6, "tf32x3": 5e-6, "tf32": 2e-3, "bf16": 1.5e-2}
BIAS = 5e-5
FLIPS = 5e-2  # sums of 65,504 times weights; rounding flips the sign of some
COMPILED = 1e-5  # the pointwise operations around the operator may be rounded differently


def errors_of(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {name: relative_error(found[name], value) for name, value in exact.items()}


def agrees(problem: Problem, precision: str, recompute: bool = False) -> bool:
    """Compare with float64, and print one line."""
    layer = Layer(problem)
    with torch.no_grad():  # states stored inside a segment must not be read
        for state in layer.states:
            state[~layer.boundaries.starts] = float("nan")
    exact = layer.step("loop", Options(), torch.float64, stored=True)
    options = options_of(precision, recompute)
    found, again = (layer.step("triton", options, stored=True) for _ in range(2))
    errors = errors_of(found, exact)
    gates = dict.fromkeys(errors, GATES[precision])
    if problem.scale != 1.0:
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        plain = layer.step("loop", Options(), torch.bfloat16 if precision == "bf16" else torch.float32, stored=True)
        torch.backends.cuda.matmul.allow_tf32 = False
        for name, error in errors_of(plain, exact).items():
            gates[name] = max(gates[name], 3 * error)
    worst = max(errors, key=lambda name: errors[name] / gates[name])
    same = all(torch.equal(found[name], again[name]) for name in found)
    bias = ((found["y"].abs().mean() - exact["y"].abs().mean()).abs() / exact["y"].abs().mean()).item()
    passed = errors[worst] <= gates[worst] and same and (precision == "bf16" or problem.scale != 1.0 or bias <= BIAS)
    what = " ".join(f"{value}" for value in asdict(problem).values())
    what += f" {precision}{' recompute' if recompute else ''}: y {errors['y']:.1e}, worst {worst} {errors[worst]:.1e}"
    what += f" of {gates[worst]:.1e}, bias {bias:.0e}, same twice {same}"
    print("ok  " if passed else "FAIL", what, flush=True)
    return passed


def large(problem: Problem, recompute: bool = False) -> bool:
    """Check tf32 with large products also in tf32, some of them in a separate kernel."""
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return agrees(problem, "tf32", recompute)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def multiplies(tokens: int, rows: int, columns: int, exact: bool) -> bool:
    """Check a product over tokens of some columns of a matrix, and their sums; a NaN affects only its row."""
    limit = 1e-6 if exact else 5e-4
    grad, x = torch.randn(tokens, rows + 64, device=DEVICE), torch.randn(tokens, 2 * columns, device=DEVICE)[:, ::2]
    a = grad[:, 32:-32]
    exactly, sums = a.double().t() @ x.double(), a.double().sum(0)
    (found, parts), (again, _) = (over_tokens(a, x, None, exact) for _ in range(2))
    errors = [relative_error(found, exactly), (parts.sum(0) - sums).abs().max().item()]
    if exact:  # and one over columns
        weight, bias = torch.randn(columns + 3, rows, device=DEVICE), torch.randn(columns + 3, device=DEVICE)
        left = a[:, : rows - 5]
        exactly = left.double() @ weight[:, : rows - 5].double().t() + bias.double()
        y = product(left, weight[:, : rows - 5].t(), bias)
        errors += [relative_error(y, exactly)]
    a[tokens // 2, rows // 3] = float("nan")
    spoilt, _ = over_tokens(a, x, None, exact)
    alone = bool(spoilt[rows // 3].isnan().all() and spoilt.isnan().sum() == columns)
    right = errors[0] < limit and errors[1] < 1e-2 and errors[-1] < max(limit, 1e-2 * (len(errors) == 2))
    passed = right and torch.equal(found, again) and alone
    shown = " ".join(f"{error:.1e}" for error in errors)
    what = f"{tokens} tokens, {rows} x {columns}, exact {exact}: {shown}, NaN alone {alone}"
    print("ok  " if passed else "FAIL", what, flush=True)
    return passed


def clamps(problem: Problem) -> bool:
    """Check that a stored h beyond the largest float16 is clamped to it in float16 products, and NaN stays NaN."""
    layer = Layer(problem)
    h, found = layer.states[0], []
    for most in (1e6, 65504.0):
        h.copy_(h.sign() * most)
        found.append(layer.step("triton", options_of("tf32"))["y"])
    plain = layer.step("loop", Options())["y"]
    h[0, 0] = float("nan")
    spoilt = layer.step("triton", options_of("tf32"))["y"].view(problem.rows, problem.length, -1)
    near = relative_error(found[0], plain)
    alone = bool(spoilt[0].isnan().all() and spoilt[1:].isfinite().all())
    passed = torch.equal(*found) and near < FLIPS and alone
    print(
        "ok  " if passed else "FAIL",
        f"large h: {problem.cell} {problem.hidden}: {near:.1e}, NaN stays {alone}",
        flush=True,
    )
    return passed


def permutes(problem: Problem, precision: str) -> bool:
    """Check that permuted rows of the batch give the same bits."""
    layer = Layer(problem)
    order = torch.randperm(problem.rows, device=DEVICE)
    support = Support(layer.cell, DEVICE, torch.float32, layer.hidden, 0, options_of(precision))
    backend = BACKENDS.choose("triton", support)

    def shuffled(value: Tensor) -> Tensor:
        return value.view(problem.rows, problem.length, -1)[order].flatten(0, 1)

    call = LayerCall(layer.cell, layer.weights, layer.x, layer.states, layer.boundaries, options_of(precision))
    boundaries = Boundaries.from_is_init(layer.is_init[order])
    states = tuple(shuffled(state) for state in layer.states)
    with torch.no_grad():
        y, _ = backend.run(call)
        other, _ = backend.run(replace(call, x=shuffled(layer.x), states=states, boundaries=boundaries))
    same = torch.equal(shuffled(y), other)
    print(f"{'ok  ' if same else 'FAIL'} rows permuted: {problem.cell} {problem.hidden} {precision}", flush=True)
    return same


def isolates(problem: Problem, precision: str) -> bool:
    """Check that NaN in one segment's inputs, states and incoming gradients changes no bit of other segments."""
    layer = Layer(problem)
    backend = BACKENDS.choose("triton", Support(layer.cell, DEVICE, torch.float32, layer.hidden))
    grads = [torch.randn_like(state) for state in layer.states]

    def run(sick: Tensor | None) -> list[Tensor]:
        inputs, incoming = (
            [value.detach().clone() for value in values] for values in ((layer.x, *layer.states), grads)
        )
        if sick is not None:
            for value in (*inputs, *incoming):
                value[sick] = float("nan")
        x, *states = (value.requires_grad_() for value in inputs)
        call = LayerCall(layer.cell, layer.weights, x, tuple(states), layer.boundaries, options_of(precision))
        _, after = backend.run(call)
        return [*after, *torch.autograd.grad(after, inputs, incoming)]

    clean, segments, same = run(None), layer.boundaries.segment_ids, True
    for segment in (0, int(segments[-1]) // 2, int(segments[-1])):
        others = segments != segment
        found = run(~others)
        same &= all(torch.equal(value[others], exact[others]) for value, exact in zip(found, clean, strict=True))
        same &= all(value[~others].isnan().any() for value in found)
    print(
        f"{'ok  ' if same else 'FAIL'} NaN stays in its segment: {problem.cell} {problem.hidden} {precision}",
        flush=True,
    )
    return same


def captures(problem: Problem, precision: str) -> bool:
    """Check that a captured step, replayed on other inputs and resets, equals an eager step."""
    layer = Layer(problem)
    step = partial(layer.step, "triton", options_of(precision), stored=True)
    is_init = layer.is_init.clone()

    def whole() -> dict[str, Tensor]:
        layer.boundaries = Boundaries.from_is_init(is_init)
        return step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        whole()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = whole()
    with torch.no_grad():
        layer.x.normal_()
    is_init.copy_(torch.rand(is_init.shape, device=DEVICE) < 0.1)
    is_init[:, 0] = True
    graph.replay()
    expected = whole()
    same = all(torch.equal(captured[name], value) for name, value in expected.items())
    print(f"{'ok  ' if same else 'FAIL'} CUDA graph: {problem.cell} {problem.hidden} {precision}", flush=True)
    return same


def compiles(problem: Problem, precision: str) -> bool:
    """Check that the registered operator under torch.compile is one graph and is bitwise equal to eager mode."""
    layer = Layer(problem)
    w, options = layer.weights, options_of(precision)
    leaves = [layer.x, w.w_ih, w.w_hh, w.b_ih, w.b_hh, *(state.detach().requires_grad_() for state in layer.states)]

    def step(x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, *states: Tensor) -> Tensor:
        weights = LayerWeights(w_ih, w_hh, b_ih, b_hh)
        call = LayerCall(layer.cell, weights, x.tanh(), states, layer.boundaries, options)
        return torch.ops.recurl.triton_forward(*arguments_of(call), True)[0].sin()

    results = []
    for function in (torch.compile(step, fullgraph=True), step):
        y = function(*leaves)
        results.append([y, *torch.autograd.grad(y, leaves, layer.grad)])
    worst = max(relative_error(a, b) for a, b in zip(*results, strict=True))
    print("ok  " if worst <= COMPILED else "FAIL", f"torch.compile: {problem} {precision}, {worst:.1e}", flush=True)
    return worst <= COMPILED


def checks() -> list[Callable[[], object]]:
    """Return all checks, as functions without arguments."""
    found: list[Callable[[], object]] = []
    for cell in ("lstm", "gru"):
        for precision in GATES:
            sizes = (64, 300) if precision == "tf32x3" else (20, 64, 100, 128, 200, 256, 300, 512)
            found += [partial(agrees, Problem(cell, hidden, 37, 29, 0.05), precision) for hidden in sizes]
        for hidden in (20, 40, 64, 80, 112):  # eight slots per program
            found += [partial(agrees, Problem(cell, hidden, 1100, 4, 0.05), "tf32")]
        for hidden in (80, 160, 224, 320, 448):
            found += [partial(agrees, Problem(cell, hidden, 9, 31, 0.05), precision) for precision in ("tf32", "bf16")]
        for precision in ("tf32", "ieee", "bf16"):
            for hidden, rows, length in (
                (160, 300, 7),
                (256, 300, 7),
                (320, 700, 5),
                (480, 300, 7),
                (512, 300, 7),
                (700, 250, 5),
                (1024, 64, 12),
                (1024, 520, 3),
                (128, 1, 1),
            ):
                found += [partial(agrees, Problem(cell, hidden, rows, length, 0.05), precision)]
        for hidden in (64, 256, 640):
            found += [
                partial(agrees, Problem(cell, hidden, 16, 33, 1.0), "tf32"),
                partial(agrees, Problem(cell, hidden, 16, 33), "tf32"),
                partial(agrees, Problem(cell, hidden, 16, 33, 0.05, scale=30.0), "tf32"),
                partial(agrees, Problem(cell, hidden, 16, 33, 0.05, scale=30.0), "bf16"),
                partial(permutes, Problem(cell, hidden, 300, 9, 0.05), "tf32"),
                partial(captures, Problem(cell, hidden, 300, 9, 0.05), "tf32"),
                partial(agrees, Problem(cell, hidden, 16, 33, 1.0), "ieee"),
                partial(agrees, Problem(cell, hidden, 16, 33, 0.05, scale=30.0), "ieee"),
                partial(permutes, Problem(cell, hidden, 300, 9, 0.05), "ieee"),
            ]
        # Two groups per program; all available clusters; one to four slots of a multiprocessor.
        for hidden, rows, precision in (
            *((512, 300, "tf32"), (256, 200, "tf32"), (150, 200, "tf32"), (256, 200, "bf16")),
            *((256, 200, "ieee"), (128, 500, "tf32"), (100, 400, "ieee"), (512, 110, "tf32"), (384, 110, "ieee")),
            *((16, 40, "ieee"), (32, 500, "tf32"), (48, 200, "ieee"), (72, 200, "tf32"), (96, 40, "ieee")),
            *((112, 40, "tf32"), (128, 100, "ieee")),
        ):
            problem = Problem(cell, hidden, rows, 9, 0.05)
            found += [partial(check, problem, precision) for check in (agrees, permutes, captures, isolates)]
        for hidden, precision in (
            (64, "ieee"),
            (256, "ieee"),
            (64, "tf32"),
            (200, "bf16"),
            (256, "tf32"),
            (512, "tf32"),
            (1000, "bf16"),
        ):
            found += [partial(isolates, Problem(cell, hidden, 70, 9, 0.2), precision)]
        found += [
            partial(agrees, Problem(cell, 64, 7, 301, 0.05), "tf32", recompute=True),
            *(partial(agrees, Problem(cell, 90, 7, 301, 0.01), precision) for precision in ("tf32", "ieee")),
            partial(agrees, Problem(cell, 40, 7, 31, 0.05), "ieee", recompute=True),
            partial(agrees, Problem(cell, 300, 7, 31, 0.05), "ieee", recompute=True),
            partial(agrees, Problem(cell, 100, 7, 31, 0.05), "tf32", recompute=True),
            partial(agrees, Problem(cell, 600, 7, 31, 0.05), "tf32", recompute=True),
            partial(compiles, Problem(cell, 64, 7, 31, 0.05), "tf32"),
            partial(compiles, Problem(cell, 300, 7, 31, 0.05), "bf16"),
        ]
        found += [
            partial(large, Problem(cell, 512, 512, 64, 0.05)),
            partial(large, Problem(cell, 384, 300, 97, 0.05), recompute=True),
        ]
    found += [partial(agrees, Problem("lstm", hidden, 9, 31, 0.05, projection=24), "tf32") for hidden in (64, 300)]
    found += [partial(large, Problem("lstm", 512, 512, 70, 0.05, projection=136))]
    sizes = ((1, 640, 96), (33, 96, 40), (2000, 1024, 256), (4097, 864, 300), (777, 3072, 1000), (32768, 2048, 512))
    found += [partial(multiplies, *size, exact) for size in sizes for exact in (False, True)]
    found += [partial(clamps, Problem("lstm", hidden, 300, 5)) for hidden in (256, 512, 1024)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help="K N: every N-th check from the K-th")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    first, step = arguments.part
    results = [guarded(check) for check in checks()[first::step]]
    print(f"{sum(map(bool, results))} of {len(results)} checks passed", flush=True)
    sys.exit(not all(results))


if __name__ == "__main__":
    main()

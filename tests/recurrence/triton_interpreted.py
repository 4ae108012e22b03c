"""Run the plain Triton kernels in Triton's interpreter, with TRITON_INTERPRET=1 in the environment.

Prints one line per check: ``name: error``. Needs a separate process, because whether a kernel is compiled or
interpreted is decided when it is defined.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import torch

from recurl.core.relative_error import relative_error
from recurl.recurrence import CELLS, Backend, Boundaries, KernelBackend, LayerCall, Options, ReferenceBackend, run_stack
from recurl.recurrence.cuda import TritonKernels, launch, weights
from recurl.recurrence.cuda.layout import GateLayout
from recurl.recurrence.cuda.portable.config import Tile
from recurl.recurrence.cuda.products import launch as products

from .contract import Case
from .interpreter import allow_bounds, patch_once
from .kernel_tests import print_checks
from .test_isolation import WHERE, strangers_reached

allow_bounds()
patch_once()
KERNELS = TritonKernels()
KERNELS.name = "triton_interpreted"  # operators named "triton" exist already
BACKEND = KernelBackend(KERNELS)
REFERENCE = ReferenceBackend()


def outputs_and_gradients(case: Case, backend: Backend, options: Options) -> dict[str, torch.Tensor]:
    """Return the tensors that the contract compares, at all tokens."""
    features, states = run_stack(
        backend,
        CELLS[case.cell],
        case.weights,
        case.x,
        case.states,
        case.boundaries,
        case.masks,
        options,
    )
    ends = case.boundaries.ends if case.directions == 2 else slice(None)
    results = {"features": features, **{f"after{k}": state[ends] for k, state in enumerate(states)}}
    generator = torch.Generator().manual_seed(case.seed + 1)
    loss = sum(
        (value * torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.dtype)).sum()
        for value in results.values()
    )
    gradients = torch.autograd.grad(loss, list(case.parameters.values()))
    results.update({f"grad {name}": grad for name, grad in zip(case.parameters, gradients, strict=True)})
    return {name: value.detach() for name, value in results.items()}


def worst_error(cell: str, options: Options, poison: bool = False, **problem: object) -> float:
    single = Case(cell, dtype=torch.float32, **problem)
    double = Case(cell, **problem)
    with torch.no_grad():
        for name, parameter in double.parameters.items():
            parameter.copy_(single.parameters[name])
        if poison:
            for state in single.states:
                state[~single.boundaries.starts] = float("nan")
    found, exact = outputs_and_gradients(single, BACKEND, options), outputs_and_gradients(double, REFERENCE, options)
    assert all(value.isfinite().all() for value in found.values())
    return max(relative_error(found[name], exact[name]) for name in exact)


def bounds_error() -> int:
    """Compare slots with the definition: slot s begins at the first segment start at or after s * q."""
    wrong = 0
    for tokens, slots, rate in ((1, 4, 0.5), (3000, 16, 0.001), (100, 16, 1.0), (2500, 7, 0.01), (1025, 64, 0.0)):
        generator = torch.Generator().manual_seed(tokens)
        starts = torch.rand(tokens, generator=generator) < rate
        starts[0] = True
        boundaries = Boundaries(starts, (tokens,))
        share = -(-tokens // slots)
        places = [*starts.nonzero().squeeze(1).tolist(), tokens]
        expected = [next((p for p in places if p >= s * share), tokens) for s in range(slots + 1)]
        wrong += launch.slot_bounds(boundaries, slots).tolist() != expected
        assert launch.slot_bounds(boundaries, slots) is launch.slot_bounds(boundaries, slots)
    shares = {(64, 33, 32): 2, (131072, 2112, 32): 64, (100, 7, 64): 15, (32768, 832, 64): 64, (32768, 1056, 512): 32}
    wrong += [launch.share_for(*case) for case in shares] != list(shares.values())
    return wrong


def arranged_error() -> float:
    """Compare arranged weights and biases, and restored gradients, with the columns listed by a layout."""
    worst = 0.0
    generator = torch.Generator().manual_seed(0)
    for lstm, width, interleaved in product((True, False), (5, 16), (True, False)):
        layout = GateLayout(lstm, 5, width, interleaved)
        gates = layout.num_gates
        w, b_ih, b_hh = (torch.randn(gates * 5, *shape, generator=generator) for shape in ((3,), (), ()))
        into, hidden = (torch.tensor(layout.columns(hidden_part)) for hidden_part in (False, True))
        weight, bias = weights.arranged(w, layout, torch.float32, (b_ih, b_hh))
        added = b_hh if lstm else torch.where(torch.arange(gates * 5) < 10, b_hh, 0)
        for found, natural in ((weight, w), (bias, b_ih + added)):
            padded = natural.new_zeros(gates, width, *natural.shape[1:])
            padded[:, :5] = natural.view(gates, 5, *natural.shape[1:])
            worst = max(worst, relative_error(found, padded.flatten(0, 1)[into]))
        grad_gates = torch.randn(300, 4 * width, generator=generator)
        sums = grad_gates.double().sum(0)
        to_hidden = torch.randn(gates * width, 4, generator=generator)
        restored = weights.restored(grad_gates, weight, to_hidden, layout, True)
        products = (weight, to_hidden, sums[: gates * width], sums[-gates * width :])
        for found, value, order in zip(restored, products, (into, hidden, into, hidden), strict=True):
            by_gate = torch.empty_like(value).index_copy(0, order, value).view(gates, width, *value.shape[1:])
            worst = max(worst, relative_error(found, by_gate[:, :5].flatten(0, 1)))
    return worst


def packed_differs() -> int:
    """Compare packed weights of the wide kernels with the definition."""
    wrong = 0
    for lstm, direction in product((True, False), ("forward", "backward")):
        layout = GateLayout(lstm, 100, 128, True)
        gates = layout.num_gates
        w = torch.randn(gates * 100, 100).bfloat16().float()
        padded = torch.zeros(gates, 128, 128)
        padded[:, :100, :100] = w.view(gates, 100, 100)
        if direction == "backward":
            expected = padded.permute(2, 0, 1)
        else:
            mixed = gates // 2 * 2
            turns = padded[:mixed].view(mixed, 16, 8, 128).transpose(0, 1)
            expected = torch.cat([turns.flatten(), padded[mixed:].flatten()])
        wrong += not torch.equal(weights.packed(direction, w, layout, torch.float32), expected.flatten())
        fine = torch.randn(gates * 100, 100)
        fine[0, :4] = torch.tensor([1e6, -1e6, float("nan"), float("inf")])
        half = weights.packed(direction, fine, layout, torch.float16)
        finite = torch.where(fine.isinf(), fine, fine.clamp(-65504, 65504)).half().float()
        whole = weights.packed(direction, finite, layout, torch.float32)
        wrong += not torch.equal(half.float().nan_to_num(7.0), whole.nan_to_num(7.0))
        wrong += (int(half.isnan().sum()), int(half.isinf().sum())) != (1, 1)
        fine[0, 2:4] = 1.0
        rounded = ((fine.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
        both = weights.packed(direction, fine, layout, torch.float32, exact=True)
        halves = both.view(-1, 2, 128 if direction == "forward" else gates * 128).unbind(1)
        for half, value in zip(halves, (fine, fine - rounded), strict=True):
            wrong += not torch.equal(half.flatten(), weights.packed(direction, value, layout, torch.float32))
    return wrong


def turned_differs() -> int:
    """Compare operands transposed in blocks of 32 tokens, of values or of states before tokens, with the definition."""
    wrong = 0
    for tokens, columns in ((1, 3), (32, 128), (70, 130)):
        values, stored = torch.randn(tokens, 2 * columns)[:, ::2], torch.randn(tokens, columns)
        starts = torch.rand(tokens) < 0.3
        starts[0] = True
        before = torch.where(starts[:, None], stored, values.roll(1, 0))
        for exact, given in ((values, None), (before, (stored, Boundaries(starts, (tokens,))))):
            rounded = ((exact.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
            for split in (False, True):
                found = products.transpose_in_blocks(values, given, -(-columns // 128) * 128, split)
                expected = torch.zeros(found.shape[0] * 32, *found.shape[1:3])
                expected[:tokens, 0, :columns] = rounded
                if split:
                    expected[:tokens, 1, :columns] = exact - rounded
                wrong += not torch.equal(found, expected.unflatten(0, (-1, 32)).permute(0, 2, 3, 1))
    return wrong


def group_error(cell: str) -> float:
    """Several programs share the units and read the weights again at each step."""
    table = KERNELS.tile_for
    KERNELS.tile_for = lambda *_: Tile(16, 16, 3, 16, False, 4)
    error = worst_error(cell, Options(), hidden=37, shape=(2, 5))
    KERNELS.tile_for = table
    return error


def saved_differs(cell: str, projection: int) -> int:
    """Compare shapes and dtypes of saved tensors with those announced for tracing."""
    case = Case(cell, dtype=torch.float32, projection=projection, shape=(4,))
    states = tuple(state[:, 0] for state in case.states)
    wrong = 0
    for precision in ("ieee", "tf32"):
        call = LayerCall(CELLS[cell], case.weights[0][0], case.x, states, case.boundaries, Options(precision=precision))
        with torch.no_grad():
            _, saved = BACKEND.kernels.forward(call, True)
        announced = BACKEND.kernels.saved_like(call)
        wrong += [(t.shape, t.dtype) for t in saved] != [(t.shape, t.dtype) for t in announced]
    return wrong


def isolation_error(cell: str) -> int:
    """Count values of other segments that a NaN in one segment changes."""
    options = {"cell": cell, "shape": (7,), "pattern": "alternating", "dtype": torch.float32}
    return len(strangers_reached(BACKEND, options, WHERE, float("nan")))


def checks_of(cell: str) -> dict[str, Callable[[], float]]:
    error = partial(worst_error, cell)
    checks = {
        "ieee": partial(error, Options(), poison=True, shape=(2, 9)),
        "recompute": partial(error, Options(recompute=True), bias=False, shape=(2, 9)),
        "tf32": partial(error, Options(precision="tf32"), shape=(2, 9)),
        "layers": partial(error, Options(), layers=2, directions=2, pattern="alternating", shape=(2, 5)),
        "group": partial(group_error, cell),
        "saved": partial(saved_differs, cell, 0),
        "isolation": partial(isolation_error, cell),
    }
    return {f"{cell} {name}": check for name, check in checks.items()}


CHECKS = {
    "bounds": bounds_error,
    "arranged": arranged_error,
    "packed": packed_differs,
    "turned": turned_differs,
    **checks_of("lstm"),
    **checks_of("gru"),
    "lstm projection": partial(worst_error, "lstm", Options(), projection=3, shape=(2, 7)),
    "lstm projection recompute": partial(worst_error, "lstm", Options(recompute=True), projection=3, shape=(2, 5)),
    "lstm projection saved": partial(saved_differs, "lstm", 3),
}

if __name__ == "__main__":
    print_checks(CHECKS)

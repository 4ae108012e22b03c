# ruff: noqa: T201
"""Run the plain Triton kernels in Triton's interpreter, with TRITON_INTERPRET=1 in the environment.

Prints one line per check: ``name: error``. A process of its own, because a kernel is either compiled or interpreted,
and which is decided when it is defined.
"""

from __future__ import annotations

import torch

from recurl.recurrence import CELLS, Backend, Boundaries, KernelBackend, LayerCall, Options, ReferenceBackend, run_stack
from recurl.recurrence.triton import TritonKernels, launch
from recurl.recurrence.triton.config import Tile

from .contract import Case, relative_error

KERNELS = TritonKernels()
KERNELS.name = "triton_interpreted"  # operators of the name "triton" exist already
BACKEND = KernelBackend(KERNELS)
REFERENCE = ReferenceBackend()


def outputs_and_gradients(case: Case, backend: Backend, options: Options) -> dict[str, torch.Tensor]:
    """What the contract compares, at all tokens."""
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
    """Slots against the definition: slot s begins at the first segment start at or after s * q."""
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
    return wrong


def sums_error() -> float:
    values = torch.randn(9001, 52, generator=torch.Generator().manual_seed(0))
    return relative_error(launch.column_sums(values), values.double().sum(0))


def group_error(cell: str) -> float:
    """Several programs sharing the units, weights read again at each step."""
    table = KERNELS.tile_for
    KERNELS.tile_for = lambda *_: Tile(16, 16, 3, 16, False, 4)
    error = worst_error(cell, Options(), hidden=37, shape=(2, 5))
    KERNELS.tile_for = table
    return error


def saved_differs(cell: str, projection: int) -> int:
    """Shapes and dtypes of what forward keeps against what it announces for tracing."""
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


def main() -> None:
    ieee, tf32 = Options(), Options(precision="tf32")
    print("bounds:", bounds_error())
    print("sums:", sums_error())
    for cell in ("lstm", "gru"):
        print(f"{cell} ieee:", worst_error(cell, ieee, poison=True, shape=(2, 9)))
        print(f"{cell} recompute:", worst_error(cell, Options(recompute=True), bias=False, shape=(2, 9)))
        print(f"{cell} tf32:", worst_error(cell, tf32, shape=(2, 9)))
        print(f"{cell} tf32x3:", worst_error(cell, Options(precision="tf32x3"), pattern="every", shape=(7,)))
        print(f"{cell} layers:", worst_error(cell, ieee, layers=2, directions=2, pattern="alternating", shape=(2, 5)))
        print(f"{cell} group:", group_error(cell))
        print(f"{cell} saved:", saved_differs(cell, 0))
    print("lstm projection:", worst_error("lstm", ieee, projection=3, shape=(2, 7)))
    print("lstm projection recompute:", worst_error("lstm", Options(recompute=True), projection=3, shape=(2, 5)))
    print("lstm projection saved:", saved_differs("lstm", 3))


if __name__ == "__main__":
    main()

"""Run the step kernel in Triton's interpreter, with TRITON_INTERPRET=1 in the environment.

Prints one line per check: ``name: error``. Needs a separate process, like the other kernels.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from recurl.core.relative_error import relative_error
from recurl.core.torch_compat import compiling, traced_graph
from recurl.modules import GRUModule, LSTMModule, set_recurrent_mode
from recurl.recurrence import CELLS, LayerWeights, Options, record_backends, stack, step_stack
from recurl.recurrence.cuda.step import launch as step_launch
from recurl.recurrence.cuda.step import operation as triton_step
from recurl.recurrence.cuda.step.config import StepTile

from .contract import Case
from .interpreter import allow_bfloat16, allow_bounds, patch_once
from .kernel_tests import print_checks

allow_bounds()
patch_once()
allow_bfloat16()
PRECISIONS = ("ieee", "tf32x3", "tf32")
OPTIONS = [
    {"hidden": 1, "inputs": 1, "shape": (3,)},
    {"hidden": 5, "inputs": 7, "shape": (1,), "bias": False},
    {"hidden": 33, "inputs": 40, "shape": (17,), "layers": 3},
    {"hidden": 100, "inputs": 65, "shape": (130,)},
    {"hidden": 256, "inputs": 16, "shape": (17,), "bias": False},
]
TILES = [StepTile(128, 32, 32, 8, 3), StepTile(16, 8, 32, 2, 3)]


def step(case: Case, options: Options, is_init: Tensor | None = None) -> list[Tensor]:
    """Return features and states after a step of the kernel."""
    with torch.no_grad(), record_backends() as ran:
        features, after = step_stack(
            CELLS[case.cell], case.weights, case.x, case.states, is_init=is_init, options=options
        )
    assert ran == [triton_step.RECORDED] * case.layers
    return [features, *after]


def exact(case: Case, problem: dict[str, Any], is_init: Tensor | None) -> list[Tensor]:
    """Return the same by the definition, in float64, with the weights and inputs of ``case``."""
    double = Case(**problem)
    with torch.no_grad():
        for name, parameter in double.parameters.items():
            parameter.copy_(case.parameters[name])
        features, after = step_stack(
            CELLS[case.cell], double.weights, double.x, double.states, fused=False, is_init=is_init
        )
    return [features, *after]


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    assert all(value.isfinite().all() and value.is_contiguous() for value in found)
    return max(relative_error(one, other) for one, other in zip(found, expected, strict=True))


def agreement(cell: str, options: Options, dtype: torch.dtype = torch.float32) -> float:
    """Compare at odd sizes, with and without biases, with resets whose states must not be read."""
    errors: list[float] = []
    for index, problem in enumerate(OPTIONS):
        problem = {"cell": cell, **problem}
        case = Case(dtype=dtype, **problem)
        rows = case.x.shape[0]
        is_init = [None, torch.arange(rows) % 3 == 0, (torch.arange(rows) % 3 == 1).unsqueeze(1)][index % 3]
        expected = exact(case, problem, is_init)
        if is_init is not None:
            with torch.no_grad():
                for state in case.states:
                    state[is_init.reshape(rows)] = torch.nan
        errors.append(worst(step(case, options, is_init), expected))
    return max(errors)


def one_bias(cell: str) -> float:
    problem = {"cell": cell, "shape": (3,)}
    case = Case(dtype=torch.float32, **problem)
    (weights,) = case.weights[0]
    errors: list[float] = []
    for kept in ("b_ih", "b_hh"):
        layer = weights._replace(**{name: None for name in ("b_ih", "b_hh") if name != kept})
        case.weights = [[layer]]
        wide = LayerWeights(*(None if tensor is None else tensor.double() for tensor in layer))
        with torch.no_grad():
            features, after = step_stack(
                CELLS[cell], [[wide]], case.x.double(), tuple(s.double() for s in case.states), fused=False
            )
        errors.append(worst(step(case, Options()), [features, *after]))
    return max(errors)


def differs_by_layout(cell: str) -> int:
    """Count differences for other strides of inputs, weights and flags: the bits must be the same."""
    case = Case(cell, layers=2, shape=(6,), dtype=torch.float32)
    flags = torch.arange(12).unsqueeze(1) % 3 == 0
    expected = step(case, Options(), flags[::2].clone())
    with torch.no_grad():
        case.states = tuple(torch.stack([state, state], -1)[..., 0] for state in case.states)
        case.x = torch.cat([case.x, case.x], 1).t().contiguous().t()[:, : case.x.shape[1]]
        turn = lambda weights: LayerWeights(*(None if w is None else w.t().contiguous().t() for w in weights))  # noqa: E731
        case.weights = [[turn(weights)] for (weights,) in case.weights]
    return sum(not torch.equal(*pair) for pair in zip(step(case, Options(), flags[::2]), expected, strict=True))


def differs_by_tile(cell: str) -> float:
    """Return the largest difference between tiles with other rows and units."""
    case = Case(cell, shape=(40,), hidden=37, dtype=torch.float32)
    results: list[list[Tensor]] = []
    rule = step_launch.run_step.__defaults__
    for tile in TILES:
        step_launch.run_step.__defaults__ = (lambda *_, tile=tile: tile,)
        results.append(step(case, Options()))
    step_launch.run_step.__defaults__ = rule
    return worst(*results)


def operator_differs(cell: str) -> int:
    """Compare the traced operator with the kernel, also for another number of rows."""
    case = Case(cell, layers=2, shape=(4,), dtype=torch.float32)
    flags = torch.arange(4) % 2 == 0
    given = [value.detach() for value in (case.x, *case.states)]

    def run(x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            features, after = step_stack(CELLS[cell], case.weights, x, states, is_init=flags)
        return features, *after

    expected = run(*given)
    traced = make_fx(run)(*given)
    with compiling():
        program = traced_graph(run, given)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    wrong = 0
    for graph in (traced.graph, program.graph):
        assert isinstance(graph, torch.fx.Graph)
        wrong += sum(node.target is triton_step.step_operator for node in graph.nodes) != 1
    for function in (traced, program, compiled):
        with record_backends() as ran:
            wrong += sum(not torch.equal(*pair) for pair in zip(function(*given), expected, strict=True))
        wrong += ran != [triton_step.RECORDED] * 2
    layers = [weight for (layer,) in case.weights for weight in layer[:4]]
    arguments = (given[0], [layer.detach() for layer in layers], given[1:], flags, [True] * 8, cell, "ieee")
    torch.library.opcheck(triton_step.step_operator, arguments)
    return wrong


def module_error(kind: type[LSTMModule] | type[GRUModule]) -> float:
    """Compare steps of a module, and of its copies, with its recurrent mode."""
    states = ["h", "c"][: 2 if kind is LSTMModule else 1]
    torch.manual_seed(0)
    module = kind(3, 12, num_layers=2, in_keys=["x", *states], out_keys=["y", *(("next", key) for key in states)])
    x, is_init = torch.randn(5, 7, 3), torch.rand(5, 7, 1) < 0.3
    zeros = {key: torch.zeros(5, 7, 2, 12) for key in states}
    is_init[:, 0] = True
    batch = TensorDict({"x": x, "is_init": is_init, **zeros}, [5, 7])
    with torch.no_grad(), set_recurrent_mode(True):
        expected = module(batch.clone())["y"]
    written = io.BytesIO()
    torch.save(module, written)
    written.seek(0)
    copies = [module, copy.deepcopy(module), torch.load(written, weights_only=False)]
    errors: list[float] = []
    for one in copies:
        root = batch[:, 0].select(*states)
        for t in range(7):
            root.update({"x": x[:, t], "is_init": is_init[:, t]})
            with torch.no_grad(), record_backends() as ran:
                one(root)
            assert ran == [triton_step.RECORDED] * 2
            errors.append(relative_error(root["y"], expected[:, t]))
            root.update(root["next"])
    return max(errors)


def served_wrongly() -> int:
    """Check that unsupported calls take the other path."""
    small = {"shape": (2,), "dtype": torch.float32}
    plain, projected = Case("lstm", **small), Case("lstm", projection=3, **small)
    wide, double = Case("gru", hidden=257, **small), Case("gru", shape=(2,))
    wrong = 0
    for case, with_gradients in ((plain, True), (projected, False), (wide, False), (double, False)):
        with torch.set_grad_enabled(with_gradients), record_backends() as ran:
            step_stack(CELLS[case.cell], case.weights, case.x, case.states)
        wrong += ran != []
    cell, weights = CELLS["lstm"], plain.weights
    for arguments in (
        (weights, plain.x.double(), plain.states, None),
        (weights, plain.x[:, :3], plain.states, None),
        (weights, plain.x, (plain.states[0][:1], plain.states[1]), None),
        (weights, plain.x, plain.states, torch.zeros(2)),
        (weights, plain.x, plain.states, torch.zeros(3, dtype=torch.bool)),
    ):
        with torch.no_grad():
            wrong += triton_step.step(cell, *arguments, Options()) is not None
    with torch.no_grad():
        (empty, _) = step_stack(cell, weights, plain.x[:0], tuple(state[:0] for state in plain.states))
        without = step_stack(cell, weights, plain.x, None, shapes=[(7,), (7,)])[0]
        zeros = step_stack(cell, weights, plain.x, tuple(torch.zeros_like(state) for state in plain.states))[0]
    return wrong + (empty.shape != (0, 7)) + (not torch.equal(without, zeros))


def isolation_differs(cell: str) -> int:
    """Check that a row of NaN changes no other row."""
    case = Case(cell, shape=(20,), dtype=torch.float32)
    clean = step(case, Options())
    with torch.no_grad():
        for value in (case.x, *case.states):
            value[4] = torch.nan
    others = torch.arange(20) != 4
    with torch.no_grad():
        sick, after = step_stack(CELLS[cell], case.weights, case.x, case.states)
    return sum(not torch.equal(a[others], b[others]) for a, b in zip([sick, *after], clean, strict=True))


def checks_of(cell: str) -> dict[str, Callable[[], float]]:
    checks = {
        **{name: partial(agreement, cell, Options(precision=name)) for name in PRECISIONS},
        "bf16": partial(agreement, cell, Options(), torch.bfloat16),
        "bf16 products": partial(agreement, cell, Options(compute_dtype=torch.bfloat16)),
        "one bias": partial(one_bias, cell),
        "layout": partial(differs_by_layout, cell),
        "tile": partial(differs_by_tile, cell),
        "operator": partial(operator_differs, cell),
        "isolation": partial(isolation_differs, cell),
        "module": partial(module_error, {"lstm": LSTMModule, "gru": GRUModule}[cell]),
    }
    return {f"{cell} {name}": check for name, check in checks.items()}


CHECKS = {**checks_of("lstm"), **checks_of("gru"), "served": served_wrongly}

if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack, "_is_on_gpu", lambda x: True)
        patch.setattr(triton_step, "can_step_on", lambda x: True)
        print_checks(CHECKS)

"""Kernels as operators: opcheck, torch.compile, torch.export, torch.func, autocast, second derivatives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.library import opcheck

from recurl.core.errors import UnsupportedError
from recurl.modules import GRUModule, LSTMModule, set_recurrent_mode
from recurl.modules.recurrent import RecurrentModule
from recurl.recurrence import (
    BACKENDS,
    CELLS,
    Boundaries,
    KernelBackend,
    LayerCall,
    ReferenceBackend,
    Support,
    run_stack,
)
from recurl.recurrence.kernels import count_outputs
from recurl.recurrence.loop import LoopKernels
from recurl.recurrence.operation import arguments_of

from .contract import KNOWN, Case, assert_agree, serves

pytestmark = pytest.mark.slow

KERNELS = ["loop", "cpu", "scan"]
ALL_CHECKS = ["test_autograd_registration", "test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
SERVED = [(name, cell) for name in KERNELS for cell in KNOWN if serves(name, cell)]
CELL_OPTIONS = [("lstm", {}), ("lstm", {"projection": 3, "bias": False}), ("gru", {})]
OPERATORS = [
    *((name, *problem) for name in KERNELS for problem in CELL_OPTIONS),
    ("loop", "fastweights", {}),
    ("scan", "own_mingru", {"bias": False}),
]


def layer_call(cell: str, options: dict, requires_grad: bool) -> LayerCall:
    case = Case(cell, **options)
    stored = tuple(state[:, 0].detach().requires_grad_(requires_grad) for state in case.states)
    return LayerCall(KNOWN[cell], case.weights[0][0], case.x, stored, case.boundaries)


def detached(value: object) -> object:
    if isinstance(value, list):
        return [detached(one) for one in value]
    return value.detach() if isinstance(value, Tensor) else value


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(("name", "cell", "options"), OPERATORS)
def test_opcheck(name: str, cell: str, options: dict, keep: bool) -> None:
    arguments = arguments_of(layer_call(cell, options, requires_grad=True))
    tensors = len(arguments.tensors)
    forward = getattr(torch.ops.recurl, f"{name}_forward").default
    backward = getattr(torch.ops.recurl, f"{name}_backward").default
    opcheck(forward, (*arguments, keep))
    arguments = tuple(detached(argument) for argument in arguments)
    results = forward(*arguments, keep)
    count = count_outputs(KNOWN[cell])
    after, saved = results[:count], results[count:]
    assert bool(saved) == (keep and KNOWN[cell].derivatives is not None)
    # The other backends can't trace torch.func, which differentiates cells without hand-written derivatives.
    checks = ALL_CHECKS if KNOWN[cell].derivatives else ALL_CHECKS[:1]
    grads = [torch.randn_like(state) for state in after]
    opcheck(backward, (*arguments, after, saved, grads, [True] * tensors), test_utils=checks)
    found = backward(*arguments, after, saved, [*grads[:-1], None], [True] * tensors)
    zero = [*grads[:-1], torch.zeros_like(grads[-1])]
    assert_same_bits(found, backward(*arguments, after, saved, zero, [True] * tensors))


@pytest.mark.parametrize(("name", "cell"), [one for one in SERVED if not KNOWN[one[1]].takes_time])
def test_outputs_are_laid_out_as_they_are_traced(name: str, cell: str) -> None:
    arguments = tuple(detached(argument) for argument in arguments_of(layer_call(cell, {}, requires_grad=True)))
    forward, backward = (getattr(torch.ops.recurl, f"{name}_{way}").default for way in ("forward", "backward"))
    after = forward(*arguments, False)
    needs = [True] * (1 + len(arguments[1]) + len(arguments[2]))
    found = backward(*arguments, after, [], [torch.randn_like(state) for state in after], needs)
    assert all(one.is_contiguous() for one in [*after, *found])


@pytest.mark.parametrize(("name", "cell"), SERVED)
def test_vmap_over_batch_equals_a_loop(name: str, cell: str) -> None:
    """vmap over inputs, states and boundaries; gradients of shared inputs are sums over elements."""
    cases = [Case(cell, shape=(9,), seed=seed) for seed in range(3)]
    weights = cases[0].weights
    backend = BACKENDS.choose(name, Support(KNOWN[cell], torch.device("cpu")))

    def run(x: Tensor, states: tuple[Tensor, ...], starts: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return run_stack(backend, KNOWN[cell], weights, x, states, Boundaries(starts, (9,)))

    x = torch.stack([case.x for case in cases])
    states = tuple(torch.stack(state) for state in zip(*(case.states for case in cases), strict=True))
    starts = torch.stack([case.boundaries.starts for case in cases])
    expected = [run(*inputs) for inputs in zip(x, zip(*states, strict=True), starts, strict=True)]
    features, after = vmap(run)(x, states, starts)
    torch.testing.assert_close(features, torch.stack([one[0] for one in expected]), rtol=1e-12, atol=1e-12)
    for k, state in enumerate(after):
        torch.testing.assert_close(state, torch.stack([one[1][k] for one in expected]), rtol=1e-12, atol=1e-12)
    weight = weights[0][0][1]
    (mapped,) = torch.autograd.grad(features.square().sum(), [weight])
    (looped,) = torch.autograd.grad(sum(one[0].square().sum() for one in expected), [weight])
    torch.testing.assert_close(mapped, looped, rtol=1e-11, atol=1e-11)
    # One input, several sets of boundaries.
    features, _ = vmap(run, in_dims=(None, None, 0))(x[0], tuple(state[0] for state in states), starts)
    for row, start in zip(features, starts, strict=True):
        one, _ = run(x[0], tuple(state[0] for state in states), start)
        torch.testing.assert_close(row, one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", KERNELS)
def test_ensembles_and_gradients_per_member(name: str) -> None:
    """vmap over the parameters of several modules, forward and grad, as an ensemble of critics does it."""
    modules = [LSTMModule(4, 6, in_key="x", out_key="y", recurrent_backend=name, dtype=torch.float64) for _ in range(3)]
    x, is_init = torch.randn(2, 5, 4, dtype=torch.float64), torch.rand(2, 5, 1) < 0.3
    states = [torch.randn(2, 5, 1, 6, dtype=torch.float64) for _ in range(2)]
    parameters, buffers = stack_module_state(modules)

    def loss(member: dict[str, Tensor]) -> Tensor:
        return functional_call(modules[0], (member, buffers), (x, *states, is_init))[0].square().sum()

    with set_recurrent_mode(True):
        gradients = vmap(grad(loss))(parameters)
        for index, module in enumerate(modules):
            module(x, *states, is_init)[0].square().sum().backward()
            for key, parameter in module.named_parameters():
                torch.testing.assert_close(gradients[key][index], parameter.grad, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("backend", ["pad", "reference", *KERNELS])
def test_autocast_leaves_a_recurrence_alone(backend: str, cell: str) -> None:
    case = Case(cell, layers=2, dtype=torch.float32)
    expected, _ = case.run(backend)
    with torch.autocast("cpu", torch.bfloat16):
        features, _ = case.run(backend)
        assert torch.equal(features, expected)
        case.x = case.x.detach().bfloat16()
        features, _ = case.run(backend)
    case.x = case.x.float()
    exact, _ = case.run(backend)
    assert features.dtype == torch.float32
    assert torch.equal(features, exact)


@pytest.mark.parametrize("cell", [name for name, cell in CELLS.items() if cell.derivatives])
@pytest.mark.parametrize("backend", KERNELS)
def test_autocast_leaves_gradients_alone(backend: str, cell: str) -> None:
    """Also with the backward pass inside the autocast block, which torch advises against."""
    case = Case(cell, layers=2, dtype=torch.float32)
    expected = case.outputs_and_gradients(backend)
    with torch.autocast("cpu", torch.bfloat16):
        assert_agree(case.outputs_and_gradients(backend), expected, 0.0)


@pytest.mark.parametrize("name", KERNELS)
def test_autocast_of_the_operator(name: str) -> None:
    call = layer_call("lstm", {"dtype": torch.float32}, requires_grad=False)
    operator = getattr(torch.ops.recurl, f"{name}_forward")
    expected = operator(*arguments_of(call), False)
    with torch.autocast("cpu", torch.bfloat16):
        results = operator(*arguments_of(call), False)
    assert all(torch.equal(result, exact) for result, exact in zip(results, expected, strict=True))


def test_an_operator_has_no_gradient_inside_torch_func() -> None:
    """Hence the separate autograd function for torch.func; if this fails, the operators may replace it."""
    arguments = arguments_of(layer_call("gru", {}, requires_grad=False))
    with pytest.raises(RuntimeError, match="must override the setup_context staticmethod"):
        grad(lambda x: torch.ops.recurl.loop_forward(*arguments._replace(x=x), False)[0].sum())(arguments.x)


class WatchingKernels(LoopKernels):
    """Kernels that store the gradients passed to the last backward pass."""

    name = "watching"
    grads: tuple[Tensor, ...] = ()

    def backward(self, call: LayerCall, after: Any, saved: Any, grads: tuple[Tensor, ...], needs: Any) -> Any:
        self.grads = grads
        return super().backward(call, after, saved, grads, needs)


def test_outputs_that_nothing_depends_on_have_one_zero_for_a_gradient() -> None:
    case, kernels = Case("lstm", shape=(3, 4)), WatchingKernels()
    x, states = case.x.requires_grad_(), tuple(state[:, 0] for state in case.states)
    call = LayerCall(CELLS["lstm"], case.weights[0][0], x, states, case.boundaries)
    features, _ = KernelBackend(kernels).run(call)
    found = torch.autograd.grad(features.sum(), x)
    assert kernels.grads[1].stride() == (0, 0)
    assert not kernels.grads[1].any()
    exact, _ = ReferenceBackend().run(call)
    torch.testing.assert_close(found, torch.autograd.grad(exact.sum(), x))


def test_second_derivatives_are_refused() -> None:
    case = Case("gru")
    features, _ = case.run("cpu")
    with pytest.raises(UnsupportedError, match=r"'cpu' has no second derivatives.*recurrent_backend='loop'"):
        torch.autograd.grad(features.sum(), [case.x], create_graph=True)


def test_second_derivatives_of_the_operator_are_refused() -> None:
    call = layer_call("gru", {}, requires_grad=True)
    (h, *_) = torch.ops.recurl.loop_forward(*arguments_of(call), True)
    (gradient,) = torch.autograd.grad(h.square().sum(), [call.x], create_graph=True)
    with pytest.raises(UnsupportedError, match=r"'loop' has no second derivatives here.*outside torch\.compile"):
        gradient.sum().backward()


def make_module(cell: str, **options: object) -> RecurrentModule:
    module = {"lstm": LSTMModule, "gru": GRUModule}[cell]
    return module(5, 7, in_key="obs", out_key="features", recurrent_backend="loop", **options)


def make_batch(module: RecurrentModule, *shape: int) -> TensorDict:
    slots = module.net.num_layers * module.net.num_directions
    states = {
        key: torch.randn(*shape, slots, size)
        for key, size in zip(module.state_keys, module.net.state_sizes, strict=True)
    }
    return TensorDict({"obs": torch.randn(*shape, 5), "is_init": torch.rand(*shape, 1) < 0.3, **states}, shape)


def outputs_and_gradients(module: RecurrentModule, run: Callable[[TensorDict], TensorDict], batch: TensorDict) -> list:
    result = run(batch.clone())
    outputs = [result[key] for key in module.out_keys]
    gradients = torch.autograd.grad(sum(output.square().sum() for output in outputs), list(module.parameters()))
    return [*(output.detach() for output in outputs), *gradients]


@pytest.mark.parametrize(
    ("cell", "mode", "options"),
    [
        ("lstm", True, {"num_layers": 2, "recurrent_recompute": "full"}),
        ("lstm", False, {"num_layers": 2}),
        pytest.param("gru", True, {"bidirectional": True}, marks=pytest.mark.full),
        pytest.param("gru", False, {}, marks=pytest.mark.full),
    ],
)
def test_compiles_as_one_graph(cell: str, mode: bool, options: dict) -> None:
    torch._dynamo.reset()
    module = make_module(cell, **options)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    with set_recurrent_mode(mode), torch._dynamo.config.patch(error_on_recompile=True):
        for shape in ((3, 11), (4, 9), (2, 17)):
            batch = make_batch(module, *shape)
            actual = outputs_and_gradients(module, compiled, batch)
            torch.testing.assert_close(actual, outputs_and_gradients(module, module, batch))


def test_operators_know_the_rows_of_a_batch() -> None:
    """Kernels are selected by the number of rows; symbolic sizes select none."""
    module = make_module("gru")
    for shape, dynamic, rows in (((3, 4), False, 3), ((2, 3, 4), False, 6), ((3, 4), True, 1)):
        torch._dynamo.reset()
        seen: list[int] = []

        def backend(graph: Any, _: Any, seen: list[int] = seen) -> Any:
            calls = [node for node in graph.graph.nodes if node.target is torch.ops.recurl.loop_forward.default]
            seen += [node.args[8] for node in calls]
            return graph.forward

        with set_recurrent_mode(True):
            torch.compile(module, fullgraph=True, dynamic=dynamic, backend=backend)(make_batch(module, *shape))
        assert seen == [rows], (shape, dynamic)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (5,)])
def test_kernels_are_told_the_same_in_compiled_code(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, length, precision and sizes, which select kernels, in the forward and backward passes of both layers."""
    torch._dynamo.reset()
    told: list[tuple[Any, ...]] = []

    def noting(direction: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def noted(self: LoopKernels, call: LayerCall, *others: Any) -> Any:
            starts, length = call.boundaries.starts.tolist(), call.boundaries.batch_shape[-1]
            told.append((direction, call.boundaries.rows, length, starts, call.options, call.x.shape, call.cell.name))
            return run(self, call, *others)

        return noted

    for direction in ("forward", "backward"):
        monkeypatch.setattr(LoopKernels, direction, noting(direction, getattr(LoopKernels, direction)))
    module = make_module("lstm", num_layers=2)
    batch = make_batch(module, *shape)
    with set_recurrent_mode(True):
        outputs_and_gradients(module, module, batch)
        eager = told.copy()
        told.clear()
        outputs_and_gradients(module, torch.compile(module, fullgraph=True, backend="aot_eager"), batch)
    assert [direction for direction, *_ in eager] == ["forward", "forward", "backward", "backward"]
    assert told == eager


def test_mode_of_a_compiled_module() -> None:
    """Changing the mode recompiles; each of two threads has its own mode."""
    torch._dynamo.reset()
    module = make_module("lstm")
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    batch, failures = make_batch(module, 3, 11), []

    def check(mode: bool | None) -> None:
        with set_recurrent_mode(mode), torch.no_grad():
            for _ in range(3):
                found, expected = compiled(batch.clone())["features"], module(batch.clone())["features"]
                # Not bitwise equal: an eager step without gradients uses separate kernels.
                failures.extend([] if torch.allclose(found, expected, rtol=1e-5, atol=1e-6) else [mode])

    for mode in (True, False, None, True):
        check(mode)
    threads = [threading.Thread(target=check, args=(mode,)) for mode in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize(
    ("cell", "mode", "strict"),
    [  # every pair of values, and the other combinations
        *(("lstm", True, True), ("lstm", False, False), ("gru", True, False), ("gru", False, True)),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("lstm", True, False), ("lstm", False, True))),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("gru", True, True), ("gru", False, False))),
    ],
)
def test_exports_with_dynamic_batch_and_time(cell: str, mode: bool, strict: bool) -> None:
    """The exported module keeps the mode of its export, whatever mode is set where it runs."""
    module = make_module(cell, num_layers=2)
    first, second = ([make_batch(module, *shape)[key] for key in module.in_keys] for shape in ((3, 11), (4, 6)))
    free = [{0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}] * len(first)
    shapes = {"tensordict": free[0], "tensors": tuple(free[1:])}
    with set_recurrent_mode(mode):
        program = torch.export.export(module, tuple(first), dynamic_shapes=shapes, strict=strict)
        expected = module(*second)
    operators = [node for node in program.graph.nodes if "recurl.loop_forward" in str(node.target)]
    assert len(operators) == (2 if mode else 0)
    for surrounding in (True, False):
        with set_recurrent_mode(surrounding):
            torch.testing.assert_close(program.module()(*second), expected)


def test_exports_with_a_tensordict() -> None:
    module = make_module("lstm")
    batch = make_batch(module, 3, 11)
    with set_recurrent_mode(True):
        program = torch.export.export(module, (batch.clone(),))
        expected = module(batch.clone())
    torch.testing.assert_close(program.module()(batch.clone())["features"], expected["features"])

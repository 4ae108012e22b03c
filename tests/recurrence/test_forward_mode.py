"""Forward-mode derivatives are correct or raise an error, with and without gradients; none is dropped silently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, jvp

from recurl.core.errors import UnsupportedError
from recurl.modules import GRUModule, LSTMModule, set_recurrent_mode
from recurl.modules.recurrent import RecurrentModule

OPTIONS = [
    (LSTMModule, {}),
    (LSTMModule, {"num_layers": 2, "proj_size": 3}),
    (LSTMModule, {"bidirectional": True}),
    (GRUModule, {"num_layers": 2}),
]
DERIVING = ["loop", "scan", "reference"]

Inputs = dict[str, Tensor]
Function = Callable[[Inputs], Tensor]


def problem(kind: type[RecurrentModule], backend: str, mode: bool, **options: Any) -> tuple[Function, Inputs]:
    """A scalar function of all differentiable inputs, and the point at which to differentiate it."""
    module = kind(3, 5, in_key="x", out_key="y", recurrent_backend=backend, dtype=torch.float64, **options)
    shape = (2, 6) if mode else (4,)
    slots, sizes = module.net.num_layers * module.net.num_directions, module.net.state_sizes
    states = {
        key: torch.randn(*shape, slots, size, dtype=torch.float64)
        for key, size in zip(module.state_keys, sizes, strict=True)
    }
    inputs = {"x": torch.randn(*shape, 3, dtype=torch.float64), **states}
    is_init = torch.rand(*shape, 1) < 0.3
    parameters = {f"module.{name}": value.detach() for name, value in module.named_parameters()}
    weights: list[Tensor] = []

    def function(values: Inputs) -> Tensor:
        of_module = {name.removeprefix("module."): value for name, value in values.items() if name in parameters}
        with set_recurrent_mode(mode):
            outputs = functional_call(module, of_module, (*(values[key] for key in inputs), is_init))
        if not weights:
            weights.extend(torch.randn(output.shape, dtype=torch.float64) for output in outputs)
        return sum(
            ((weight * output).sin().sum() for weight, output in zip(weights, outputs, strict=True)), torch.zeros(())
        )

    return function, inputs | parameters


def by_jvp(function: Function, inputs: Inputs, tangents: Inputs) -> Tensor:
    return jvp(function, (inputs,), (tangents,))[1]


def by_dual_numbers(function: Function, inputs: Inputs, tangents: Inputs) -> Tensor:
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(value, tangents[name]) for name, value in inputs.items()}
        tangent = forward_ad.unpack_dual(function(duals)).tangent
    assert tangent is not None, "the tangent is lost"
    return tangent


def reverse(function: Function, inputs: Inputs, tangents: Inputs) -> Tensor:
    leaves = {name: value.detach().requires_grad_() for name, value in inputs.items()}
    with torch.enable_grad():
        gradients = torch.autograd.grad(function(leaves), list(leaves.values()))
    return sum(((g * tangents[name]).sum() for name, g in zip(leaves, gradients, strict=True)), torch.zeros(()))


def random_like(inputs: Inputs) -> Inputs:
    return {name: torch.randn_like(value) for name, value in inputs.items()}


@pytest.mark.parametrize("derive", [by_jvp, by_dual_numbers])
@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize(("kind", "options"), OPTIONS)
@pytest.mark.parametrize("backend", DERIVING)
def test_sequences(backend: str, kind: type, options: dict, with_gradients: bool, derive: Callable) -> None:
    function, inputs = problem(kind, backend, True, **options)
    tangents = random_like(inputs)
    with torch.set_grad_enabled(with_gradients):
        found = derive(function, inputs, tangents)
    torch.testing.assert_close(found, reverse(function, inputs, tangents), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("derive", [by_jvp, by_dual_numbers])
@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize(("kind", "options"), [row for row in OPTIONS if "bidirectional" not in row[1]])
def test_steps(kind: type, options: dict, with_gradients: bool, derive: Callable) -> None:
    function, inputs = problem(kind, "fastest", False, **options)
    tangents = random_like(inputs)
    with torch.set_grad_enabled(with_gradients):
        found = derive(function, inputs, tangents)
    torch.testing.assert_close(found, reverse(function, inputs, tangents), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("derive", [by_jvp, by_dual_numbers])
@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize("kind", [LSTMModule, GRUModule])
def test_cpu_refuses(kind: type, with_gradients: bool, derive: Callable) -> None:
    function, inputs = problem(kind, "cpu", True)
    with (
        torch.set_grad_enabled(with_gradients),
        pytest.raises(UnsupportedError, match=r"'cpu' has no forward-mode derivatives.*recurrent_backend='loop'"),
    ):
        derive(function, inputs, random_like(inputs))


def test_cpu_runs_where_nothing_is_derived() -> None:
    function, inputs = problem(GRUModule, "cpu", True)
    with torch.no_grad():
        expected = function(inputs)
        with forward_ad.dual_level():
            assert torch.equal(function(inputs), expected)


@pytest.mark.parametrize("kind", [LSTMModule, GRUModule])
def test_pad_derives_or_refuses(kind: type) -> None:
    """Forward-mode derivatives of torch's own kernels."""
    function, inputs = problem(kind, "pad", True)
    tangents = random_like(inputs)
    with torch.no_grad():
        found = by_dual_numbers(function, inputs, tangents)
        torch.testing.assert_close(found, reverse(function, inputs, tangents), rtol=1e-9, atol=1e-12)
        with pytest.raises(UnsupportedError, match=r"'pad' runs torch.nn's kernels.*recurrent_backend='loop'"):
            by_jvp(function, inputs, tangents)


@pytest.mark.parametrize("backend", DERIVING)
def test_forward_over_reverse(backend: str) -> None:
    function, inputs = problem(LSTMModule, backend, True)
    tangents = random_like(inputs)

    def slope(leaves: Inputs) -> Tensor:
        gradients = torch.autograd.grad(function(leaves), list(leaves.values()), create_graph=True)
        return sum(((g * tangents[name]).sum() for name, g in zip(leaves, gradients, strict=True)), torch.zeros(()))

    leaves = {name: value.requires_grad_() for name, value in inputs.items()}
    expected = torch.autograd.grad(slope(leaves), list(leaves.values()))
    found = jvp(torch.func.grad(function), (inputs,), (tangents,))[1]
    for name, value in zip(leaves, expected, strict=True):
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("backend", ["loop", "scan"])
def test_tangents_of_incoming_gradients(backend: str) -> None:
    """Only operations after the recurrence have a tangent; the backward pass of the recurrence receives it."""
    function, inputs = problem(GRUModule, backend, True)
    x = inputs["x"].requires_grad_()
    output = function(inputs)
    (gradient,) = torch.autograd.grad(output, x, retain_graph=True)
    with forward_ad.dual_level():
        (dual,) = torch.autograd.grad(output, x, forward_ad.make_dual(torch.ones(()), torch.full((), 3.0)).double())
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, 3 * gradient)


def test_cpu_refuses_tangents_of_incoming_gradients() -> None:
    function, inputs = problem(GRUModule, "cpu", True)
    x = inputs["x"].requires_grad_()
    output = function(inputs)
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="'cpu' has no second derivatives"):
        torch.autograd.grad(output, x, forward_ad.make_dual(torch.ones(()), torch.ones(())).double())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["loop", "cpu", "scan"])
def test_tracing_refuses(backend: str) -> None:
    torch._dynamo.reset()
    function, inputs = problem(GRUModule, backend, True)
    compiled = torch.compile(by_jvp, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"'{backend}' has no forward-mode derivatives"):
        compiled(lambda x: function(inputs | {"x": x}), inputs["x"], inputs["x"])


@pytest.mark.parametrize("backend", ["loop", "cpu"])
def test_operators_refuse(backend: str) -> None:
    module = GRUModule(3, 4, in_key="x", out_key="y", recurrent_backend=backend)
    inputs = torch.randn(2, 5, 3), torch.randn(2, 5, 1, 4), torch.rand(2, 5, 1) < 0.3
    with torch.no_grad(), set_recurrent_mode(True):
        exported = torch.export.export(module, inputs).module()
        with (
            forward_ad.dual_level(),
            pytest.raises(UnsupportedError, match=f"'{backend}' has no forward-mode derivatives here"),
        ):
            exported(forward_ad.make_dual(inputs[0], torch.ones_like(inputs[0])), *inputs[1:])

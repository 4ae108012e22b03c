"""The cpu backend under torch.compile and torch.export, for both modules in both modes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recurl.modules import GRUModule, LSTMModule, RecurrentModule, set_recurrent_mode
from recurl.recurrence.cpu import instruction_sets

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not instruction_sets(), reason="there was no compiler when recurl was installed"),
]

KINDS = [LSTMModule, GRUModule]


def make(kind: type) -> RecurrentModule:
    torch.manual_seed(0)
    return kind(3, 5, num_layers=2, in_key="x", out_key="y", recurrent_backend="cpu", dtype=torch.float64)


def inputs(module: RecurrentModule, *shape: int) -> tuple[Tensor, ...]:
    states = (torch.randn(*shape, 2, 5, dtype=torch.float64) for _ in module.state_keys)
    return (torch.randn(*shape, 3, dtype=torch.float64), *states, torch.rand(shape) < 0.3)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *((LSTMModule, True), (GRUModule, False)),
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((LSTMModule, False), (GRUModule, True))),
    ],
)
def test_compiles_as_one_graph_for_any_size(kind: type, mode: bool) -> None:
    module = make(kind)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    parameters = list(module.parameters())
    with set_recurrent_mode(mode):
        for shape in ((4, 9), (6, 7)):
            values = inputs(module, *shape)
            outputs, expected = compiled(*values), module(*values)
            torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
            gradients = [torch.autograd.grad(result[0].square().sum(), parameters) for result in (outputs, expected)]
            torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_exports_and_keeps_its_mode(kind: type, mode: bool) -> None:
    module = make(kind)
    first, second = inputs(module, 3, 11), inputs(module, 4, 6)
    free = [{0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}] * len(first)
    shapes = {"tensordict": free[0], "tensors": tuple(free[1:])}
    with set_recurrent_mode(mode):
        program = torch.export.export(module, first, dynamic_shapes=shapes, strict=False)
        expected = module(*second)
    operators = [node for node in program.graph.nodes if "recurl.cpu_forward" in str(node.target)]
    assert len(operators) == (2 if mode else 0)
    with set_recurrent_mode(not mode):
        torch.testing.assert_close(program.module()(*second), expected, rtol=1e-12, atol=1e-12)

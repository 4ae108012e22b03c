"""Thin products as sums: they match products, and other operations are unchanged."""

import pytest
import torch

from recurl.core.torch_compat import inductor_program
from recurl.execution import traced
from recurl.execution.small_products import small_product
from recurl.execution.traced import InductorFunction

mm, addmm = torch.ops.aten.mm.default, torch.ops.aten.addmm.default


@pytest.mark.parametrize("sizes", [(5, 1, 7), (5, 4, 7), (9, 30, 1), (9, 30, 4), (1, 30, 9), (4, 30, 9), (2, 3, 1)])
@pytest.mark.parametrize("transposed", [False, True])
def test_numbers_of_products(sizes, transposed):
    rows, terms, columns = sizes
    a = torch.randn(terms, rows, dtype=torch.float64).t() if transposed else torch.randn(rows, terms).double()
    b = torch.randn(columns, terms, dtype=torch.float64).t() if transposed else torch.randn(terms, columns).double()
    bias = torch.randn(columns, dtype=torch.float64)
    torch.testing.assert_close(small_product(mm, (a, b)), a @ b, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(small_product(addmm, (bias, a, b)), bias + a @ b, rtol=1e-13, atol=1e-13)


def test_other_operations_are_left_alone():
    large, integers = torch.ones(5, 5), torch.ones(2, 2, dtype=torch.int64)
    assert small_product(mm, (large, large)) is None
    assert small_product(mm, (integers, integers)) is None
    assert small_product(mm, (torch.ones(0, 2), torch.ones(2, 3))) is None
    assert small_product(mm, (torch.ones(2, 0), torch.ones(0, 3))) is None
    assert small_product(torch.ops.aten.add.Tensor, (torch.ones(2, 2), torch.ones(2, 2))) is None


def test_programs_have_sums_in_their_place(monkeypatch):
    net = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Linear(16, 1))
    x = torch.randn(6, 2)

    def run(x):
        with torch.enable_grad():
            loss = net(x).square().sum()
            return loss.detach(), *torch.autograd.grad(loss, net.parameters())

    counts = []

    def counted(graph, *options):
        counts.append(sum(node.target in (mm, addmm) for node in graph.graph.nodes))
        return inductor_program(graph, *options)

    monkeypatch.setattr(traced, "inductor_program", counted)
    expected, _ = run(x), InductorFunction(run, [x])
    monkeypatch.setattr(traced, "_SUMS_ON", ("cpu",))
    few = InductorFunction(run, [x])
    assert counts == [8, 3]  # left are those of the middle layer: forward, two gradients
    torch.testing.assert_close(few(x), expected)

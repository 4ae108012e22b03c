"""Objects that hold modules under torch.func: other weights, ensembles."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.func import functional_call, stack_module_state

from recurl.core.errors import UnsupportedError
from tests.execution.lowering.live import KINDS, Call, assert_same, subject
from tests.pairs import paired


@pytest.mark.parametrize("kind", KINDS)
def test_functional_call(kind: str) -> None:
    thing, call, batch = subject(kind)
    other, _, _ = subject(kind)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    before = call(thing, batch)
    state = {name: value.detach().clone() for name, value in other.named_parameters()}
    wrapped = _Called(thing, call)
    # With tie_weights torch doesn't restore the weights of a module that the tree holds twice.
    names = {f"thing.{name}": value for name, value in state.items()}
    found = functional_call(wrapped, names, (batch,), tie_weights=False)
    assert_same(found, call(other, batch))
    assert_same(call(thing, batch), before)


class _Called(nn.Module):
    """``call(thing, batch)`` as a module, for torch.func."""

    def __init__(self, thing: nn.Module, call: Call) -> None:
        super().__init__()
        self.thing, self._call = thing, call

    def forward(self, batch: TensorDict) -> dict[str, torch.Tensor]:
        return self._call(self.thing, batch)


def ensemble(kind: str, cell: str, backend: str) -> tuple[list[Any], Call, TensorDict]:
    """Return three members with different weights."""
    thing, call, batch = subject(kind, cell, backend)
    members = [copy.deepcopy(thing) for _ in range(3)]
    with torch.no_grad():
        for index, member in enumerate(members):
            for parameter in member.parameters():
                parameter.mul_(1.0 + 0.2 * index)
    return members, call, batch


def objective(out: dict[str, torch.Tensor]) -> torch.Tensor:
    return sum(value.sum() for key, value in out.items() if key.startswith(("loss", "adv", "logits")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "memory"), paired(KINDS, list(product(["lstm", "gru"], ["reference", "loop", "scan", "cpu"])))
)
def test_an_ensemble_under_vmap(kind: str, memory: tuple[str, str]) -> None:
    """The idiom of torch.func: stacked parameters, and a copy on the meta device called under vmap."""
    cell, backend = memory
    members, call, batch = ensemble(kind, cell, backend)
    base = _Called(copy.deepcopy(members[0]).to("meta"), call)
    params, buffers = stack_module_state([_Called(member, call) for member in members])
    targets = {name: params.pop(name) for name in list(params) if "target" in name}

    def one(params: Any, targets: Any, buffers: Any) -> dict[str, torch.Tensor]:
        return functional_call(base, {**params, **targets, **buffers}, (batch,))

    found = torch.vmap(one, randomness="different")(params, targets, buffers)
    grads = torch.vmap(torch.func.grad(lambda *state: objective(one(*state))), randomness="different")(
        params, targets, buffers
    )
    for index, member in enumerate(members):
        out = call(member, batch)
        for key, value in out.items():
            torch.testing.assert_close(found[key][index], value, rtol=1e-4, atol=1e-5)
        objective(out).backward()
        for name, parameter in member.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(grads[f"thing.{name}"][index], parameter.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_pad_refuses_an_ensemble(cell: str) -> None:
    thing, call, batch = subject("shared", cell, "pad")
    params, _ = stack_module_state([thing, copy.deepcopy(thing)])

    def one(params: dict[str, torch.Tensor]) -> torch.Tensor:
        state = {f"thing.{name}": value for name, value in params.items()}
        return functional_call(_Called(thing, call), state, (batch,))["loss_critic"]

    with pytest.raises(UnsupportedError, match=r"can't transform.*use recurrent_backend='loop'"):
        torch.vmap(one)(params)

"""A guard sees every change of a module that a compiled function or a CUDA graph would miss."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from recurl.execution.capture import ModuleGuard


def other_memory(net: Any) -> None:
    net[0].weight.data = net[0].weight.data.clone()


CHANGES: dict[str, Callable[[Any], object]] = {
    "1": lambda net: net.__setitem__(1, nn.ReLU()),
    "0.weight": lambda net: setattr(net[0], "weight", nn.Parameter(net[0].weight.detach())),  # in the same memory
    "0.bias": lambda net: setattr(net[0], "bias", None),
    "2": lambda net: net.append(nn.Tanh()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_replaced_modules_and_tensors_are_named(name: str) -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    guard = ModuleGuard(net)
    assert guard.replaced() is None
    CHANGES[name](net)
    assert guard.replaced() == name


def test_other_memory_is_a_replacement_and_an_edit_in_place_is_not() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    guard = ModuleGuard(net)
    with torch.no_grad():
        net[0].weight.mul_(2)
    assert guard.replaced() is None
    other_memory(net)
    assert guard.replaced() == "0.weight"


def test_frozen_parameters_are_named() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    guard = ModuleGuard(net)
    net[0].bias.requires_grad_(False)
    assert guard.replaced() == "0.bias"


def test_settings_are_compared_by_value_or_identity() -> None:
    settings: dict[str, object] = {"rate": 0.5, "names": ("a", "b")}
    guard = ModuleGuard(None, settings=lambda: settings)
    settings["rate"] = float("0.5")
    assert guard.replaced() is None
    settings["rate"] = 0.25
    assert guard.replaced() == "rate"
    guard.renew()
    settings["names"] = tuple("ab")
    assert guard.replaced() == "names"


def test_modes_are_guarded_if_asked() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Dropout())
    plain, modes = ModuleGuard(net), ModuleGuard(net, modes=True)
    net[1].p = 0.1
    assert plain.replaced() is None
    assert modes.replaced() == "1"

from __future__ import annotations

import pytest
import torch
from torch import nn

from recurl.core.errors import ArgumentError
from recurl.modules.networks import MLP


def widths(net: MLP) -> list[tuple[int, int]]:
    return [(layer.in_features, layer.out_features) for layer in net if isinstance(layer, nn.Linear)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, [(3, 2)]),
        ({"depth": 0}, [(3, 2)]),
        ({"depth": 2}, [(3, 32), (32, 32), (32, 2)]),
        ({"depth": 2, "num_cells": 5}, [(3, 5), (5, 5), (5, 2)]),
        ({"num_cells": [7, 8]}, [(3, 7), (7, 8), (8, 2)]),
        ({"num_cells": (7,), "depth": 1}, [(3, 7), (7, 2)]),
        ({"num_cells": []}, [(3, 2)]),
    ],
)
def test_layers(arguments, expected):
    assert widths(MLP(3, 2, **arguments)) == expected


def test_lazy_input_and_leading_dimensions():
    net = MLP(out_features=2, num_cells=[4])
    assert net(torch.zeros(5, 6, 3)).shape == (5, 6, 2)
    assert widths(net) == [(3, 4), (4, 2)]


def test_several_inputs_are_concatenated():
    net = MLP(5, 1, num_cells=[4])
    a, b = torch.randn(7, 3), torch.randn(7, 2)
    torch.testing.assert_close(net(a, b), net(torch.cat([a, b], -1)))


def test_activations():
    plain = MLP(3, 2, num_cells=[4], activation_class=nn.ReLU)
    assert [type(layer) for layer in plain] == [nn.Linear, nn.ReLU, nn.Linear]
    active = MLP(3, 2, num_cells=[4], activation_class=nn.ReLU, activate_last_layer=True)
    assert [type(layer) for layer in active] == [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU]


def test_device():
    assert MLP(3, 2, device="meta")[0].weight.device.type == "meta"


def test_errors():
    with pytest.raises(ArgumentError, match="out_features"):
        MLP(3)
    with pytest.raises(ArgumentError, match="needs a depth"):
        MLP(3, 2, num_cells=4)
    with pytest.raises(ArgumentError, match="depth=3"):
        MLP(3, 2, num_cells=[4, 4], depth=3)

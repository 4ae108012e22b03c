"""Every layer with a C++ implementation matches torch."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule as Mod
from torch import nn

from recurl.execution.compiled import CompiledNetwork
from recurl.execution.compiled.layers import LAYERS
from recurl.execution.lowering import Entries, Network
from recurl.modules import NormalParamExtractor
from recurl.recurrence.cpu import INSTRUCTION_SETS, instruction_sets, program

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="there was no compiler when recurl was installed")

WIDTH = 38


def layers() -> list[nn.Module]:
    """Return every kind of layer, with fixed weights."""
    torch.manual_seed(0)
    return [
        nn.Linear(WIDTH, 21),
        nn.Linear(WIDTH, 1, bias=False),
        nn.Identity(),
        nn.Dropout(0.5).eval(),
        nn.Tanh(),
        nn.Sigmoid(),
        nn.SiLU(),
        nn.ReLU(),
        nn.ReLU6(),
        nn.Hardtanh(-0.5, 0.25),
        nn.ELU(0.7),
        nn.LeakyReLU(0.2),
        nn.LayerNorm(WIDTH),
        nn.LayerNorm(WIDTH, elementwise_affine=False, eps=0.1),
        nn.RMSNorm(WIDTH),
        NormalParamExtractor(scale_lb=0.5),
        nn.Sequential(nn.Linear(WIDTH, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 3))),
    ]


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    known = INSTRUCTION_SETS[: INSTRUCTION_SETS.index(request.param) + 1]
    monkeypatch.setattr(program, "instruction_sets", lambda: known)
    return request.param


def test_every_layer_is_tried() -> None:
    assert {type(layer) for layer in layers()} == set(LAYERS)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("rows", [1, 2, 4, 7, 20, 33, 50, 64, 131])
def test_layers(rows: int) -> None:
    torch.manual_seed(0)
    x = 3 * torch.randn(rows, WIDTH)
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.float64, 1e-14)):
        for layer in layers():
            layer.to(dtype)
            keys = ["out", "more"] if isinstance(layer, NormalParamExtractor) else ["out"]
            # Layers without weights take the dtype of the preceding ones.
            net = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer).to(dtype)
            network, entries = (
                CompiledNetwork(Network([Mod(net, ["x"], keys)])),
                Entries({"x": x.to(dtype)}, x.shape[:1]),
            )
            with torch.no_grad():
                assert network.explain(entries)["cpp"] is None
                found, expected = network(entries.copy()), Network([Mod(net, ["x"], keys)])(entries.copy())
            for key in keys:
                assert (found[key] - expected[key]).norm() <= tolerance * expected[key].norm(), layer


def test_numbers_that_are_none_stay_so() -> None:
    for layer in (nn.Tanh(), nn.ReLU(), nn.Sigmoid(), nn.ELU(), nn.LeakyReLU(), nn.Hardtanh()):
        network = CompiledNetwork(Network([Mod(layer, ["x"], ["out"])]))
        x = torch.tensor([[torch.nan, torch.inf, -torch.inf, 0.0]])
        with torch.no_grad():
            found = network(Entries({"x": x}, torch.Size([1])))["out"]
            torch.testing.assert_close(found, layer(x), equal_nan=True)

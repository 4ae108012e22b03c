"""Every built-in cell under ``torch.compile``: one graph for sequences, and one for a step, with gradients."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from recurl.modules import CellModule, set_recurrent_mode
from recurl.recurrence import CELLS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


@pytest.mark.parametrize("sequences", [True, False])
@pytest.mark.parametrize("name", CELLS)
def test_every_cell_is_traced_whole(name: str, sequences: bool) -> None:
    torch.manual_seed(0)
    module = CellModule(CELLS[name], 3, 8, 2, in_key="x", out_key="y", recurrent_backend="auto", dtype=torch.float64)
    x, flags = torch.randn(2, 9, 3, dtype=torch.float64), torch.rand(2, 9, 1) < 0.3
    slots = [torch.rand(2, 9, 2, *shape, dtype=torch.float64) for shape in module.net.state_shapes]

    def features(x: torch.Tensor, *states: torch.Tensor) -> torch.Tensor:
        batch = TensorDict({"x": x, "is_init": flags, **dict(zip(module.state_keys, states, strict=True))}, [2, 9])
        with set_recurrent_mode(sequences):
            return module(batch)["y"]

    torch._dynamo.reset()
    compiled = torch.compile(features, fullgraph=True, backend="aot_eager")
    results = []
    for run in (compiled, features):
        y = run(x, *slots)
        results.append([y, *torch.autograd.grad(y.square().sum(), [*module.parameters()], allow_unused=True)])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)

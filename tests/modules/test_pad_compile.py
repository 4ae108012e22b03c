from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from recurl.modules import GRUModule, LSTMModule, set_recurrent_mode

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", [LSTMModule, GRUModule])
def test_pad_breaks_the_graph_but_computes_right(kind: type) -> None:
    module = kind(3, 8, in_key="obs", out_key="feat")
    is_init = torch.zeros(4, 8, 1, dtype=torch.bool)
    is_init[1, 4] = True
    data = TensorDict({"obs": torch.randn(4, 8, 3), "is_init": is_init}, [4, 8])

    def call(batch: TensorDict) -> TensorDict:
        with set_recurrent_mode(True):
            return module(batch)

    with torch.no_grad():
        expected = call(data.clone())["feat"]
        torch.testing.assert_close(torch.compile(call, backend="eager")(data.clone())["feat"], expected)
        torch.compiler.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="use 'auto'"):
            torch.compile(call, backend="eager", fullgraph=True)(data.clone())

"""Empty batches: outputs have the usual dependencies in autograd, and gradients are zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from recurl.core.errors import ArgumentError
from recurl.modules import GRU, LSTM, GRUModule, LSTMModule, set_recurrent_mode

SEQUENCES = [(0,), (0, 4), (3, 0)]
STEPS = [(0,), (3, 0)]
KINDS: list[tuple[type, dict[str, Any]]] = [
    (LSTMModule, {}),
    (LSTMModule, {"proj_size": 3}),
    (LSTMModule, {"num_layers": 2, "bidirectional": True}),
    (GRUModule, {"num_layers": 2, "dropout": 0.5}),
]


def assert_zero_gradients(outputs: list[Tensor], inputs: list[Tensor]) -> None:
    assert all(output.requires_grad for output in outputs)
    for value in inputs:
        value.grad = None
    sum((output.sum() for output in outputs), torch.zeros(())).backward()
    for value in inputs:
        assert value.grad is not None
        assert value.grad.shape == value.shape
        assert value.grad.count_nonzero() == 0


@pytest.mark.slow
@pytest.mark.parametrize("with_states", [True, False])
@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("backend", ["pad", "loop", "cpu", "scan", "reference"])
def test_modules(backend: str, kind: type, options: dict[str, Any], with_states: bool) -> None:
    module = kind(3, 5, in_key="x", out_key="y", recurrent_backend=backend, **options)
    net = module.net
    steps = [] if net.bidirectional else [(False, shape) for shape in STEPS]
    for mode, shape in [*((True, shape) for shape in SEQUENCES), *steps]:
        states = {
            key: torch.zeros(*shape, net.num_layers * net.num_directions, size, requires_grad=True)
            for key, size in zip(module.state_keys, net.state_sizes, strict=True)
        }
        x = torch.zeros(*shape, 3, requires_grad=True)
        batch = TensorDict({"x": x, "is_init": torch.zeros(*shape, 1, dtype=torch.bool)}, shape)
        if with_states:
            batch.update(states)
        with set_recurrent_mode(mode):
            outputs = [module(batch)[key] for key in module.out_keys]
        assert outputs[0].shape == (*shape, net.output_size * net.num_directions)
        assert_zero_gradients(outputs, [x, *(states.values() if with_states else ()), *module.parameters()])


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"python_based": True}], ids=str)
@pytest.mark.parametrize(("kind", "torchs"), [(LSTM, nn.LSTM), (GRU, nn.GRU)])
def test_networks(kind: type, torchs: type, options: dict[str, Any]) -> None:
    net, x = kind(3, 5, **options), torch.zeros(0, 4, 3, requires_grad=True)
    like = torchs(3, 5, batch_first=True, **{k: v for k, v in options.items() if k != "python_based"})
    (features, final), (expected, expected_final) = net(x), like(x)
    states = [final] if isinstance(final, Tensor) else list(final)
    assert features.shape == expected.shape
    assert states[0].shape == (expected_final if isinstance(final, Tensor) else expected_final[0]).shape
    assert_zero_gradients([features, *states], [x, *net.parameters()])
    for shape in ((3, 0, 3), (0, 3)):
        with pytest.raises(ArgumentError, match="must have at least one step"):
            net(torch.zeros(shape))

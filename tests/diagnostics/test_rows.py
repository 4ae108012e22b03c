"""Policies that couple rows, and plain recurrent networks used in place of recurrent modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule as Mod
from torch import nn

from recurl.modules import GRU, LSTM
from tests.diagnostics.policies import actor_of, failures, linear, memory, refused, wired

pytestmark = pytest.mark.slow


class Plain(nn.Module):
    """Plain recurrent network on observations ``[B, 4]``: B steps, or with ``one_step`` a single step per row."""

    def __init__(self, kind: type[nn.Module], one_step: bool = False) -> None:
        super().__init__()
        self.net = kind(4, 8, batch_first=True)
        self.one_step = one_step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x.unsqueeze(-2))[0].squeeze(-2) if self.one_step else self.net(x)[0]


NETWORKS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN, "recurl_lstm": LSTM, "recurl_gru": GRU}


@pytest.mark.parametrize("rows", [None, 1, 3])
@pytest.mark.parametrize("kind", NETWORKS.values(), ids=NETWORKS.keys())
def test_rows_become_time(kind: type[nn.Module], rows: int | None) -> None:
    policy = actor_of(Mod(Plain(kind), ["observation"], ["features"]), linear())
    result = refused(policy, wired(policy, rows), "collection" if rows is None else "rows")
    name = kind.__name__
    if rows is not None:
        assert (
            f"the {name} 'module.0.module.0.module.net' reads the rows of the environment as time steps"
            in result.detail
        )
    module = "LSTMModule" if name == "LSTM" else "GRUModule"
    assert f"with {module}(input_size=4, hidden_size=8, in_key=..., out_key=...)" in result.fix


@pytest.mark.parametrize("kind", NETWORKS.values(), ids=NETWORKS.keys())
def test_next_to_a_recurrent_module(kind: type[nn.Module]) -> None:
    plain, head = Mod(Plain(kind), ["observation"], ["more"]), nn.Linear(16, 2)
    joined = Mod(lambda a, b: head(torch.cat([a, b], -1)), ["features", "more"], ["logits"])
    policy = actor_of(memory(), plain, joined)
    assert "reads the rows of the environment as time steps" in refused(policy, wired(policy), "rows").detail


class Cell(nn.Module):
    """Cell that is called without a state, or with zeros."""

    def __init__(self, kind: type[nn.RNNCellBase], zeros: bool) -> None:
        super().__init__()
        self.cell, self.zeros = kind(4, 8), zeros

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(*x.shape[:-1], 8)
        state = (state, state) if isinstance(self.cell, nn.LSTMCell) else state
        out = self.cell(x, state if self.zeros else None)
        return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("rows", [None, 2])
@pytest.mark.parametrize(
    "net",
    [*(Plain(kind, one_step=True) for kind in NETWORKS.values())]
    + [Cell(kind, zeros) for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell) for zeros in (False, True)],
    ids=lambda net: f"{type(net).__name__}-{type(next(net.children())).__name__}",
)
def test_single_steps_from_nothing(net: nn.Module, rows: int | None) -> None:
    policy = actor_of(Mod(net, ["observation"], ["features"]), linear())
    result = refused(policy, wired(policy, rows), "rows")
    assert "starts without a state at every step: it has no memory" in result.detail
    assert "of recurl.modules, which carries one state per row" in result.fix


def test_a_network_that_keeps_its_state() -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.state = nn.LSTM(4, 8), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out, self.state = self.net(x.reshape(1, -1, 4), self.state)
            return out.reshape(*x.shape[:-1], 8)

    policy = actor_of(Mod(Keeping(), ["observation"], ["features"]), linear())
    result = refused(policy, wired(policy), "repeat")
    assert "keeps internal state" in result.detail
    assert "LSTMModule" in result.fix


# -- other couplings of rows


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]


def encoded(layer: Any) -> nn.Module:
    return actor_of(Mod(layer, ["observation"], ["x"]), memory("gru", "x"), linear())


JOINING = {
    "mean": (lambda x: x - x.mean(0, keepdim=True), "TensorDictModule"),
    "attention": (Attention(), "MultiheadAttention"),
    "neighbours": (lambda x: x + x.roll(1, 0), "TensorDictModule"),
}


@pytest.mark.parametrize(("layer", "name"), JOINING.values(), ids=JOINING.keys())
def test_joined_rows(layer: Any, name: str) -> None:
    policy = encoded(layer)
    result = refused(policy, wired(policy, 3), "rows")
    assert "'x' of a row changes with the data of other rows" in result.detail
    assert name in result.detail
    assert "ObservationNorm" in result.fix


class Flat(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.reshape(-1, 4)).reshape(x.shape)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, Flat])
def test_batch_normalization(kind: type[nn.BatchNorm1d]) -> None:
    layer = kind(4)
    policy = encoded(layer)
    result = refused(policy, wired(policy, 3), "rows")
    assert f"the {kind.__name__} 'module.0.module.0.module' mixes them" in result.detail
    assert "call policy.eval() before collection and for the losses" in result.fix
    assert int(layer.num_batches_tracked) == 0  # the statistics are unchanged
    result = refused(policy, wired(policy, 1), "collection")  # a single row has no variance
    assert "policy.eval()" in result.fix


def test_batch_normalization_in_evaluation_mode() -> None:
    policy = encoded(Flat(4)).eval()
    assert failures(policy, wired(policy, 3)) == []


def test_states_that_change_rows() -> None:
    key = ("next", "recurrent_state")
    policy = actor_of(memory(), linear(), Mod(lambda h: h.roll(1, 0), [key], [key]))
    assert "'recurrent_state') of a row changes with" in refused(policy, wired(policy, 3), "rows").detail

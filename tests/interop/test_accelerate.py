"""Models of other libraries give the same results on recurl's backends."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import recurl
from recurl.core.errors import ArgumentError, ArgumentTypeError
from recurl.modules.accelerate import Accelerated
from recurl.nn.loops import without_loop
from recurl.recurrence import record_backends

FLOAT = torch.float64
States = tuple[Tensor, Tensor]


class CleanRL(nn.Module):
    """The memory of CleanRL's ppo_atari_lstm, as it is written there."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(6, 8)
        self.lstm = nn.LSTM(8, 8)
        self.actor = nn.Linear(8, 2)

    def get_states(self, x: Tensor, lstm_state: States, done: Tensor) -> tuple[Tensor, States]:
        hidden = self.network(x / 255.0)

        # LSTM logic
        batch_size = lstm_state[0].shape[1]
        hidden = hidden.reshape((-1, batch_size, self.lstm.input_size))
        done = done.reshape((-1, batch_size))
        new_hidden = []
        for h, d in zip(hidden, done):  # noqa: B905 - as written there
            h, lstm_state = self.lstm(
                h.unsqueeze(0),
                (
                    (1.0 - d).view(1, -1, 1) * lstm_state[0],
                    (1.0 - d).view(1, -1, 1) * lstm_state[1],
                ),
            )
            new_hidden += [h]
        new_hidden = torch.flatten(torch.cat(new_hidden), 0, 1)
        return new_hidden, lstm_state

    def forward(self, x: Tensor, lstm_state: States, done: Tensor) -> tuple[Tensor, States]:
        hidden, lstm_state = self.get_states(x, lstm_state, done)
        return self.actor(hidden), lstm_state


class Spelled(nn.Module):
    """A GRU with masks, in another spelling."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.GRU(6, 8, 2)

    def forward(self, x: Tensor, state: Tensor, done: Tensor) -> tuple[Tensor, Tensor]:
        rows = state.shape[1]
        outputs = []
        for x_t, done_t in zip(x.unflatten(0, (-1, rows)), done.view(-1, rows), strict=True):
            keep = (1 - done_t).reshape(1, rows, 1)
            y, state = self.memory(x_t[None], state * keep)
            outputs.append(y)
        return torch.cat(outputs, dim=0).flatten(0, 1), state


class Kept(nn.Module):
    """Loops that mean something else, or that something else reads."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8)

    def other_masks(self, xs: Tensor, state: States, masks: Tensor) -> Tensor:
        ys = []
        for x, m in zip(xs, masks, strict=True):
            y, state = self.lstm(x.unsqueeze(0), (m.view(1, -1, 1) * state[0], m.view(1, -1, 1) * state[1]))
            ys += [y]
        return torch.cat(ys)

    def one_state(self, xs: Tensor, state: States, dones: Tensor) -> Tensor:
        ys = []
        for x, d in zip(xs, dones, strict=True):
            y, state = self.lstm(x.unsqueeze(0), ((1.0 - d).view(1, -1, 1) * state[0], state[1]))
            ys += [y]
        return torch.cat(ys)

    def stacked(self, xs: Tensor, state: States, dones: Tensor) -> Tensor:
        ys = []
        for x, d in zip(xs, dones, strict=True):
            k = (1.0 - d).view(1, -1, 1)
            y, state = self.lstm(x.unsqueeze(0), (k * state[0], k * state[1]))
            ys += [y]
        return torch.stack(ys)

    def last_output(self, xs: Tensor, state: States, dones: Tensor) -> Tensor:
        ys, y = [], xs
        for x, d in zip(xs, dones, strict=True):
            k = (1.0 - d).view(1, -1, 1)
            y, state = self.lstm(x.unsqueeze(0), (k * state[0], k * state[1]))
            ys += [y]
        return torch.cat(ys) + y


def states(rows: int, count: int = 2, layers: int = 1) -> tuple[Tensor, ...]:
    return tuple(torch.randn(layers, rows, 8, dtype=FLOAT) for _ in range(count))


@pytest.mark.filterwarnings(
    "ignore:The tensor attributes self._flat_weights:UserWarning"
)  # of exports, as of torch.nn's
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False, "batch_first": True}], ids=str
)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_layers_keep_what_they_are(kind: Any, options: dict[str, Any]) -> None:
    plain = nn.Sequential(nn.Linear(3, 4), kind(4, 8, dtype=torch.float32, **options)).to(FLOAT)
    model = copy.deepcopy(plain)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    parameters, seen = [*model.parameters()], []
    model[1].register_forward_hook(lambda *_: seen.append(1))
    assert str(recurl.accelerate(model)) == f"1: torch.nn.{kind.__name__}"
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert isinstance(model[1], kind)
    x, unhooked = torch.randn(5, 3, 3, dtype=FLOAT), copy.deepcopy(plain[1])
    recurl.accelerate(unhooked)
    for net in (model, copy.deepcopy(model), nn.Sequential(model[0], pickle.loads(pickle.dumps(unhooked)))):
        with record_backends() as ran:
            found = net(x)
        assert ran
        torch.testing.assert_close(found, plain(x), rtol=1e-12, atol=1e-13)
    assert seen
    grads = [torch.autograd.grad(net(x)[0].square().sum(), [*net.parameters()]) for net in (model, plain)]
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-12)
    model(x)[0].square().sum().backward()
    optimizer.step()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(x), plain(x), rtol=1e-12, atol=1e-13)
    lengths = torch.tensor([3, 2, 2, 1, 1]) if options.get("batch_first") else torch.tensor([5, 4, 1])
    packed = pack_padded_sequence(plain[0](x), lengths, batch_first=options.get("batch_first", False))
    assert torch.equal(model[1](packed)[0].data, plain[1](packed)[0].data)
    exported = torch.export.export(model[1], (x.new_ones(5, 3, 4),)).module()
    assert torch.equal(exported(plain[0](x))[0], plain[1](plain[0](x))[0])


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 8), st.integers(1, 4), st.floats(0, 1), st.integers(0, 99))
def test_loops_with_masks_are_one_call(time: int, rows: int, rate: float, seed: int) -> None:
    torch.manual_seed(seed)
    x, done = torch.randn(time * rows, 6, dtype=FLOAT), (torch.rand(time * rows) < rate).to(FLOAT)
    for kind, state in ((CleanRL, states(rows)), (Spelled, states(rows, 1, 2)[0])):
        plain = kind().to(FLOAT)
        model = copy.deepcopy(plain)
        changes = recurl.accelerate(model)
        assert sum("loop" in what for what in changes.swapped.values()) == 1
        assert not changes.kept
        with record_backends() as ran:
            found = model(x, state, done)
        assert time == 1 or len(ran) == (2 if kind is Spelled else 1)  # one call of each layer
        torch.testing.assert_close(found, plain(x, state, done), rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(copy.deepcopy(model)(x, state, done), found)
        grads = [torch.autograd.grad(net(x, state, done)[0].sum(), [*net.parameters()]) for net in (model, plain)]
        torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-11)


def test_other_loops_stay() -> None:
    model = Kept()
    kept = recurl.accelerate(model).kept
    assert kept.keys() == {"other_masks", "one_state", "stacked", "last_output"}
    assert all("with resets=" in why for why in kept.values())
    assert not vars(model).keys() & kept.keys()

    def enclosed(xs: Tensor, state: States, dones: Tensor) -> Tensor:
        ys = []
        for x, d in zip(xs, dones, strict=True):
            k = (1.0 - d).view(1, -1, 1)
            y, state = model.lstm(x.unsqueeze(0), (k * state[0], k * state[1]))
            ys += [y]
        return torch.cat(ys)

    assert "enclosing function" in (without_loop(enclosed)[1] or "")


def test_what_cant_be_swapped_says_why() -> None:
    class Own(nn.LSTM):
        pass

    model = nn.ModuleDict({"elman": nn.RNN(3, 4), "own": Own(3, 4), "gru": nn.GRU(3, 4)})
    changes = recurl.accelerate(model)
    assert isinstance(changes, Accelerated)
    assert changes.swapped == {"gru": "torch.nn.GRU"}
    assert "use a GRU or an LSTM" in changes.kept["elman"]
    assert "a subclass" in changes.kept["own"]
    assert "elman stays as it was: torch.nn.RNN" in str(changes)
    assert recurl.accelerate(model).swapped == {"gru": "swapped before"}
    with pytest.raises(ArgumentError, match=r"Nothing to accelerate: the model has no torch\.nn\.LSTM or GRU\."):
        recurl.accelerate(nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match=r"Nothing to accelerate: the model stays as it was: Own is a subclass"):
        recurl.accelerate(Own(3, 4))


@pytest.mark.slow
@pytest.mark.parametrize("lstms", [{}, {"shared_lstm": True, "enable_critic_lstm": False}], ids=["two", "shared"])
def test_sb3_contrib_learns_the_same(lstms: dict[str, bool]) -> None:
    sb3_contrib = pytest.importorskip("sb3_contrib")
    learned = []
    for swap in (False, True):
        options = {"n_steps": 32, "batch_size": 16, "n_epochs": 2, "seed": 0, "device": "cpu"}
        algorithm = sb3_contrib.RecurrentPPO(
            "MlpLstmPolicy", "CartPole-v1", policy_kwargs={"lstm_hidden_size": 8, **lstms}, **options
        )
        if swap:
            with pytest.raises(ArgumentTypeError, match=r"got RecurrentPPO\. Pass its module, such as \.policy"):
                recurl.accelerate(algorithm)
            assert recurl.accelerate(algorithm.policy).swapped["_process_sequence"].startswith("a loop")
        algorithm.learn(96)
        learned.append([parameter.detach() for parameter in algorithm.policy.parameters()])
    torch.testing.assert_close(*learned, rtol=1e-4, atol=1e-6)


def test_rsl_rl() -> None:
    rnn = pytest.importorskip("rsl_rl.modules.rnn")
    plain = rnn.RNN(3, 8, 2, "gru").to(FLOAT)
    model = copy.deepcopy(plain)
    assert recurl.accelerate(model).swapped == {"rnn": "torch.nn.GRU"}
    x, masks = torch.randn(5, 4, 3, dtype=FLOAT), torch.ones(5, 4, dtype=torch.bool)
    start = torch.randn(2, 4, 8, dtype=FLOAT)
    torch.testing.assert_close(model(x, masks, start), plain(x, masks, start), rtol=1e-12, atol=1e-13)
    for _ in range(3):
        torch.testing.assert_close(model(x[0]), plain(x[0]), rtol=1e-12, atol=1e-13)
        for net in (model, plain):
            net.reset(torch.tensor([0, 1, 0, 1]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["LSTMModule", "GRUModule"])
def test_torchrl(name: str) -> None:
    peer = pytest.importorskip("torchrl.modules")
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule, TensorDictSequential

    lstm = name == "LSTMModule"
    keys = ["h", "c"][: 1 + lstm]
    memory = getattr(peer, name)(
        input_size=3, hidden_size=8, in_keys=["x", *keys], out_keys=["y", *(("next", key) for key in keys)]
    )
    plain = TensorDictSequential(memory, TensorDictModule(nn.Linear(8, 2), in_keys=["y"], out_keys=["z"])).double()
    model = copy.deepcopy(plain)
    before = [*model.parameters()]
    assert recurl.accelerate(model).swapped == {"module.0": f"TorchRL's {name}"}
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    assert model.state_dict().keys() == plain.state_dict().keys()
    is_init = torch.rand(4, 6, 1) < 0.3
    is_init[:, 0] = True
    batch = TensorDict({"x": torch.randn(4, 6, 3, dtype=FLOAT), "is_init": is_init}, [4, 6])
    with peer.set_recurrent_mode(True):
        torch.testing.assert_close(model(batch.clone())["z"], plain(batch.clone())["z"], rtol=1e-11, atol=1e-12)
    step = batch[:, 0]
    torch.testing.assert_close(model(step.clone())["z"], plain(step.clone())["z"], rtol=1e-11, atol=1e-12)
    alone = recurl.accelerate(getattr(peer, name)(input_size=3, hidden_size=8, in_key="x", out_key="y"))
    assert alone.swapped == {name[:-6].lower(): f"torch.nn.{name[:-6]}"}
    assert "put it into a container" in alone.kept["the model"]

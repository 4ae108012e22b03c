"""Models of other libraries give the same results on recurl's backends."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import inspect
import linecache
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
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
from recurl.nn.rewriting import rewritten
from recurl.nn.swapped import swap_layer
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


BEFORE = {
    CleanRL: type("Before", (CleanRL,), {"get_states": CleanRL.get_states}),
    Spelled: type("Before", (Spelled,), {"forward": Spelled.forward}),
}
"""Classes that keep their loops."""
KEEP, STEP = "k = (1.0 - d).view(1, -1, 1)", "y, state = self.lstm(x.unsqueeze(0), (k * state[0], k * state[1]))"
LOOP = f"""def run(self, xs, state, dones, flag=True):
    ys = []
    for x, d in zip(xs, dones):
        {KEEP}
        {STEP}
        ys += [y]
    return torch.cat(ys), state
"""
PARTS = """def run(self, x, state, ended, other=None, flag=True):
    h, c = state
    if flag:
        ys = []
        cuts = [0] + (ended[:, :-1].any(0).nonzero()[:, 0] + 1).tolist() + [x.shape[1]]
        for i in range(len(cuts) - 1):
            i0, i1 = cuts[i], cuts[i + 1]
            y, (h, c) = self.lstm(x[:, i0:i1, :], (h, c))
            h[:, ended[:, i1 - 1], :] = 0
            c[:, ended[:, i1 - 1], :] = 0
            ys.append(y)
        y = torch.cat(ys, dim=1)
    else:
        y, (h, c) = self.lstm(x, (h, c))
    return y, (h, c)
"""
OTHERS = {
    "encodes": LOOP.replace(KEEP, f"x = self.enc(x)\n        {KEEP}"),
    "turns flags": LOOP.replace(KEEP, f"d = 1.0 - d\n        {KEEP}"),
    "detaches": LOOP.replace(KEEP, f"state = (state[0].detach(), state[1].detach())\n        {KEEP}"),
    "other masks": LOOP.replace("(1.0 - d)", "d"),
    "one state": LOOP.replace("k * state[1]", "state[1]"),
    "twice the first": LOOP.replace("k * state[1]", "k * state[0]"),
    "stacks": LOOP.replace("cat(ys)", "stack(ys)"),
    "other dimension": LOOP.replace("cat(ys)", "cat(ys, 1)"),
    "last output": LOOP.replace("return torch.cat(ys)", "return torch.cat(ys) + y"),
    "reads the list": LOOP.replace("return torch.cat(ys)", "n = len(ys)\n    return torch.cat(ys) * n"),
    "not empty": LOOP.replace("ys = []", "ys = [state[0]]"),
    "alias": LOOP.replace("ys = []", "every = ys = []"),
    "aliased": LOOP.replace("ys = []", "ys = []\n    every = ys").replace("cat(ys)", "cat(ys) * len(every)"),
    "attribute": LOOP.replace("ys", "self.ys"),
    "own cat": LOOP.replace("torch.cat(ys)", "self.concat(ys)"),
    "conditional": LOOP.replace("return torch.cat(ys)", "if flag: y = torch.cat(ys)\n    return y"),
    "nested": LOOP.replace("    for x", "    while flag:\n      for x"),
    "breaks": LOOP.replace("ys += [y]", "ys += [y]\n        if flag: break"),
    "in reverse": LOOP.replace("zip(xs, dones)", "reversed(list(zip(xs, dones)))"),
    "private": LOOP.replace("self.lstm", "self.__lstm"),
    "inner function": LOOP.replace("ys = []", "ys = []\n    last = lambda: y"),
    "decorated": "@torch.no_grad()\n" + LOOP,
    "global": LOOP.replace("    ys = []", "    global y\n    ys = []"),
    "adds to the last output": LOOP.replace("return torch.cat(ys)", "y += 1\n    return torch.cat(ys)"),
    "last output if": LOOP.replace("return torch.cat(ys)", "if flag: y = xs\n    return torch.cat(ys) + y"),
    "unknown cuts": PARTS.replace("len(cuts) - 1", "len(cuts)"),
    "overlapping parts": PARTS.replace("cuts[i + 1]", "cuts[i + 1] + 1"),
    "parts of more": PARTS.replace("x[:, i0:i1, :]", "x[:, i0:i1, 1:]"),
    "keeps c": PARTS.replace("c[:, ended[:, i1 - 1], :] = 0", "h[:, ended[:, i1 - 1], :] = 0"),
    "zeroes one": PARTS.replace("            c[:, ended[:, i1 - 1], :] = 0\n", ""),
    "other flags": PARTS.replace("c[:, ended[:, i1 - 1]", "c[:, other[:, i1 - 1]"),
    "flags of the next step": PARTS.replace("i1 - 1", "i1"),
    "sets to one": PARTS.replace("] = 0", "] = 1"),
    "turns states": PARTS.replace("(h, c))", "(c, h))"),
    "joins the first dimension": PARTS.replace("dim=1", "dim=0"),
    "reads the last part": PARTS.replace("return y", "return y, i0"),
    "of an attribute": PARTS.replace("x[", "self.x["),
}


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
        model, plain = kind().to(FLOAT), BEFORE[kind]().to(FLOAT)
        plain.load_state_dict(model.state_dict())
        changes = recurl.accelerate(model)
        assert {"forward" if kind is Spelled else "get_states"} <= changes.swapped.keys()
        assert not changes.kept
        with record_backends() as ran:
            found = model(x, state, done)
        assert time == 1 or len(ran) == (2 if kind is Spelled else 1)  # one call of each layer
        torch.testing.assert_close(found, plain(x, state, done), rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(copy.deepcopy(model)(x, state, done), found)
        grads = [torch.autograd.grad(net(x, state, done)[0].sum(), [*net.parameters()]) for net in (model, plain)]
        torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-11)


def written(source: str, folder: Path) -> Callable[..., Any]:
    """Return a function that is written in a file."""
    path = folder / f"written_{len(sys.modules)}.py"
    path.write_text(f"import torch\n{source}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.run


@pytest.mark.parametrize("name", OTHERS)
def test_other_loops_stay(name: str, tmp_path: Path) -> None:
    made, why = rewritten(written(OTHERS[name], tmp_path))
    assert made is None
    assert why is not None or name == "decorated"


@pytest.mark.parametrize("layer", ["self.lstm", "self.parts['lstm']", "self.layers[0]"])
def test_loops_over_a_layer_in_any_form_are_reported(layer: str, tmp_path: Path) -> None:
    source = f"""def run(self, xs, state, dones):
    ys = []
    for t in range(len(xs)):
        h, c = (one.masked_fill(dones[t].bool()[None, :, None], 0) for one in state)
        y, state = {layer}(xs[t][None], (h, c))
        ys.append(y)
    return torch.cat(ys), state
"""
    made, why = rewritten(written(source, tmp_path), ["self.lstm", "self.parts.lstm", "self.layers.0"])
    assert made is None
    assert "it steps a layer in a loop in another form: call the layer on whole sequences" in (why or "")
    once = source.replace("for t in range(len(xs))", "if (t := 0) == 0")
    assert rewritten(written(once, tmp_path), ["self.lstm", "self.parts.lstm", "self.layers.0"])[1] is None


def test_a_model_with_another_loop_says_so() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 8)

        def forward(self, xs: Tensor, state: States) -> Tensor:
            for t in range(len(xs)):
                _, state = self.lstm(xs[t][None], state)
            return state[0]

    assert recurl.accelerate(Steps()).kept["forward"].startswith("it steps a layer in a loop in another form")


def test_loops_inside_of_branches(tmp_path: Path) -> None:
    source = LOOP.replace("\n    ", "\n        ").replace("flag=True):\n", "flag=True):\n    y = 0\n    if flag:\n")
    for text in (
        source,
        source.replace("return torch.cat(ys), state", "y = torch.cat(ys)\n    return y, state"),
        PARTS,
    ):
        made, what = rewritten(written(text, tmp_path))
        assert made is not None
        assert "now one call with resets" in (what or "")


def test_a_file_that_has_changed_is_not_compiled_again(tmp_path: Path) -> None:
    function = written(LOOP, tmp_path)
    assert rewritten(function)[0] is not None
    path = Path(function.__code__.co_filename)
    path.write_text(path.read_text().replace("cat(ys)", "cat(ys) * 100"))
    linecache.clearcache()
    assert "has the file changed?" in (rewritten(function)[1] or "")


def test_a_rewritten_method_is_the_same_function(tmp_path: Path) -> None:
    source = LOOP.replace("flag=True", "*rest, scale: 'float' = 2.0, **others").replace("cat(ys)", "cat(ys) * scale")
    made, _ = rewritten(written(source, tmp_path))
    assert made is not None
    model = nn.LSTM(3, 8)
    swap_layer(model)
    holder = SimpleNamespace(lstm=model)
    xs, state, dones = torch.randn(4, 2, 3), (torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)), torch.zeros(4, 2)
    torch.testing.assert_close(made(holder, xs, state, dones)[0], 2 * model(xs)[0])
    torch.testing.assert_close(made(holder, xs, state, dones, scale=1.0)[0], model(xs)[0])
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'dones'"):
        made(holder, xs, state)
    assert inspect.signature(made).parameters["scale"].default == 2.0


def test_what_a_loop_accepts_is_stepped() -> None:
    model = CleanRL().to(FLOAT)
    plain = BEFORE[CleanRL]().to(FLOAT)
    plain.load_state_dict(model.state_dict())
    recurl.accelerate(model)
    x, state = torch.randn(12, 6, dtype=FLOAT), states(3)
    for done in (torch.full((12,), 0.5, dtype=FLOAT), torch.rand(12, dtype=FLOAT).requires_grad_()):
        torch.testing.assert_close(model(x, state, done), plain(x, state, done), rtol=1e-11, atol=1e-12)
    done, seen = torch.zeros(12, dtype=FLOAT), []
    for net in (model, plain):
        net.lstm.register_forward_hook(lambda _, given, out: (seen.append(len(given)), (out[0] * 2, out[1]))[1])
    torch.testing.assert_close(model(x, state, done), plain(x, state, done), rtol=1e-11, atol=1e-12)
    assert seen == [2] * 8
    other = CleanRL().to(FLOAT)  # of the class whose loop was replaced, with its layer as it was
    plain = BEFORE[CleanRL]().to(FLOAT)
    plain.load_state_dict(other.state_dict())
    done = (torch.rand(12) < 0.3).to(FLOAT)
    assert torch.equal(other(x, state, done)[0], plain(x, state, done)[0])


def test_wrapped_calls_of_a_layer_are_as_written() -> None:
    for wrap_first in (True, False):
        model = CleanRL().to(FLOAT)
        plain = BEFORE[CleanRL]().to(FLOAT)
        plain.load_state_dict(model.state_dict())
        given, done, found = (torch.randn(12, 6, dtype=FLOAT), states(3)), (torch.rand(12) < 0.3).to(FLOAT), []
        for net in (model, plain):
            if net is model and not wrap_first:
                recurl.accelerate(net)

            def twice(x: Tensor, state: States, run: Any = net.lstm.forward) -> tuple[Tensor, States]:
                return run(x, run(x, state)[1])  # steps each input two times

            net.lstm.forward = twice
            if net is model and wrap_first:
                with pytest.raises(ArgumentError, match="its forward has been replaced by an attribute of the object"):
                    recurl.accelerate(net)
            found.append(net(*given, done))
        torch.testing.assert_close(*found, rtol=1e-11, atol=1e-12)


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
    with pytest.raises(ArgumentTypeError, match=r"accelerate needs a torch\.nn\.Module, got int\.$"):
        recurl.accelerate(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match=r"Nothing to accelerate: the model has no torch\.nn\.LSTM or GRU\."):
        recurl.accelerate(nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match=r"Nothing to accelerate: the model stays as it was: Own is a subclass"):
        recurl.accelerate(Own(3, 4))


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*:UserWarning:torch.ao")
def test_quantized_layers() -> None:
    quantize: Any = torch.ao.quantization.quantize_dynamic
    plain, x = nn.Sequential(nn.LSTM(3, 8)), torch.randn(5, 2, 3)
    model = copy.deepcopy(plain)
    recurl.accelerate(model)
    torch.testing.assert_close(quantize(model, {nn.LSTM})(x), plain(x))  # found by class, so left as it is
    model[0].__class__ = nn.LSTM
    assert torch.equal(quantize(model, {nn.LSTM})(x)[0], quantize(plain, {nn.LSTM})(x)[0])
    with pytest.raises(ArgumentError, match="0 stays as it was: its weights are quantized"):
        recurl.accelerate(quantize(plain, {nn.LSTM}))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_relatives_of_the_layers_say_why() -> None:
    scripted = nn.ModuleList([torch.jit.script(nn.GRU(3, 4)), torch.jit.script(nn.Linear(3, 4))])
    with pytest.raises(ArgumentError, match=r": 0 stays as it was: it is compiled by torch\.jit: .* before\.$"):
        recurl.accelerate(scripted)
    with pytest.raises(ArgumentError, match=r"the model stays as it was: LSTMCell takes single steps: run torch.nn's"):
        recurl.accelerate(nn.LSTMCell(3, 4))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_layers_in_the_ways_that_they_are_used() -> None:
    plain = nn.LSTM(3, 8)
    model = copy.deepcopy(plain)
    recurl.accelerate(nn.Sequential(model))
    x = torch.randn(5, 2, 3)
    for time in (1, 5):
        results = []
        for net in (model, plain):
            output, (h, c) = net(x[:time])
            output.view(time * 2, 8), h.view(-1), c.view(2, -1)
            before = output.detach().clone()
            h[:, 0] = 0.0  # as rsl_rl resets
            assert torch.equal(output, before)
            assert h.untyped_storage().nbytes() == h.nbytes
            results.append(torch.autograd.grad(output.relu().sum() + h.sum(), [*net.parameters()]))
        torch.testing.assert_close(*results)
    for net in (model, plain):
        net.recurrent_backend = "loop"
        net.zero_grad()
        given = x.double().requires_grad_()
        (grad,) = torch.autograd.grad(net.double()(given)[0].square().sum(), given, create_graph=True)
        grad.square().sum().backward()
    torch.testing.assert_close(model.weight_hh_l0.grad, plain.weight_hh_l0.grad)
    for norm in (torch.nn.utils.weight_norm, torch.nn.utils.parametrizations.weight_norm):
        model, plain = (norm(nn.LSTM(3, 8), "weight_hh_l0") for _ in range(2))
        model.load_state_dict(plain.state_dict())
        with contextlib.suppress(ArgumentError):  # a parametrized class is refused
            recurl.accelerate(model)
        for net in (model, plain):
            with torch.no_grad():
                net(x)
                for parameter in net.parameters():
                    parameter.mul_(1.5)
        torch.testing.assert_close(model(x), plain(x))


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
            assert "_process_sequence" in recurl.accelerate(algorithm.policy).swapped
            pickle.loads(pickle.dumps(algorithm.policy))
        algorithm.learn(96)
        learned.append([parameter.detach() for parameter in algorithm.policy.parameters()])
    torch.testing.assert_close(*learned, rtol=1e-4, atol=1e-6)


def test_layers_in_plain_lists_are_reported() -> None:
    model = nn.Module()
    model.memory, shared = nn.GRU(3, 4), nn.Linear(3, 4)
    model.several, model.named = [shared, nn.LSTM(3, 4)], {"critic": nn.Sequential(nn.GRU(3, 4))}
    model.head, model.alias = shared, (model.memory,)
    done = recurl.accelerate(model)
    assert done.swapped == {"memory": "torch.nn.GRU"}
    assert done.kept == {
        "several[1]": "a list hides it from torch: use a torch.nn.ModuleList",
        "named['critic']": "a dict hides it from torch: use a torch.nn.ModuleDict",
    }
    del model.memory
    with pytest.raises(ArgumentError, match=r"Nothing to accelerate: several\[1\] stays as it was: a list hides it"):
        recurl.accelerate(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_bidirectional_modules_of_torchrl_stay_as_they_were() -> None:
    peer = pytest.importorskip("torchrl.modules")
    from tensordict import TensorDict

    layer = nn.LSTM(3, 4, bidirectional=True, batch_first=True)
    memory = peer.LSTMModule(lstm=layer, in_keys=["x", "h", "c"], out_keys=["y", ("next", "h"), ("next", "c")])
    model = nn.Sequential(memory)
    done = recurl.accelerate(model)
    assert model[0] is memory
    assert "it is bidirectional" in done.kept["0"]
    assert done.swapped == {"0.lstm": "torch.nn.LSTM"}
    model[0](TensorDict({"x": torch.randn(2, 3), "is_init": torch.zeros(2, 1, dtype=torch.bool)}, [2]))


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
    assert recurl.accelerate(model).swapped == {"module.0": "swapped before"}
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    assert model.state_dict().keys() == plain.state_dict().keys()
    is_init = torch.rand(4, 6, 1) < 0.3
    is_init[:, 0] = True
    batch = TensorDict({"x": torch.randn(4, 6, 3, dtype=FLOAT), "is_init": is_init}, [4, 6])
    with peer.set_recurrent_mode(True):
        torch.testing.assert_close(model(batch.clone())["z"], plain(batch.clone())["z"], rtol=1e-11, atol=1e-12)
    hooked = copy.deepcopy(plain)
    sizes = {"input_size": 3, "hidden_size": 8, "in_key": "x", "out_key": "y"}
    always = TensorDictSequential(getattr(peer, name)(**sizes, default_recurrent_mode=True)).double()
    hooked[0].register_forward_hook(lambda *_: None)
    assert "hooks" in recurl.accelerate(hooked).kept["module.0"]
    before = always(batch.clone())["y"]
    with peer.set_recurrent_mode(False):
        assert "outside of set_recurrent_mode" in recurl.accelerate(copy.deepcopy(always)).kept["module.0"]
    recurl.accelerate(always)
    torch.testing.assert_close(always(batch.clone())["y"], before)
    step = batch[:, 0]
    torch.testing.assert_close(model(step.clone())["z"], plain(step.clone())["z"], rtol=1e-11, atol=1e-12)
    alone = recurl.accelerate(getattr(peer, name)(**sizes))
    assert alone.swapped == {name[:-6].lower(): f"torch.nn.{name[:-6]}"}
    assert "put it into a container" in alone.kept["the model"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_next_values_of_torchrls_losses_begin_with_the_state_after_the_first_step() -> None:
    peer, objectives = pytest.importorskip("torchrl.modules"), pytest.importorskip("torchrl.objectives")
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule, TensorDictSequential

    memory = peer.GRUModule(input_size=3, hidden_size=8, in_keys=["x", "h"], out_keys=["y", ("next", "h")])
    net = TensorDictSequential(
        memory, TensorDictModule(nn.Linear(8, 2), ["y"], ["action_value"]), peer.QValueModule("one-hot")
    )
    gru, head = memory.gru, net[1].module
    time, flags = 5, {"is_init": torch.zeros(1, 5, 1, dtype=torch.bool)}
    after = {"x": torch.randn(1, time, 3), "h": torch.randn(1, time, 1, 8), "reward": torch.zeros(1, time, 1), **flags}
    after |= {"done": flags["is_init"], "terminated": flags["is_init"]}
    batch = TensorDict({"x": torch.randn(1, time, 3), "h": torch.randn(1, time, 1, 8), "next": after, **flags}, [1, 5])
    batch["action"] = nn.functional.one_hot(torch.randint(2, (1, time)), 2)
    after_first = gru(batch["x"][:, :1], batch["h"][:, 0])[1]
    chosen = (head(gru(batch["x"], batch["h"][:, 0])[0]) * batch["action"]).sum(-1)

    def loss_from(state: Tensor) -> Tensor:
        later = head(gru(batch["next", "x"], state)[0]).max(-1).values
        return (chosen - 0.9 * later).square().mean()

    for first in (torch.zeros(1, 1, 8), after_first):  # TorchRL's modules, recurl's
        loss = objectives.DQNLoss(net, action_space="one-hot", delay_value=False)
        loss.make_value_estimator(objectives.ValueEstimators.TD0, gamma=0.9)
        torch.testing.assert_close(loss(batch.clone())["loss"], loss_from(first))
        recurl.accelerate(net)

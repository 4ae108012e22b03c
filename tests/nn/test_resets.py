"""Resets inside sequences, compared with separate calls for every episode."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from dataclasses import fields
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode

import recurl.nn
from recurl import recurrence
from recurl.core.errors import ArgumentError, ArgumentTypeError
from recurl.nn import GRU, LSTM, CellNet, MemoryNet, RecurrentNet
from recurl.recurrence import CELLS

OPTIONS = {"gtrxl": "(window=3)"}
FLOAT = torch.float64


def net_of(name: str, **options: Any) -> RecurrentNet:
    kinds = {"lstm": LSTM, "gru": GRU}
    made = kinds[name](3, 8, 2, dtype=FLOAT, **options) if name in kinds else None
    return made or CellNet(f"{name}{OPTIONS.get(name, '')}", 3, 8, 2, dtype=FLOAT, **options)


def tuple_of(states: Any) -> tuple[Tensor, ...]:
    return (states,) if isinstance(states, Tensor) else tuple(states)


def given_to(net: RecurrentNet, states: tuple[Tensor, ...]) -> Any:
    return states[0] if isinstance(net, GRU) else states


def states_for(net: RecurrentNet, rows: int) -> tuple[Tensor, ...]:
    """Return states that the network reaches, as no other may be valid."""
    with torch.no_grad():
        sequence = (2, rows) if not net.batch_first else (rows, 2)
        return tuple_of(net(torch.randn(*sequence, 3, dtype=FLOAT))[1])


def by_episodes(net: Any, x: Tensor, states: tuple[Tensor, ...] | None, resets: Tensor) -> tuple[Tensor, ...]:
    """Run each episode of each row, ``[T, B, I]``, by a call of its own."""
    features, finals = [], []
    for row in range(x.shape[1]):
        parts, final = [], None if states is None else tuple(state[:, row : row + 1] for state in states)
        begins = [0, *(n for n in range(1, x.shape[0]) if resets[n, row]), x.shape[0]]
        for first, last in pairwise(begins):
            before = None if resets[first, row] or final is None else given_to(net, final)
            output, after = net(x[first:last, row : row + 1], before)
            parts.append(output)
            final = tuple_of(after)
        features.append(torch.cat(parts))
        finals.append(final)
    return torch.cat(features, 1), *(torch.cat(part, 1) for part in zip(*finals, strict=True))


@pytest.mark.parametrize("with_states", [False, True])
@pytest.mark.parametrize("cell", [*CELLS])
def test_resets_are_separate_calls(cell: str, with_states: bool) -> None:
    net = net_of(cell)
    x = torch.randn(7, 4, 3, dtype=FLOAT, requires_grad=True)
    resets = torch.rand(7, 4) < 0.3
    resets[0] = torch.tensor([True, False, False, False])
    states = states_for(net, 4) if with_states else None
    results, inputs = [], [x, *net.parameters()]
    for run in (lambda: net(x, None if states is None else given_to(net, states), resets), None):
        found = by_episodes(net, x, states, resets) if run is None else (run()[0], *tuple_of(run()[1]))
        loss = sum(one.square().sum() for one in found)
        results.append((found, torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("cell", [*CELLS])
def test_steps_are_sequences(cell: str) -> None:
    net, x, resets = net_of(cell), torch.randn(6, 4, 3, dtype=FLOAT), torch.rand(6, 4) < 0.3
    states = given_to(net, states_for(net, 4))
    with torch.no_grad():
        features, final = net(x, states, resets)
        for n in range(6):
            output, states = net(x[n : n + 1], states, resets[n : n + 1])
            torch.testing.assert_close(output[0], features[n], rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(tuple_of(states), tuple_of(final), rtol=1e-10, atol=1e-11)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 4), st.floats(0, 1), st.booleans(), st.booleans(), st.integers(0, 99))
def test_torch_nn_by_episodes(time: int, rows: int, rate: float, lstm: bool, batch_first: bool, seed: int) -> None:
    torch.manual_seed(seed)
    ours, theirs = (LSTM, nn.LSTM) if lstm else (GRU, nn.GRU)
    net, like = ours(3, 5, 2, batch_first=batch_first, dtype=FLOAT), theirs(3, 5, 2, dtype=FLOAT)
    like.load_state_dict(net.state_dict())
    x, resets = torch.randn(time, rows, 3, dtype=FLOAT), torch.rand(time, rows) < rate
    states = tuple(torch.randn(2, rows, 5, dtype=FLOAT) for _ in range(1 + lstm))
    read = tuple(torch.where(resets[0][:, None], torch.nan, state) for state in states)  # not where an episode begins
    turned = (x.transpose(0, 1), resets.transpose(0, 1)) if batch_first else (x, resets)
    features, final = net(turned[0], read if lstm else read[0], turned[1])
    like.batch_first = False
    expected = by_episodes(_AsOurs(like, lstm), x, states, resets)
    found = (features.transpose(0, 1) if batch_first else features, *tuple_of(final))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


class _AsOurs:
    """A torch.nn module that takes one state by itself."""

    def __init__(self, module: nn.Module, lstm: bool) -> None:
        self.module, self.lstm = module, lstm

    def __call__(self, x: Tensor, states: Any) -> Any:
        return self.module(x, states if states is None or self.lstm else states[0])


def test_bidirectional_episodes_stand_alone() -> None:
    net = LSTM(3, 4, bidirectional=True, dtype=FLOAT)
    x, resets = torch.randn(6, 2, 3, dtype=FLOAT), torch.zeros(6, 2, dtype=torch.bool)
    resets[4, 1] = resets[2, 0] = True
    features, (h, _) = net(x, resets=resets)
    for row, first in ((0, 2), (1, 4)):
        for part in (slice(first), slice(first, None)):
            alone, (last, _) = net(x[part, row])
            torch.testing.assert_close(features[part, row], alone)
        torch.testing.assert_close(h[:, row], last)
    states = tuple(torch.zeros(2, 2, 4, dtype=FLOAT) for _ in range(2))
    with pytest.raises(ArgumentError, match="leave out the states, or the resets"):
        net(x, states, resets)


def test_one_row_without_a_batch() -> None:
    net, x, resets = GRU(3, 4), torch.randn(5, 3), torch.tensor([False, False, True, False, False])
    h = torch.randn(1, 4)
    features, last = net(x, h, resets)
    torch.testing.assert_close(features, torch.cat([net(x[:2], h)[0], net(x[2:])[0]]))
    torch.testing.assert_close(last, net(x[2:])[1])


def test_bad_arguments_say_what_must_hold() -> None:
    net, x = LSTM(3, 4, batch_first=True), torch.randn(2, 5, 3)
    h, c = torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)
    for resets, got in ((torch.zeros(5, 2).bool(), r"got \[5, 2\] and torch.bool"), (torch.zeros(2, 5), "float32")):
        with pytest.raises(ArgumentError, match=rf"resets must be bool and have .*\[2, 5\]; {got}|torch.float32"):
            net(x, resets=resets)
    with pytest.raises(ArgumentError, match=r"must have the shapes \[\[1, 2, 4\], \[1, 2, 4\]\].*got \[\[2, 1, 4\]"):
        net(x, (h.transpose(0, 1), c))
    with pytest.raises(ArgumentError, match=r"states \(h\) must have the shapes \[\[1, 2, 4\]\]"):
        GRU(3, 4)(torch.randn(5, 2, 3), torch.zeros(1, 3, 4))
    with pytest.raises(ArgumentTypeError, match=r"Packed sequences aren't supported\. Pad them"):
        net(pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True))
    with pytest.raises(ArgumentError, match=r"The input has dtype torch.float64 but the parameters torch.float32"):
        net(x.double())


def test_what_kernels_trust_is_checked() -> None:
    net, x, h = LSTM(3, 4), torch.randn(5, 2, 3), torch.zeros(1, 2, 4)
    meta = torch.zeros(1, 2, 4, device="meta")
    with pytest.raises(ArgumentError, match="The state h is on meta but the parameters on cpu"):
        net(x, (meta, h))
    with pytest.raises(ArgumentError, match="resets are on meta but the input on cpu"):
        net(x, None, torch.zeros(5, 2, dtype=torch.bool, device="meta"))
    with pytest.raises(ArgumentError, match=r"The state c has dtype torch\.float64 but the parameters"):
        net(x[:1], (h, h.double()))
    for wrong in (torch.zeros(16, 5), torch.zeros(16, 4, device="meta")):
        net.weight_hh_l0 = nn.Parameter(wrong)
        with pytest.raises(ArgumentError, match=r"weight_hh_l0 must have shape \[16, 4\], on cpu; got"):
            net(x)


def test_arguments_of_other_kinds() -> None:
    net, gru, x, h = LSTM(3, 4), GRU(3, 4), torch.randn(5, 2, 3), torch.zeros(1, 2, 4)
    resets = torch.zeros(5, 2, dtype=torch.bool)
    with pytest.raises(ArgumentTypeError, match="resets must be a bool tensor, got list"):
        net(x, resets=resets.tolist())
    with pytest.raises(ArgumentError, match=r"got \[2, 5\] and torch.bool. They lie as the input does"):
        net(x, resets=resets.T)
    for states in (resets, h, (h, None), iter((h, h))):
        with pytest.raises(ArgumentTypeError, match=r"a tuple of tensors \(h, c\), or None for zeros; got .*resets="):
            net(x, states)
    with pytest.raises(ArgumentTypeError, match=r"a tensor \(h\), or None"):
        gru(x, (h,))
    with pytest.raises(ArgumentTypeError, match=r"a tuple of tensors \(h,\), or None for zeros; got Tensor"):
        CellNet("s5", 3, 4)(x, h)
    with pytest.raises(ArgumentError, match=r"must have the shapes \[\[1, 4\]\] \(layers x directions, \.\.\.\)"):
        gru(x[:, 0], h)
    assert [one.shape for one in gru.all_weights[0]] == [one.shape for one in nn.GRU(3, 4).all_weights[0]]
    torch.testing.assert_close(net(x, [h, h]), net(x, (h, h)))


def test_results_are_memory_of_their_own() -> None:
    for net in (LSTM(3, 4), GRU(3, 4), CellNet("s5", 3, 4)):
        for time in (1, 5):
            for parameters in (True, False):
                net.requires_grad_(parameters)
                features, states = net(torch.randn(time, 2, 3), resets=torch.zeros(time, 2, dtype=torch.bool))
                before = features.detach().clone()
                for state in tuple_of(states):
                    state.zero_()
                    assert state.untyped_storage().nbytes() == state.nbytes
                assert torch.equal(features, before)
                if parameters:
                    torch.relu_(features).sum().backward()


def test_flags_may_be_reused_before_the_backward_pass() -> None:
    net, h = GRU(3, 4), torch.randn(1, 2, 4, requires_grad=True)
    for time in (1, 4):
        resets = torch.zeros(time, 2, dtype=torch.bool)
        features, _ = net(torch.randn(time, 2, 3), h, resets)
        resets.fill_(True)
        (grad,) = torch.autograd.grad(features.sum(), h)
        assert grad.all()


@pytest.mark.parametrize("name", sorted(set(CELLS) - {"lstm", "gru"}))
def test_memories_by_name(name: str) -> None:
    plain = CellNet(f"{name}{OPTIONS.get(name, '')}", 3, 8, 2, batch_first=True, dtype=FLOAT)
    cell: Any = plain.cell
    (kind,) = (one for one in MemoryNet.__subclasses__() if isinstance(cell, getattr(recurrence, one.cell_class)))
    assert getattr(recurl.nn, kind.__name__) is kind
    assert kind.__name__.lower() == name.replace("_", "")
    options = {one.name: getattr(cell, one.name) for one in fields(cell)}
    net = kind(3, 8, 2, batch_first=True, dtype=FLOAT, **options)
    net.load_state_dict(plain.state_dict())
    x, resets = torch.randn(2, 5, 3, dtype=FLOAT), torch.rand(2, 5) < 0.3
    for one in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert type(one) is kind
        torch.testing.assert_close(one(x, resets=resets), plain(x, resets=resets), rtol=0, atol=0)
    with pytest.raises(ArgumentError, match=rf"{kind.__name__} has no argument size; those of its cell are \w+"):
        kind(3, 8, size=3)


def test_the_text_of_a_memory() -> None:
    s5 = recurl.nn.S5(3, 8, num_layers=2, batch_first=True, state_size=4, norm=False)
    assert str(s5) == "S5(3, 8, num_layers=2, batch_first=True, state_size=4, norm=False)"
    assert str(recurl.nn.Mamba2(3, 8)) == "Mamba2(3, 8)"


def test_copies_and_former_paths() -> None:
    from recurl.modules import python_rnn

    assert python_rnn.LSTM is LSTM
    x, resets = torch.randn(5, 2, 3), torch.rand(5, 2) < 0.3
    for net in (LSTM(3, 4), CellNet("s5", 3, 4)):
        expected = net(x, resets=resets)[0]
        for copied in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            assert torch.equal(copied(x, resets=resets)[0], expected)
            copied.flatten_parameters()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.slow
def test_compiled_whole() -> None:
    net, x, resets = LSTM(3, 4), torch.randn(5, 2, 3), torch.rand(5, 2) < 0.3
    states = torch.randn(1, 2, 4), torch.randn(1, 2, 4)
    compiled = torch.compile(net, fullgraph=True)
    torch.testing.assert_close(compiled(x, states, resets), net(x, states, resets))


def test_dispatch_modes_see_the_call() -> None:
    x, resets = torch.randn(5, 2, 3, dtype=FLOAT), torch.rand(5, 2) < 0.3
    for name in ("lstm", "gru", "s5"):
        net = net_of(name)
        with TorchDispatchLog() as log:
            found = [
                net(x, resets=resets)[0],
                *torch.autograd.grad(net(x, resets=resets)[0].sum(), [*net.parameters()]),
            ]
        assert any(one.startswith("recurl::") for one in log.seen)
        features = net(x, resets=resets)[0]
        expected = [features, *torch.autograd.grad(features.sum(), [*net.parameters()])]
        torch.testing.assert_close(found, expected)


class TorchDispatchLog(TorchDispatchMode):
    """Records the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_fake_tensors() -> None:
    program = """
import torch, recurl.nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
layers = [torch.nn.LSTM(3, 4), torch.nn.GRU(3, 4, 2)]
recurl.accelerate(torch.nn.ModuleList(layers))
for net in (*layers, recurl.nn.LSTM(3, 4, bidirectional=True), recurl.nn.S5(3, 8)):
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for time in (5, 1):
        with mode:
            x = torch.randn(time, 2, 3)
            features, _ = net(x, resets=torch.zeros(time, 2, dtype=torch.bool))
        assert isinstance(features, FakeTensor) and features.shape == net(torch.randn(time, 2, 3))[0].shape
        outside, _ = net(x)
        assert isinstance(outside, FakeTensor)
        features.sum().backward()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("numpy", [True, False])
def test_torch_is_enough(numpy: bool) -> None:
    program = (
        f"""
import sys, warnings
missing = ["tensordict", "gymnasium", "tyro", "cloudpickle"] + ["numpy"] * {not numpy}
"""
        + """
class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in missing else self.finder.find_spec(name, path, target)
sys.meta_path[:] = map(Without, sys.meta_path)
warnings.simplefilter("ignore")  # torch says that NumPy is missing
import torch, recurl.nn
memories = [name for name in ("s5", "gated_deltanet", "gtrxl", "lru", "ffm") if name != "s5" or "numpy" not in missing]
for net in (recurl.nn.LSTM(3, 4), recurl.nn.GRU(3, 4), *(recurl.nn.CellNet(name, 3, 8) for name in memories)):
    features, _ = net(torch.randn(5, 2, 3), resets=torch.rand(5, 2) < 0.3)
    features.sum().backward()
    net(torch.randn(1, 2, 3))
layer = torch.nn.LSTM(3, 4)
print(recurl.accelerate(layer))
if "numpy" in missing:
    try:
        recurl.nn.S5(3, 8)
    except recurl.core.errors.MissingDependencyError as error:
        assert "pip install numpy" in str(error)
"""
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_without_resets_rows_stay_rows() -> None:
    """As one stream, matrix memories would take chunk after chunk of all rows, and could not be exported."""
    net = CellNet("mamba2(state_size=3)", 3, 4, batch_first=True)
    rows = {"input": {0: torch.export.Dim.DYNAMIC}}
    program = torch.export.export(net, (torch.randn(3, 5, 3),), dynamic_shapes=rows)
    x = torch.randn(20, 5, 3)
    torch.testing.assert_close(program.module()(x)[0], net(x)[0])

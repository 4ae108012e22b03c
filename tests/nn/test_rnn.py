from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import from_module
from torch import Tensor, nn

import recurl.nn
from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.modules import GRU, LSTM, GRUCell, GRUModule, LSTMCell, LSTMModule, set_recurrent_mode
from recurl.recurrence import record_backends

PAIRS = {"lstm": (LSTM, nn.LSTM), "gru": (GRU, nn.GRU)}


def as_tuple(states: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return states if isinstance(states, tuple) else (states,)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"num_layers": 3}, {"num_layers": 2, "bidirectional": True}], ids=str
)
@pytest.mark.parametrize("cell", PAIRS)
def test_equal_to_torch_nn(cell: str, options: dict, batch_first: bool) -> None:
    ours, torchs = (kind(4, 6, batch_first=batch_first, dtype=torch.float64, **options) for kind in PAIRS[cell])
    torchs.load_state_dict(ours.state_dict())
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in torchs.named_parameters()]
    x = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    slots = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    rows = 3 if batch_first else 5
    initial = tuple(torch.randn(slots, rows, 6, dtype=torch.float64) for _ in range(2 if cell == "lstm" else 1))
    for hx in (None, initial if cell == "lstm" else initial[0]):
        results, gradients = [], []
        for net in (ours, torchs):
            features, final = net(x, hx)
            loss = features.square().sum() + sum(state.square().sum() for state in as_tuple(final))
            gradients.append(torch.autograd.grad(loss, [x, *net.parameters()]))
            results.append((features, *as_tuple(final)))
        torch.testing.assert_close(results[0], results[1], rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("cell", PAIRS)
def test_unbatched_and_projected(cell: str) -> None:
    options = {"proj_size": 3} if cell == "lstm" else {}
    options["dtype"] = torch.float64  # in float32 torch warns that oneDNN has no projection
    ours, torchs = (kind(4, 6, 2, batch_first=True, **options) for kind in PAIRS[cell])
    torchs.load_state_dict(ours.state_dict())
    x = torch.randn(5, 4, dtype=torch.float64)
    features, final = ours(x)
    expected, expected_final = torchs(x)
    torch.testing.assert_close(features, expected)
    torch.testing.assert_close(as_tuple(final), as_tuple(expected_final))
    initial = as_tuple(expected_final)
    hx = initial if cell == "lstm" else initial[0]
    torch.testing.assert_close(ours(x, hx)[0], torchs(x, hx)[0])


def test_dropout_only_in_training() -> None:
    net = LSTM(4, 6, 2, dropout=0.5)
    x = torch.randn(3, 5, 4)
    assert not torch.equal(net(x)[0], net(x)[0])
    net.eval()
    assert torch.equal(net(x)[0], net(x)[0])


def test_inputs_of_other_shapes_are_refused() -> None:
    for x in (torch.randn(4), torch.randn(2, 5, 3), torch.randn(1, 2, 5, 4)):
        with pytest.raises(ValueError, match=r"must have 2 dimensions.*end in input_size=4; got shape"):
            GRU(4, 6)(x)


@pytest.mark.parametrize("cell", PAIRS)
def test_positional_arguments_are_those_of_torch_nn(cell: str) -> None:
    for kind in PAIRS[cell]:
        net = kind(4, 6, 1, True, True, 0.0, False, 0, "meta", torch.float64)
        assert (net.batch_first, net.weight_ih_l0.device.type, net.weight_ih_l0.dtype) == (True, "meta", torch.float64)


@pytest.mark.parametrize("cell", ["lstm", "gru", "slstm", "s5", "gtrxl(window=4)", "gated_deltanet", "mlstm"])
def test_shapes_on_meta(cell: str) -> None:
    flags = torch.zeros(5, 3, dtype=torch.bool)
    results = []
    for device in ("cpu", "meta"):
        net = recurl.nn.CellNet(cell, 4, 8, num_layers=2, device=device)
        x = torch.zeros(5, 3, 4, device=device, requires_grad=True)
        for resets in (None, flags.to(device)):
            features, states = net(x, None, resets)
            step, _ = net(x[:1], states)
            features.sum().backward()
            results.append([tensor.shape for tensor in (features, step, *states, x.grad)])
            assert {tensor.device.type for tensor in (features, step, *states, x.grad)} == {device}
    assert results[:2] == results[2:]


@pytest.mark.parametrize("bias", [True, False])
def test_cells_equal_torch_nn(bias: bool) -> None:
    for ours, torchs in (
        (LSTMCell(4, 6, bias=bias), nn.LSTMCell(4, 6, bias=bias)),
        (GRUCell(4, 6, bias), nn.GRUCell(4, 6, bias)),
    ):
        torchs.load_state_dict(ours.state_dict())
        x, h, c = torch.randn(3, 4), torch.randn(3, 6), torch.randn(3, 6)
        hx = (h, c) if isinstance(ours, LSTMCell) else h
        for states in (None, hx):
            torch.testing.assert_close(as_tuple(ours(x, states)), as_tuple(torchs(x, states)))
        torch.testing.assert_close(as_tuple(ours(x[0])), as_tuple(torchs(x[0])))


@pytest.mark.parametrize("cell", PAIRS)
def test_no_parameters_of_its_own_in_the_first_call(cell: str) -> None:
    ours, torchs = (kind(4, 4, bias=False, batch_first=True, dtype=torch.float64) for kind in PAIRS[cell])
    torchs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    fresh, weights = PAIRS[cell][0](4, 4, bias=False, dtype=torch.float64), from_module(ours)
    with weights.data.to_module(fresh, preserve_module_state=False):  # as TorchRL's losses and advantages do
        torch.testing.assert_close(fresh(x), torchs(x))
    for name in dict(ours.named_parameters()):
        nn.utils.parametrizations.weight_norm(ours, name)
    torch.testing.assert_close(ours(x), torchs(x))


@pytest.mark.parametrize("kind", [LSTMModule, GRUModule])
def test_python_based_switches_kernels_not_results(kind: type) -> None:
    module = kind(3, 5, 2, in_key="x", out_key="y", dropout=0.1).eval()
    parameters = {id(parameter) for parameter in module.parameters()}
    inputs = {"x": torch.randn(4, 7, 3), "is_init": torch.rand(4, 7) < 0.3}
    step = {"x": torch.randn(4, 3), "is_init": torch.zeros(4, dtype=torch.bool)}
    results = []
    for switch, backend in ((module.make_cudnn_based, "pad"), (module.make_python_based, "loop")):
        assert switch() is module
        with record_backends() as ran, set_recurrent_mode(True):
            features = module(**inputs)[0]
        assert set(ran) == {backend}
        results.append((features, module(**step)[0]))
        assert not module.training
        assert not module.net.training
        assert {id(parameter) for parameter in module.parameters()} == parameters
    torch.testing.assert_close(results[0], results[1])
    assert kind(3, 5, in_key="x", out_key="y", python_based=True).net.python_based


@pytest.mark.parametrize("kind", [LSTMModule, GRUModule])
def test_python_based_and_bidirectional_exclude_each_other(kind: type) -> None:
    with pytest.raises(ValueError, match="can't be combined with bidirectional"):
        kind(3, 5, in_key="x", out_key="y", python_based=True, bidirectional=True)
    module = kind(3, 5, in_key="x", out_key="y", bidirectional=True)
    for switch in (module.make_python_based, module.make_cudnn_based):
        with pytest.raises(NotImplementedError, match="no implementation in Python"):
            switch()


def test_modules_wrap_networks_of_torch_and_of_recurl() -> None:
    for kind in (nn.LSTM, recurl.nn.LSTM, LSTM):
        net = kind(3, 5, batch_first=True)
        module = LSTMModule(in_key="x", out_key="y", lstm=net)
        assert {id(one) for one in module.parameters()} == {id(one) for one in net.parameters()}
        with pytest.raises(TypeError, match=r"must be a torch\.nn\.GRU, got LSTM"):
            GRUModule(in_key="x", out_key="y", gru=net)  # pyright: ignore[reportArgumentType]


def test_cells_refuse_states_that_would_broadcast() -> None:
    for cell, states in ((LSTMCell(4, 6), "h and c, each"), (GRUCell(4, 6), "h,")):
        for shape in ([6], [1, 6], [3, 1]):
            hx = torch.zeros(shape)
            with pytest.raises(ArgumentError, match=rf"must be {states} of shape \[3, 6\] for this input; got \["):
                cell(torch.zeros(3, 4), (hx, hx) if isinstance(cell, LSTMCell) else hx)
        for hx, found in (((torch.zeros(3, 6),), "tuple" if isinstance(cell, GRUCell) else r"\[3, 6\]"), (1, "int")):
            with pytest.raises(ArgumentError, match=f"for this input; got {found}"):
                cell(torch.zeros(3, 4), hx)
        with pytest.raises(ArgumentError, match=r"\[B, I\] or \[I\] with input_size=4; got shape \[2, 3, 4\]"):
            cell(torch.zeros(2, 3, 4))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of torch.nn's layers
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
def test_torchscript_gets_the_layers_of_torch() -> None:
    x, resets = torch.randn(5, 2, 4), torch.zeros(5, 2, dtype=torch.bool)

    class Model(nn.Module):
        def __init__(self, memory: nn.Module) -> None:
            super().__init__()
            self.memory = memory

        def forward(self, x: Tensor) -> Tensor:
            return self.memory(x)[0]

    for net in (
        recurl.nn.LSTM(4, 6, 2),
        recurl.nn.GRU(4, 6, bidirectional=True),
        recurl.nn.LSTM(4, 6, proj_size=3, bias=False),
    ):
        model = Model(net)
        traced = torch.jit.trace(model, (x,))
        assert [name for name, _ in traced.named_parameters()] == [name for name, _ in model.named_parameters()]
        longer = torch.randn(7, 3, 4)
        for compiled in (traced, torch.jit.script(model)):
            torch.testing.assert_close(compiled(longer), model(longer))
    with pytest.raises(UnsupportedError, match=r"can't record resets: use torch\.export"):
        torch.jit.trace(lambda x: recurl.nn.LSTM(4, 6)(x, resets=resets)[0], (x,))
    with pytest.raises(UnsupportedError, match=r"runs the cell s5, which torch\.nn doesn't have\. Use torch\.export"):
        torch.jit.trace(recurl.nn.CellNet("s5", 4, 6), (x,))
    with pytest.raises(UnsupportedError, match=r"can't compile a CellNet"):
        torch.jit.script(Model(recurl.nn.CellNet("gru", 4, 6)))
    hooked = recurl.nn.LSTM(4, 6)
    hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match=r"this one has hooks"):
        torch.jit.script(Model(hooked))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_onnx_gets_its_own_operators(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    for net in (recurl.nn.LSTM(4, 6, 2).eval(), recurl.nn.GRU(4, 6, batch_first=True).eval()):
        x = torch.randn(5, 3, 4)
        torch.onnx.export(net, (x,), tmp_path / "net.onnx", dynamo=True, verbose=False)
        session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"))
        found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        features, final = net(x)
        for one, other in zip(found, (features, *as_tuple(final)), strict=True):
            torch.testing.assert_close(torch.from_numpy(one), other.detach(), rtol=1e-5, atol=1e-5)


def test_the_text_of_a_network() -> None:
    for kind, options in (("LSTM", {"num_layers": 2, "batch_first": True, "proj_size": 3}), ("GRU", {"bias": False})):
        mine, torchs = (getattr(module, kind)(4, 6, **options) for module in (recurl.nn, torch.nn))
        assert str(mine) == str(torchs)
        assert mine.mode == torchs.mode
    assert str(recurl.nn.GRU(4, 6)) == "GRU(4, 6)"

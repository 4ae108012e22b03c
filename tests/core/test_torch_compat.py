"""Each private name of torch that recurl uses still behaves as recurl expects."""

import importlib.util
import os
import pickle
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from recurl.core import torch_compat as _torch
from recurl.core.errors import UnsupportedError


class Modes(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_every_name_is_tried_here():
    tried = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert set(_torch.__all__) <= tried


def test_is_functorch_active():
    seen = []

    def note(x):
        seen.append(_torch.is_functorch_active())
        return x.sum()

    note(torch.ones(2))
    torch.vmap(note)(torch.ones(2, 2))
    torch.func.grad(note)(torch.ones(2))
    assert seen == [False, True, True]


def test_is_forward_mode():
    seen = []

    def note(x):
        seen.append(_torch.is_forward_mode())
        return x.sum()

    note(torch.ones(2))
    torch.func.jvp(note, (torch.ones(2),), (torch.ones(2),))
    with torch.no_grad(), forward_ad.dual_level():
        note(torch.ones(2))
    assert seen == [False, True, True]


@pytest.mark.slow
def test_is_exporting():
    class Note(nn.Module):
        def forward(self, x):
            return x + 1 if _torch.is_exporting() else x + 2

    assert torch.compile(Note(), backend="eager", fullgraph=True)(torch.zeros(2)).tolist() == [2, 2]
    for strict in (False, True):
        assert torch.export.export(Note(), (torch.zeros(2),), strict=strict).module()(torch.zeros(2)).tolist() == [1, 1]
    assert not _torch.is_exporting()


def test_is_known():
    sizes = []

    def note(x):
        sizes.append(x.shape)
        return x + (2 if _torch.is_known(x.shape[0]) else 1)

    assert note(torch.zeros(3)).tolist() == [2, 2, 2]
    for dynamic, expected in ((False, 2), (True, 1)):
        torch._dynamo.reset()
        compiled = torch.compile(note, backend="eager", fullgraph=True, dynamic=dynamic)
        assert compiled(torch.zeros(3)).tolist() == [expected] * 3


def test_are_modes_active():
    assert not _torch.are_modes_active()
    with Modes():
        assert _torch.are_modes_active()


class Asking(Modes):
    """Asks inside operations whether function transforms have an effect."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.excluded = _torch.are_transforms_excluded()
        return super().__torch_dispatch__(function, types, args, kwargs)


def test_are_transforms_excluded():
    assert not _torch.are_transforms_excluded()
    with Asking() as asking:
        torch.ones(1)
        assert asking.excluded
        assert not _torch.are_transforms_excluded()


def test_foreach_lerp_():
    to, source = [torch.zeros(2), torch.ones(3)], [torch.ones(2), torch.zeros(3)]
    expected = [one.lerp(other, 0.01) for one, other in zip(to, source, strict=True)]
    _torch.foreach_lerp_(to, source, 0.01)
    assert all(map(torch.equal, to, expected))


def test_foreach_copy_():
    to = [torch.zeros(2), torch.zeros(3)]
    _torch.foreach_copy_(to, [torch.ones(2), torch.full((3,), 2.0)])
    assert to[0].tolist() == [1.0] * 2
    assert to[1].tolist() == [2.0] * 3


def test_foreach_copy_on_a_gpu_takes_tensors_of_one_kind():
    to = [torch.zeros(2), torch.zeros(3, dtype=torch.bool), torch.zeros(2, 3).t(), torch.zeros(4)]
    of = [torch.ones(2), torch.ones(3, dtype=torch.bool), torch.ones(3, 2), torch.ones(4, dtype=torch.int64)]
    kinds = list(_torch._of_one_kind(to, of))
    assert [len(targets) for targets, _ in kinds] == [1, 1, 1, 1]
    assert [len(targets) for targets, _ in _torch._of_one_kind([to[0], to[1], to[3]], [of[0], of[1], of[2]])] == [2, 1]
    for targets, sources in kinds:
        _torch._foreach_copy_(targets, sources)
    assert all(bool((target == 1).all()) for target in to)


def test_scan():
    def add(carry, x):
        return carry + x, (carry + x).clone()

    x = torch.arange(4.0)
    last, sums = _torch.scan(add, torch.zeros(()), x)
    assert last == 6
    assert torch.equal(sums, x.cumsum(0))


def test_schema_of():
    schema = _torch.schema_of(torch.ops.aten.add_.Tensor)
    assert schema.is_mutable
    assert [argument.name for argument in schema.arguments] == ["self", "other", "alpha"]
    assert _torch.schema_of(torch.ops.aten.view.default).returns[0].alias_info is not None
    assert _torch.schema_of(len) is None


def test_trace():
    seen = []

    @torch.compiler.assume_constant_result
    def read():
        context = _torch.trace()
        seen.append((context.fake_mode.shape_env.settings.allow_scalar_outputs, context.__dict__ is not None))
        return 1

    assert torch.compile(lambda x: x + read(), backend="eager", fullgraph=True)(torch.ones(())) == 2
    assert seen


def test_DROPOUTS():
    for module in (nn.Dropout(), nn.Dropout1d(), nn.Dropout2d(), nn.Dropout3d(), nn.FeatureAlphaDropout()):
        assert isinstance(module, _torch.DROPOUTS)
    assert isinstance(nn.AlphaDropout(), _torch.DROPOUTS)
    assert not isinstance(nn.Linear(1, 1), _torch.DROPOUTS)


def test_EXPORT_LOGGER():
    importlib.import_module("torch.onnx")
    assert importlib.util.find_spec(_torch.EXPORT_LOGGER)


def test_OPERATIONS():
    def run(x):
        return (x.double().softmax(0) + x.log_softmax(0)).sum()

    found = {node.target for node in _torch.traced_graph(run, [torch.zeros(3)]).graph.nodes}
    assert {_torch.OPERATIONS.to_copy, _torch.OPERATIONS.softmax, _torch.OPERATIONS.log_softmax} <= found
    assert _torch.OPERATIONS.unsafe_view(torch.zeros(4), [2, 2]).shape == (2, 2)


def test_CompletedState():
    class Counted(_torch.CompletedState):
        def __init__(self):
            super().__init__()
            self.count = nn.Buffer(torch.tensor(3))

        def complete_state(self, state_dict, prefix):
            state_dict.setdefault(f"{prefix}count", torch.tensor(5))

    net = nn.Sequential(Counted())
    net.load_state_dict({})
    assert net[0].count == 5
    net.load_state_dict({"0.count": torch.tensor(7)})
    assert net[0].count == 7


def test_NotifiedModule():
    seen = []

    class Told(_torch.NotifiedModule, nn.Linear):
        @property
        def dtype(self):
            return self.weight.dtype

        def on_conversion(self, before):
            seen.append((before, self.dtype))

    nn.Sequential(Told(1, 1)).double()
    assert seen == [(torch.float32, torch.float64)]


def test_check():
    _torch.check(True)
    with pytest.raises(RuntimeError):
        _torch.check(False)


def test_children_of():
    net = nn.Sequential(nn.ReLU())
    children = _torch.children_of(net)
    net.append(nn.Tanh())
    assert list(children) == ["0", "1"]
    assert children["1"] is net[1]


def test_parameters_of():
    net = nn.Linear(1, 1)
    parameters = _torch.parameters_of(net)
    net.extra = nn.Parameter(torch.zeros(1))
    assert list(parameters) == ["weight", "bias", "extra"]


def test_has_tensor_hooks():
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        weight = nn.Parameter(torch.zeros(1))
        assert not _torch.has_tensor_hooks(weight)
        handle = getattr(weight, register)(lambda _: None)
        assert _torch.has_tensor_hooks(weight)
        handle.remove()
        assert not _torch.has_tensor_hooks(weight)


def test_attributes_of_modules_may_be_missing():
    def function():
        return 1

    assert _torch._reads("_modules")(function) is function
    with pytest.raises(UnsupportedError, match=r"has no torch\.nn\.Module\._renamed"):
        _torch._reads("_modules", "_renamed")(function)()


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_has_hooks(register):
    module = nn.Linear(1, 1)
    assert not _torch.has_hooks(module)
    handle = getattr(module, register)(lambda *_: None)
    assert _torch.has_hooks(module)
    handle.remove()
    assert not _torch.has_hooks(module)


def test_hooks_of():
    module = nn.Linear(1, 1)
    assert _torch.hooks_of(module) == []
    handles = [module.register_forward_pre_hook(print), module.register_forward_hook(repr)]
    assert [hook for _, hook in _torch.hooks_of(module)] == [print, repr]
    handles[0].remove()
    assert [hook for _, hook in _torch.hooks_of(module)] == [repr]


def test_has_global_hooks():
    assert not _torch.has_global_hooks()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert _torch.has_global_hooks()
    finally:
        handle.remove()
    assert not _torch.has_global_hooks()


def test_tensors_of():
    module = nn.BatchNorm1d(2)
    parameters, buffers = _torch.tensors_of(module)
    other = torch.full((2,), 3.0)
    parameters["weight"], buffers["running_mean"] = other, other
    assert module.weight is other
    assert module.running_mean is other


def test_assert_async():
    _torch.assert_async(torch.tensor(True), "unseen")
    with pytest.raises(RuntimeError, match="what was wrong"):
        _torch.assert_async(torch.tensor(False), "what was wrong")


def test_edits_of():
    tensor = torch.zeros(2)
    before = _torch.edits_of(tensor)
    tensor.add_(1)
    tensor[0] = 3
    assert _torch.edits_of(tensor) == before + 2
    with torch.inference_mode():
        inference = torch.zeros(2)
    with pytest.raises(RuntimeError, match="version counter"):
        _torch.edits_of(inference)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_rnn_kernel(kind):
    net, x = kind(2, 3), torch.randn(4, 5, 2)
    states = (torch.zeros(1, 5, 3),) * 2 if kind is nn.LSTM else torch.zeros(1, 5, 3)
    weights = list(net.parameters())
    y, *_ = _torch.rnn_kernel(kind.__name__.lower())(x, states, weights, True, 1, 0.0, False, False, False)
    assert torch.equal(y, net(x)[0])


def test_running_by():
    seen = []

    def run(operation, arguments, named):
        seen.append(operation)
        return operation(*arguments, **named)

    with _torch.running_by(run):
        assert torch.ones(2).sum().item() == 2
    aten = torch.ops.aten
    assert seen == [aten.ones.default, aten.sum.default, aten._local_scalar_dense.default]


def test_is_compiling():
    def note(x):
        return x + 1 if _torch.is_compiling() else x + 2

    assert note(torch.zeros(2)).tolist() == [2, 2]
    assert torch.compile(note, backend="eager", fullgraph=True)(torch.zeros(2)).tolist() == [1, 1]

    class Note(nn.Module):
        def forward(self, x):
            return note(x)

    for strict in (False, True):
        assert torch.export.export(Note(), (torch.zeros(2),), strict=strict).module()(torch.zeros(2)).tolist() == [1, 1]
    assert not _torch.is_compiling()


def test_compiling():
    assert not _torch.is_compiling()
    with _torch.compiling():
        assert _torch.is_compiling()
        assert not torch.compiler.is_compiling()
        with _torch.compiling():
            assert _torch.is_compiling()
        assert _torch.is_compiling()
    assert not _torch.is_compiling()
    with pytest.raises(ValueError, match="inside"), _torch.compiling():
        raise ValueError("inside")
    assert not _torch.is_compiling()


def test_compiling_concerns_one_thread():
    seen = []
    entered, noted = threading.Event(), threading.Event()

    def traced(x):
        entered.set()
        assert noted.wait(60)
        seen.append(_torch.is_compiling())
        return (x + 1,)

    def note():
        assert entered.wait(60)
        seen.append(_torch.is_compiling())
        noted.set()

    thread = threading.Thread(target=note)
    thread.start()
    with _torch.compiling():
        _torch.traced_graph(traced, [torch.zeros(2)])
    thread.join()
    assert seen == [False, True]


def test_backward_passes_see_compiling():
    seen = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(_torch.is_compiling())
            return grad

    for context in (_torch.compiling(), nullcontext()):
        with context:
            Note.apply(torch.zeros(2, requires_grad=True)).sum().backward()
    assert seen == [True, False]


def test_traced_graph():
    weight = torch.ones(2, requires_grad=True)

    def slope(x):
        with torch.enable_grad():
            return torch.autograd.grad((x * weight).square().sum(), weight)

    graph = _torch.traced_graph(slope, [torch.zeros(2)])
    assert graph(torch.tensor([1.0, 2.0]))[0].tolist() == [2.0, 8.0]
    with torch.no_grad():
        weight.fill_(2.0)
    assert graph(torch.tensor([1.0, 2.0]))[0].tolist() == [4.0, 16.0]


def test_limit_compile_threads(monkeypatch):
    from torch._inductor import config

    with config.patch(compile_threads=7):
        monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "7")
        _torch.limit_compile_threads(2)
        assert config.compile_threads == 7
        monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS")
        _torch.limit_compile_threads(2)
        assert config.compile_threads == 2


def test_compiler_environment():
    from torch._inductor import config

    with config.patch(compile_threads=7):
        assert _torch.compiler_environment() == {"TORCHINDUCTOR_COMPILE_THREADS": "7"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_start_compilers(monkeypatch):
    from torch._inductor import async_compile, config

    with config.patch(compile_threads=2):
        monkeypatch.delenv("PYTHONWARNINGS", raising=False)
        _torch.start_compilers()
        assert "PYTHONWARNINGS" not in os.environ
        pool = async_compile.AsyncCompile.process_pool()
        assert b"PYTHONWARNINGS=ignore" in Path(f"/proc/{pool.process.pid}/environ").read_bytes().split(b"\0")
        assert async_compile.AsyncCompile._ready_future is not None
        async_compile.shutdown_compile_workers()
        async_compile.AsyncCompile.process_pool.cache_clear()


@pytest.mark.slow
def test_inductor_program():
    weight = torch.ones(2, requires_grad=True)
    graph = _torch.traced_graph(lambda x, y: (x * weight + torch.tensor([1.0, 2.0]), y), [torch.zeros(2)] * 2)
    program = _torch.inductor_program(graph, _torch.lift_tensors(graph))
    x = torch.ones(2)
    for value in (1.0, 3.0):
        with torch.no_grad():
            weight.fill_(value)
        found, given = program(torch.ones(2), x)
        assert found.tolist() == [value + 1, value + 2]
        assert not found.requires_grad
        assert given is x
    alone = _torch.traced_graph(lambda: (weight * 2,), [])
    assert len(_torch.inductor_program(alone, _torch.lift_tensors(alone))()) == 1


@pytest.mark.slow
def test_compile_packed(monkeypatch, tmp_path):
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    weight = nn.Parameter(torch.ones(2))
    graph = _torch.traced_graph(lambda x: (x * weight + torch.full((), 2.0), x.sum(0, dtype=torch.float64)), [weight])
    kept = _torch.lift_tensors(graph)
    counters.clear()
    _torch.compile_packed(_torch.pack_program(graph, kept, columns=True))
    assert counters["inductor"]["fxgraph_cache_miss"] == 1
    program = _torch.inductor_program(graph, kept, columns=True)
    assert counters["inductor"]["fxgraph_cache_hit"] == 1
    assert [found.tolist() for found in program(torch.ones(2))] == [[3.0, 3.0], 2.0]


def test_memory_formats_of_cached_programs():
    with _torch._saved_by_name():
        saved = pickle.dumps([torch.channels_last, torch.contiguous_format])
    assert b"torch.channels_last" in saved
    assert b"torch_compat" in saved
    assert pickle.loads(saved) == [torch.channels_last, torch.contiguous_format]
    assert b"torch_compat" not in pickle.dumps(torch.channels_last)


def test_pack_program():
    graph = _torch.traced_graph(lambda x: (x[0] + 1, torch.full((), 2.0)), [torch.zeros(2)])
    packed = _torch.pack_program(graph, [], columns=False)
    assert packed == _torch.pack_program(graph, [], columns=False)
    assert packed != _torch.pack_program(graph, [], columns=True)


def test_packed_programs_name_no_module_that_imports_torch(monkeypatch):
    """Unpacking one would import it, which may start what it has started here."""
    graph = _torch.traced_graph(lambda x: (x.clone(memory_format=torch.contiguous_format),), [torch.ones(2)])
    before = _torch.pack_program(graph, [], columns=False)
    first = ModuleType("first")
    first.torch = torch
    monkeypatch.setattr(sys, "modules", {"first": first, **sys.modules})
    assert _torch.pack_program(graph, [], columns=False) == before
    assert b"first" not in before


def test_import_compiler():
    _torch.import_compiler()
    assert "torch._inductor.compile_fx" in sys.modules


def test_compiler_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert _torch.compiler_cache() == tmp_path


def test_lift_tensors():
    weight = torch.ones(2)
    graph = _torch.traced_graph(lambda x: (x * weight + torch.tensor([1.0, 2.0]),), [torch.zeros(2)])
    kept = _torch.lift_tensors(graph)
    weight.fill_(3.0)
    assert graph(torch.ones(2), *kept)[0].tolist() == [4.0, 5.0]


def test_has_step_hooks():
    one, other = (torch.optim.SGD([nn.Parameter(torch.ones(1))]) for _ in range(2))
    assert not _torch.has_step_hooks(one)
    for register in (one.register_step_pre_hook, one.register_step_post_hook):
        handle = register(lambda *args: None)
        assert _torch.has_step_hooks(one)
        assert not _torch.has_step_hooks(other)
        handle.remove()
    handle = register_optimizer_step_post_hook(lambda *args: None)
    assert _torch.has_step_hooks(other)
    handle.remove()
    assert not _torch.has_step_hooks(one)

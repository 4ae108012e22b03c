"""Programs that are compiled later: what they compute until then, and the processes that compile them meanwhile."""

import importlib
import os
import pickle
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from recurl.core.errors import RecurlWarning
from recurl.core.torch_compat import pack_program, traced_graph
from recurl.execution import background, traced
from recurl.execution.background import cache_mark, compile_ahead, compiled_later, is_later
from recurl.execution.explain import CompilerFailed, NotCompiled
from recurl.execution.inductor import InductorBatchFunction
from recurl.execution.traced import InductorFunction
from recurl.sequences.entries import Entries
from recurl.trainers import PPOConfig
from recurl.trainers.algorithms.table import make_algorithm


@pytest.fixture
def programs(monkeypatch):
    """Count the programs that are compiled, without compiling them."""
    compiled = []

    def compile_graph(graph, kept, columns=False, most_fused=None):
        compiled.append(graph)
        return lambda *tensors: graph(*tensors, *kept)

    monkeypatch.setattr(traced, "inductor_program", compile_graph)
    return compiled


@pytest.fixture
def by_processes(monkeypatch, tmp_path):
    """Compile programs for a CPU in processes too, into an empty cache."""
    monkeypatch.setattr(traced, "_BY_PROCESSES", ("cpu",))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def test_blocks_may_be_nested_and_are_of_their_thread():
    with compiled_later():
        with compiled_later(False):
            assert not is_later()
        assert is_later()
        with ThreadPoolExecutor() as pool:
            assert not pool.submit(is_later).result()
    assert not is_later()


def test_a_function_is_traced_and_then_compiled_by_its_call(programs):
    weight, own = torch.ones(3), torch.Generator().manual_seed(7)
    calls = []

    def run(x):
        calls.append(x)
        return (x * weight + torch.rand(3, generator=own),)

    x = torch.arange(3.0)
    with compiled_later():
        found = InductorFunction(run, [x], [own])
    assert not programs
    before = own.get_state()
    (expected,) = run(x)
    for _ in range(2):
        own.set_state(before)
        assert torch.equal(found(x)[0], expected)
    assert len(programs) == 1
    assert len(calls) == 3  # run once, traced, and by this test


def test_a_batch_function_is_not_compiled_yet(programs):
    net = nn.Linear(2, 1)
    run = InductorBatchFunction(lambda batch: {"y": net(batch.get("x"))}, net, "the network")
    batch = Entries({"x": torch.ones(3, 2)}, torch.Size([3]))
    for _ in range(2):
        with compiled_later(), pytest.raises(NotCompiled, match="compiled later"):
            run(batch)
    assert not programs
    expected = run(batch)["y"]
    assert torch.equal(run(batch)["y"], expected)
    with compiled_later(), pytest.raises(NotCompiled, match="compiled later"):
        run(batch)
    assert len(programs) == 1


def test_a_compiler_may_fail_later(monkeypatch):
    def fail(*given):
        raise RuntimeError("PassManager::run failed, later")

    monkeypatch.setattr(traced, "inductor_program", fail)
    own = torch.Generator().manual_seed(7)
    with compiled_later():
        found = InductorFunction(lambda x: (x + torch.rand(3, generator=own),), [torch.zeros(3)], [own])
    before = own.get_state()
    with pytest.warns(RecurlWarning, match="failed on a function"), pytest.raises(CompilerFailed):
        found(torch.zeros(3))
    assert torch.equal(own.get_state(), before)


@pytest.fixture(params=[False, True])
def settings(request):
    """Those of torch: the usual ones, and others."""
    if request.param:
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)


@pytest.mark.slow
def test_processes_fill_the_cache(by_processes, settings, monkeypatch):
    net = nn.Linear(3, 4)

    def loss(x):
        with torch.enable_grad():
            value = (net(x) * torch.rand(5, 1) + torch.full((), 0.5)).square().mean()
            return value.detach(), *torch.autograd.grad(value, net.parameters())

    importlib.import_module("recurl.envs.tasks.tensor_functions")  # defines an operator, as the process must too
    functions = [loss, lambda x: (torch.ops.recurl.argsort(x, 1), x.sum())]
    x = torch.randn(5, 3)
    with compiled_later():
        found = [InductorFunction(function, [x]) for function in functions]
    process = background._taking[0]._process
    counters.clear()
    for function, program in zip(functions, found, strict=True):
        torch.manual_seed(0)
        expected = function(x)
        torch.manual_seed(0)
        torch.testing.assert_close(program(x), expected)
    assert counters["inductor"]["fxgraph_cache_hit"] == 2
    assert counters["inductor"]["fxgraph_cache_miss"] == 0
    assert process.returncode == 0
    monkeypatch.setattr(traced, "compile_ahead", None)  # they are known to be there
    with compiled_later():
        for function in functions:
            InductorFunction(function, [x])


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [True, False])
def test_a_process_that_dies_is_not_waited_for(by_processes, at_once):
    with compiled_later():
        found = InductorFunction(lambda x: (x + 1,), [torch.zeros(3)])
    process = background._taking[0]._process
    if not at_once:
        compile_ahead(b"no program")()
    os.kill(process.pid, signal.SIGKILL)
    assert found(torch.ones(3))[0].tolist() == [2.0, 2.0, 2.0]
    assert process.returncode == -signal.SIGKILL if at_once else process.returncode is not None
    compile_ahead(b"no program")()
    assert background._taking[0]._process is not process
    assert background._taking[0]._process.returncode == 0


@pytest.mark.slow
def test_a_process_ends_once_a_program_is_waited_for():
    needed, other = compile_ahead(b"no program"), compile_ahead(b"no program either")
    process = background._taking[0]._process
    needed()
    assert process.wait(60) == 0  # before anybody waits for the other program
    other()


@pytest.mark.slow
def test_a_process_that_hangs_is_killed(monkeypatch):
    monkeypatch.setattr(background, "_PATIENCE", 0.1)
    monkeypatch.setattr(background, "_GRACE", 0.1)
    wait = compile_ahead(b"no program")
    process = background._taking[0]._process
    os.kill(process.pid, signal.SIGSTOP)
    wait()
    assert process.returncode == -signal.SIGKILL


def test_a_process_that_cannot_be_started_is_not_needed(by_processes, monkeypatch, programs):
    def fail(*given, **options):
        raise OSError("no memory")

    monkeypatch.setattr(background.subprocess, "Popen", fail)
    with compiled_later():
        found = InductorFunction(lambda x: (x + 1,), [torch.zeros(3)])
    assert found(torch.ones(3))[0].tolist() == [2.0, 2.0, 2.0]


def test_the_mark_of_a_program_depends_on_what_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def mark(function, *examples):
        return cache_mark(pack_program(traced_graph(function, examples), [], False))

    x = torch.zeros(3)
    own = mark(lambda x: (x + 1,), x)
    assert own == mark(lambda x: (1 + x,), torch.ones(3))
    assert own.is_relative_to(tmp_path)
    others = [mark(lambda x: (x + 2,), x), mark(lambda x: (x + 1,), x.double()), mark(lambda x: (x + 1,), x[:2])]
    monkeypatch.setattr(torch, "__version__", "3.0")
    assert len({own, *others, mark(lambda x: (x + 1,), x)}) == 5


def test_a_mark_that_cannot_be_read_is_not_there(by_processes, monkeypatch, programs):
    mark = Path("m" * 999)
    with pytest.raises(OSError, match="too long"):
        mark.exists()
    monkeypatch.setattr(traced, "cache_mark", lambda program: mark)
    monkeypatch.setattr(traced, "start_compilers", lambda: None)
    assert InductorFunction(lambda x: (x + 1,), [torch.zeros(1)])(torch.ones(1))[0].item() == 2


def test_what_cannot_be_saved_is_not_packed():
    graph = traced_graph(lambda x: (x + 1,), [torch.zeros(3)])
    next(iter(reversed(graph.graph.nodes))).kwargs = {"of": lambda: None}
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(lambda: None)
    assert pack_program(graph, [], False) is None


@pytest.mark.parametrize("at", [1, 2])
def test_the_first_update_is_uncompiled_and_a_resumed_run_repeats_the_others(at, programs):
    def learner(**options):
        config = PPOConfig(env="recurl/TMaze-v0", device="cpu", num_envs=2, rollout_steps=8, minibatches=1, **options)
        return make_algorithm(config)

    def update(own):
        return own.learn(own.collect())

    with closing(learner(compile=False)) as usual:
        first = update(usual)
    expected, states = [], []
    with closing(learner(compile=True)) as own:
        for _ in range(3):
            states.append((deepcopy(own.state_dict()), torch.get_rng_state()))
            expected.append(update(own))
            assert bool(programs) == (len(expected) > 1)
    assert expected[0] == first
    programs.clear()
    with closing(learner(compile=True)) as resumed:
        state, draws = states[at]
        resumed.load_state_dict(state)
        torch.set_rng_state(draws)
        assert update(resumed) == expected[at]
        assert programs


def test_a_learner_that_has_compiled_repeats_the_first_update(programs):
    config = PPOConfig(env="recurl/TMaze-v0", device="cpu", num_envs=2, rollout_steps=8, minibatches=1, compile=True)
    uncompiled = replace(config, compile=False)
    found = []
    for options, updates in (config, 2), (uncompiled, 0):
        with closing(make_algorithm(options)) as own:
            begin = deepcopy(own.state_dict()), torch.get_rng_state()
            for _ in range(updates):
                own.learn(own.collect())
            own.load_state_dict(begin[0])
            torch.set_rng_state(begin[1])
            found.append(own.learn(own.collect()))
    assert programs
    assert found[0] == found[1]

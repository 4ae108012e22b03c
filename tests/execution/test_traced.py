"""Compiled functions of tensors: their results, random draws and refusals."""

import logging
import os
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch._inductor.graph import GraphLowering

from recurl.core.errors import RecurlWarning, UnsupportedError
from recurl.core.messages import quiet, quiet_if_failing
from recurl.core.torch_compat import traced_graph
from recurl.execution import traced
from recurl.execution.explain import CompilerFailed, first_line
from recurl.execution.traced import InductorFunction


def test_numbers_gradients_and_draws():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    own = torch.Generator().manual_seed(7)

    def run(x, y):
        noise = torch.empty(5).uniform_(-1, 1, generator=own)
        kept = torch.empty_like(x).exponential_() > torch.rand(5, 1)
        with torch.enable_grad():
            loss = ((net(x * kept).squeeze(-1) + noise - y) ** 2).mean()
            return loss.detach(), noise, kept, *torch.autograd.grad(loss, net.parameters())

    x, y = torch.randn(5, 3), torch.randn(5)
    states = torch.get_rng_state(), own.get_state()
    program = InductorFunction(run, [x, y], [own])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(own.get_state(), states[1])
    for _ in range(2):
        before = torch.get_rng_state(), own.get_state()
        expected = run(x, y)
        after = torch.get_rng_state(), own.get_state()
        torch.set_rng_state(before[0])
        own.set_state(before[1])
        found = program(x, y)
        assert torch.equal(torch.get_rng_state(), after[0])
        assert torch.equal(own.get_state(), after[1])
        for result, wanted in zip(found, expected, strict=True):
            assert result.dtype == wanted.dtype
            torch.testing.assert_close(result, wanted)
        assert torch.equal(found[1], expected[1])
        assert torch.equal(found[2], expected[2])
        with torch.no_grad():
            net[0].weight.mul_(2)  # the next call reads it
        x, y = x + 1, y * 2


def scattered(x, mask):
    """Add the transposed matrices of [G, 16, 32] to every second 32 rows; more rows follow, for wrong addresses."""
    rows = torch.arange(64 * x.shape[0]).reshape(-1, 64)[:, 32:]
    turned = torch.where(mask[:, 32:] > 0, (x + 1).transpose(1, 2), 0)
    return (torch.zeros(192 * x.shape[0], 16).index_put((rows,), turned, accumulate=True),)


def test_kernels_of_several_threads_add_to_the_right_rows():
    given = torch.randn(16, 16, 32), torch.randn(16, 64, 16)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = InductorFunction(scattered, given)(*given)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close([*found], [*scattered(*given)])


def test_threads_compile_one_after_another():
    def compiled(number):
        return InductorFunction(lambda x: (x * number + torch.rand(3),), [torch.ones(3)])

    with warnings.catch_warnings(action="error", category=RecurlWarning), ThreadPoolExecutor(4) as pool:
        programs = list(pool.map(compiled, range(4)))
    for number, program in enumerate(programs):
        torch.manual_seed(0)
        (found,) = program(torch.ones(3))
        torch.manual_seed(0)
        torch.testing.assert_close(found, number + torch.rand(3))


def test_constants_are_made_once_unless_they_are_edited():
    def run(x):
        count = torch.tensor([1.0, 2.0])
        count[0].add_(x[0])
        return x * torch.tensor([2, 3]).to(torch.float32), count

    def given_away(x):
        bound = torch.tensor([1.0, 2.0])
        return bound.unsqueeze(0), x * bound

    program = InductorFunction(given_away, [torch.zeros(2)])
    program(torch.ones(2))[0].zero_()  # results belong to the caller
    found = program(torch.ones(2))
    assert [value.tolist() for value in found] == [[[1.0, 2.0]], [1.0, 2.0]]

    graph = traced_graph(run, [torch.zeros(2)])
    left = [
        str(node.target) for node in graph.graph.nodes if "lift" in str(node.target) or "_to_copy" in str(node.target)
    ]
    assert left == ["aten.lift_fresh_copy.default"]  # the edited constant
    program = InductorFunction(run, [torch.zeros(2)])
    for _ in range(2):
        scaled, count = program(torch.ones(2))
        assert scaled.tolist() == [2.0, 3.0]
        assert count.tolist() == [2.0, 2.0]


def test_examples_may_be_one_tensor():
    both = torch.ones(3)
    program = InductorFunction(lambda a, b: (a + 2 * b, a), [both, both])
    for one, other in ((0.0, 1.0), (3.0, 0.0)):
        found = program(torch.full((3,), one), torch.full((3,), other))
        assert [value.tolist() for value in found] == [[one + 2 * other] * 3, [one] * 3]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda x: (torch.multinomial(x, 1),),
            r"depend on tensors, but aten\.multinomial\.default does: draw them",
        ),
        (lambda x: (torch.bernoulli(x),), r"depend on tensors, but aten\.bernoulli\.default does"),
        (lambda x: (x if x.sum() > 0 else -x,), r"test_traced\.py:\d+ does .*: a tensor is converted to a number"),
        (lambda x: (x[x > 0],), r"test_traced\.py:\d+ does .*: a mask is used as an index"),
        (lambda x: (x * x.sum().item(),), r"a tensor is converted to a number or a truth value"),
    ],
)
def test_uncompilable_functions(function, message):
    before = torch.get_rng_state()
    with pytest.raises(UnsupportedError, match=message):
        InductorFunction(function, [torch.rand(3)])
    torch.set_rng_state(before)


@pytest.mark.slow
def test_a_compiler_that_fails_once_makes_smaller_kernels(monkeypatch, capfd):
    """Its output below Python is hidden; results and draws are those of the function."""
    real, calls = GraphLowering.compile_to_module, []

    def fail_at_first(self):
        calls.append(config.max_fusion_size)
        if len(calls) == 1:
            os.write(2, b"#loc = loc(unknown)\n" * 100)
            warnings.warn("Online softmax is disabled on the fly", stacklevel=1)
            logging.getLogger("torch._inductor.utils").warning("Not enough SMs")
            raise RuntimeError("PassManager::run failed")
        return real(self)

    net = nn.Linear(3, 4)
    own = torch.Generator().manual_seed(7)

    def run(x, y):
        noise = torch.empty(5, 1).uniform_(-1, 1, generator=own)
        scale = torch.tensor([1.0, 2.0, 3.0])
        with torch.enable_grad():
            loss = (net(x * scale) + noise - y.unsqueeze(-1)).square().mean()
            return loss.detach(), *torch.autograd.grad(loss, net.parameters())

    x, y = torch.randn(5, 3), torch.randn(5)
    monkeypatch.setattr(GraphLowering, "compile_to_module", fail_at_first)
    fresh = {"fx_graph_cache": False}  # a cached program isn't compiled again
    with config.patch(fresh), pytest.warns(RecurlWarning) as warned:
        program = InductorFunction(run, [x, y], [own], name="the loss of this test")
    (line,) = [str(warning.message) for warning in warned]
    assert line == (
        "The compiler failed on the loss of this test (RuntimeError: PassManager::run failed): it gets at most 16 "
        "operations per kernel."
    )
    assert capfd.readouterr().err == ""
    assert calls == [64, 16]
    for _ in range(2):
        state = own.get_state()
        expected = run(x, y)
        own.set_state(state)
        torch.testing.assert_close(program(x, y), expected)
        with torch.no_grad():
            net.weight.mul_(2)  # the next call reads it
        x, y = x + 1, y * 2


@pytest.fixture
def failing(monkeypatch):
    """A compiler that writes pages and fails, now or when its program is launched; return the sizes of kernels."""

    def install(error, at_launch=False):
        tried = []

        def launch(*tensors):
            raise error

        def compile_graph(graph, kept, columns=False, most_fused=None):
            os.write(2, b"#loc = loc(unknown)\n" * 100)
            tried.append(most_fused)
            return launch if at_launch else launch()

        monkeypatch.setattr(traced, "inductor_program", compile_graph)
        return tried

    return install


@pytest.mark.parametrize("at_launch", [False, True])
def test_a_compiler_that_fails_twice_costs_one_line_and_no_draw(failing, capfd, at_launch):
    tried = failing(RuntimeError("PassManager::run failed\nand pages"), at_launch)
    own = torch.Generator().manual_seed(7)
    x, name = torch.zeros(3), f"the function of this test{' when launched' * at_launch}"

    def run(x):
        return (x + torch.rand(3) + torch.rand(3, generator=own),)

    before = torch.get_rng_state(), own.get_state()
    with pytest.warns(RecurlWarning) as warned, pytest.raises(CompilerFailed, match="the compiler failed"):
        InductorFunction(run, [x], [own], name=name)
    (line,) = [str(warning.message) for warning in warned]
    assert line == (
        f"The compiler failed on {name} (RuntimeError: PassManager::run failed), so it runs uncompiled: slower, with "
        "the same results up to rounding. Another version of torch, Triton or the C++ compiler may compile it; "
        "--no-compile doesn't try."
    )
    assert capfd.readouterr().err == ""
    assert tried == [None, 16]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(own.get_state(), before[1])
    with pytest.raises(CompilerFailed):  # the same line is not said again, which would be an error here
        InductorFunction(run, [x], [own], name=name)


def test_what_the_tracer_cannot_read_is_not_compiled():
    operation = torch.library.custom_op("recurl_tests::unknown_to_the_tracer", mutates_args=())(double)
    with pytest.warns(RecurlWarning, match=r"failed on a custom operation \("), pytest.raises(CompilerFailed):
        InductorFunction(lambda x: (operation(x),), [torch.zeros(3)], name="a custom operation")


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def test_errors_of_the_function_and_lack_of_memory_are_not_failures_of_the_compiler(failing):
    def run(x):
        raise ValueError("of the user")

    with pytest.raises(ValueError, match="of the user"):
        InductorFunction(run, [torch.zeros(3)])
    failing(torch.OutOfMemoryError("CUDA out of memory"), at_launch=True)
    with pytest.raises(torch.OutOfMemoryError):
        InductorFunction(lambda x: (x + 1,), [torch.zeros(3)])


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "RuntimeError"),
        ("InvalidCxxCompiler: no compiler\n\nSet TORCHDYNAMO_VERBOSE=1", "InvalidCxxCompiler: no compiler"),
        ("in a subprocess:\nTraceback (most recent call last):\n  f()\nOSError: no gcc\n", "OSError: no gcc"),
        ("C++ compile error\ng++ a.cpp\na.cpp:1: error: int", "RuntimeError: C++ compile error: a.cpp:1: error: int"),
        ("x" * 999, "RuntimeError: " + "x" * 186),
    ],
)
def test_first_line(text, line):
    assert first_line(RuntimeError(text)) == line


def test_stderr_is_held_back_only_on_failure(capfd):
    with quiet_if_failing():
        os.write(2, b"from below Python\n")
    assert capfd.readouterr().err == "from below Python\n"

    def fail():
        with quiet_if_failing():
            os.write(2, b"pages\n")
            raise ValueError("said")

    with pytest.raises(ValueError, match="said"):
        fail()
    assert capfd.readouterr().err == ""


def test_loggers_that_were_set_up_to_say_more_are_not_quiet(caplog):
    log = logging.getLogger("of this test")
    for level, said in ((logging.NOTSET, []), (logging.DEBUG, ["warned"])):
        log.setLevel(level)
        caplog.clear()
        with quiet(log.name, logging.ERROR):
            log.warning("warned")
            warnings.warn("hidden", stacklevel=1)
        assert caplog.messages == said
        assert log.level == level

"""The forms of the Adam step: each has the results of the definition, and gives a reason where it isn't used."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from recurl.core.errors import RecurlWarning
from recurl.execution.executor import FORMS, Form
from recurl.execution.explain import NotCompiled
from recurl.recurrence.cpu import instruction_sets
from recurl.trainers.optim import triton_adam
from recurl.trainers.optim.cpp_adam import CpuAdam
from recurl.trainers.optim.gradient_step import GradientStep
from recurl.trainers.optim.triton_adam import FlatAdam
from tests.programs import Programs
from tests.recurrence.kernel_tests import core_and_rest, run

from .adam_form_checks import SHAPES, STEP, checks

CPP, TRITON = FORMS[STEP]
PACKAGE = "tests.trainers.optim"
LIMITS = {"float32": 5e-7, "float64": 1e-14}


def in_this_process(form, dtypes):
    return {name: check() for name, check in checks(form, dtypes).items()}


def in_the_interpreter(names):
    found = run("adam_form_checks", *names, package=PACKAGE, TRITON_INTERPRET="1")
    assert [*found] == names
    return {name: float(error) for name, (error,) in found.items()}


def cases():
    """Yield the comparisons of every form."""
    for instruction_set in instruction_sets():
        form = CPP._replace(build=partial(CpuAdam, instruction_set=instruction_set))
        yield pytest.param("cpp", partial(in_this_process, form, ("float32", "float64")), id=f"cpp, {instruction_set}")
    names = [*checks(TRITON)]
    for case in core_and_rest(("block float32 0.5", "layers float32 inf"), names):
        marks = [*case.marks, pytest.mark.slow]
        yield pytest.param("triton", partial(in_the_interpreter, *case.values), id=f"triton, {case.id}", marks=marks)


@pytest.mark.parametrize(("form", "compare"), [*cases()])
def test_a_form_has_the_results_of_the_definition(form, compare):
    errors = compare()
    assert {case: error for case, error in errors.items() if not error <= LIMITS[case.split()[1]]} == {}


def test_every_form_is_compared():
    assert {case.values[0] for case in cases()} == {form.name for form in FORMS[STEP]}


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["90", pytest.param("80", marks=pytest.mark.kernels)])
def test_compiled_kernels_do_not_spill(capability: str, programs: Programs) -> None:
    found = run("adam_offline", capability, start=programs.run, package=PACKAGE, TRITON_INTERPRET="0")
    assert found.keys() == {"squares_kernel", "decide_kernel", "adam_kernel"}
    assert all(spilled == "0" for spilled, _ in found.values())


@pytest.fixture
def on_cpu(monkeypatch):
    """Let the form for a GPU be built on the CPU; its kernels don't run here."""
    monkeypatch.setattr(triton_adam, "_DEVICES", ("cpu",))
    monkeypatch.setattr(FlatAdam, "_launch", lambda self, gradients: gradients[-1])


def refused(form, monkeypatch, weights, change):
    """Make a step after a change, with a form that was built before it; return why the definition was used."""
    built = []

    def run(grads, loss):
        if not built:
            raise NotCompiled("it isn't built")
        return built[0](grads, loss)

    monkeypatch.setitem(FORMS, STEP, [Form("form", lambda definition: run)])
    step = GradientStep(weights, learning_rate=0.1, max_norm=1.0)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    step.descend(torch.ones((), dtype=weights[0].dtype))
    assert step.explain() == {"form": "it isn't built"}
    try:
        built.append(form(step.reference_step))
    except NotCompiled as reason:
        return str(reason)
    loss = change(weights, step) if change else None
    before = weights[0].detach().clone()
    step.descend(torch.ones((), dtype=weights[0].dtype) if loss is None else loss)
    assert not torch.equal(weights[0], before)
    return step.explain()["form"]


def weights_of(dtype=torch.float32):
    return [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in SHAPES["layers"]]


def transpose_gradient(weights, step):
    weights[0].grad = torch.ones(33, 64).t()


def replace_parameter(weights, step):
    weights[0].data = weights[0].data.clone()


def drop_gradient(weights, step):
    weights[1].grad = None


def change_betas(weights, step):
    step.optimizer.param_groups[0]["betas"] = (0.8, 0.9)


NO_GRADIENT = "a parameter has no gradient"
NOT_PLAIN = "the loss, a gradient or a parameter isn't a contiguous CPU tensor of the same dtype"


@pytest.mark.parametrize(
    ("dtype", "change", "reason"),
    [
        (torch.float32, None, None),
        (torch.float32, change_betas, None),
        (torch.float32, replace_parameter, None),
        (torch.float32, drop_gradient, NO_GRADIENT),
        (torch.float32, transpose_gradient, NOT_PLAIN),
        (torch.float32, lambda weights, step: torch.ones((), dtype=torch.float64), NOT_PLAIN),
        (torch.bfloat16, None, "the parameters are bfloat16, not float32 or float64"),
    ],
)
def test_steps_that_the_cpp_form_does_not_take(dtype, change, reason, monkeypatch):
    assert refused(CpuAdam, monkeypatch, weights_of(dtype), change) == reason


def test_the_cpp_form_refuses_what_it_cannot_see(monkeypatch):
    weights = weights_of()
    step = GradientStep(weights, learning_rate=1e-3, max_norm=1.0)
    step(sum(weight.sum() for weight in weights))
    grads, loss = [weight.grad for weight in weights], torch.ones(())
    form = CpuAdam(step.reference_step)
    with pytest.raises(NotCompiled, match="autograd, a tracer or a dispatch mode"):
        form(grads, loss)  # autograd records
    with torch.no_grad():
        form(grads, loss)
        weights[0].data = torch.ones(1)  # smaller than its optimizer state
        with pytest.raises(NotCompiled, match="doesn't have the shape of its optimizer state"):
            form([torch.ones(1), *grads[1:]], loss)
    step.optimizer.state[weights[0]]["exp_avg"] = torch.zeros(64, 33, dtype=torch.float64)
    with pytest.raises(NotCompiled, match="the optimizer's state isn't in contiguous CPU tensors"):
        CpuAdam(step.reference_step)
    monkeypatch.setattr("recurl.trainers.optim.cpp_adam.instruction_sets", lambda: ())
    with pytest.raises(NotCompiled, match="C\\+\\+ library isn't available"):
        CpuAdam(step.reference_step)


@pytest.mark.parametrize(
    ("dtype", "change", "reason"),
    [
        (torch.float32, change_betas, "betas or epsilon were changed"),
        (torch.float32, replace_parameter, "a parameter or a step count was replaced or has moved in memory"),
        (torch.float32, drop_gradient, NO_GRADIENT),
        (
            torch.float32,
            lambda weights, step: torch.ones((), dtype=torch.float64),
            "the loss or a gradient isn't float32 on the GPU of the parameters",
        ),
        (torch.float64, None, "the parameters and step counts aren't contiguous and float32"),
    ],
)
def test_steps_that_the_triton_form_does_not_take(dtype, change, reason, on_cpu, monkeypatch):
    assert refused(FlatAdam, monkeypatch, weights_of(dtype), change) == reason


def test_parameters_that_the_triton_form_does_not_take(monkeypatch):
    assert refused(FlatAdam, monkeypatch, weights_of(), None) == "the parameters and step counts aren't on one GPU"
    monkeypatch.setattr(triton_adam, "_DEVICES", ("cpu",))
    empty = nn.Parameter(torch.ones(0))
    monkeypatch.setitem(FORMS, STEP, [Form("flat", FlatAdam)])
    step = GradientStep([empty], learning_rate=0.1, max_norm=1.0)
    step(empty.sum())
    assert step.explain() == {"flat": "all parameters are empty"}
    monkeypatch.setitem(FORMS, STEP, [TRITON._replace(package="missing_package")])
    step = GradientStep([nn.Parameter(torch.ones(2))], learning_rate=0.1, max_norm=1.0)
    step(step.optimizer.param_groups[0]["params"][0].sum())
    assert step.explain() == {"triton": "missing_package isn't installed"}


def test_kernels_that_cannot_be_compiled_are_found_before_ranks_exchange_gradients(monkeypatch):
    def fail(self, gradients):
        assert gradients.count_nonzero() == gradients.isnan().sum() == 1  # a step that isn't made
        raise RuntimeError("no C compiler")

    exchanged = []
    monkeypatch.setattr(triton_adam, "_DEVICES", ("cpu",))
    monkeypatch.setattr(triton_adam, "average_", exchanged.append)
    monkeypatch.setattr(FlatAdam, "_launch", fail)
    monkeypatch.setitem(FORMS, STEP, [Form("flat", FlatAdam)])
    ours, theirs = weights_of(), weights_of()
    step, other = GradientStep(ours, learning_rate=0.1, max_norm=1.0), torch.optim.Adam(theirs, lr=0.1, eps=1e-8)
    for number in range(3):
        for weight, same in zip(ours, theirs, strict=True):
            weight.grad, same.grad = torch.full_like(weight, 1e-3), torch.full_like(weight, 1e-3)
        said = nullcontext() if number else pytest.warns(RecurlWarning, match="failed on the optimizer step")
        with said:
            step.descend(torch.ones(()))
        other.step()
    torch.testing.assert_close(ours, theirs)
    assert step.explain() == {"flat": "the compiler failed (RuntimeError: no C compiler)"}
    assert exchanged == []

"""Comparisons of the forms of the Adam step with its definition.

Run as a module with TRITON_INTERPRET=1 in the environment, it compares the Triton form in Triton's interpreter, which
needs a separate process, and prints one line per check: ``name: error``.
"""

from __future__ import annotations

import copy
from functools import partial
from unittest.mock import patch

import torch
from torch import nn

from recurl.execution.executor import FORMS
from recurl.trainers.optim.gradient_step import GradientStep
from tests.recurrence.kernel_tests import print_checks

SHAPES = {
    "one": [(1,)],
    "block": [(1024,), (1025,), (1023,)],
    "layers": [(64, 33), (64,), (3, 7, 5), (0,), (2100,), ()],
    "large": [(20_000,), (5,)],  # more blocks than programs of the Triton kernels
}
STEP = "recurl.trainers.optim.gradient_step:GradientStep.reference_step"
STEPS = 10
NOT_FINITE = (4, 5)  # steps with a loss and with a gradient that isn't
BY_DEFINITION = (6, 7)  # steps that the form doesn't take, but whose state it adopts


def train(form, shapes, dtype, max_norm):
    """Return parameters, optimizer state and norms after several steps."""
    generator = torch.Generator().manual_seed(2)  # no moments nearly cancel
    parameters = [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]
    step, norms, options = None, [], {"learning_rate": 0.01, "max_norm": max_norm}
    for number in range(STEPS):
        used = [] if form is None or number in BY_DEFINITION else [form]
        for parameter in parameters:
            grad = torch.randn(parameter.shape, generator=generator, dtype=dtype) * 10.0 ** (number % 7 - 3)
            parameter.grad = grad * torch.inf if number == NOT_FINITE[1] else grad
        loss = torch.tensor(torch.nan if number == NOT_FINITE[0] else 1.0, dtype=dtype)
        with patch.dict(FORMS, {STEP: used}):
            if step is None:
                step = GradientStep(parameters, **options)
            elif number in (BY_DEFINITION[0], BY_DEFINITION[-1] + 1):  # another optimizer continues
                state, step = step.state_dict(), GradientStep(parameters, **options)
                step.load_state_dict(state)
            edits, before = parameters[0]._version, copy.deepcopy([parameters, step.state_dict()["state"]])
            norms.append(step.descend(loss))
        assert step.explain() == {form.name: None for form in used}
        if number in NOT_FINITE:
            assert not (norms[-1] + loss).isfinite()
            torch.testing.assert_close([parameters, step.state_dict()["state"]], before, rtol=0, atol=0)
        else:
            assert parameters[0]._version > edits
        if number == 2:
            step.set_learning_rate(0.003)
    states = [step.optimizer.state[p] for p in parameters]
    assert all(state["step"].item() == STEPS - len(NOT_FINITE) for state in states)
    return [*parameters, *(state[name] for state in states for name in ("exp_avg", "exp_avg_sq")), *norms]


def error(form, shapes, dtype, max_norm):
    """Return the largest relative difference between the results of a form and of the definition."""
    worst = 0.0
    for one, other in zip(*(train(kind, shapes, dtype, max_norm) for kind in (form, None)), strict=True):
        assert torch.equal(one.isfinite(), other.isfinite())
        difference = (one - other).nan_to_num(0, 0).norm() / other.nan_to_num(0, 0).norm().clamp_min(1e-30)
        worst = max(worst, difference.item())
    return worst


def checks(form, dtypes=("float32",)):
    """Return the comparisons of a form, by name."""
    return {
        f"{name} {dtype} {most}": partial(error, form, shapes, getattr(torch, dtype), most)
        for name, shapes in SHAPES.items()
        for dtype in dtypes
        for most in (0.5, float("inf"))
    }


if __name__ == "__main__":
    from recurl.trainers.optim import triton_adam
    from tests.recurrence.interpreter import allow_bounds, patch_once

    allow_bounds()
    patch_once()
    triton_adam._DEVICES, triton_adam._SUMS = ("cpu",), 16
    print_checks(checks(FORMS[STEP][1]))

"""Run the Adam kernels in Triton's interpreter, with TRITON_INTERPRET=1 in the environment.

Prints one line per check: ``name: error``. Needs a separate process, like the other kernels.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from recurl.recurrence.triton import adam
from recurl.trainers.optim import gradient_step
from recurl.trainers.optim.gradient_step import GradientStep

from .interpreter import allow_bounds, patch_once
from .kernel_tests import print_checks

allow_bounds()
patch_once()
SHAPES = {
    "one": [(1,)],
    "block": [(1024,), (1025,), (1023,)],
    "layers": [(64, 33), (64,), (3, 7, 5), (0,), (2100,), ()],
    "large": [(20_000,), (5,)],  # more blocks than programs
}


def flat(parameters, *kept, **options):
    assert adam.FlatAdam.takes(parameters, kept[-1])
    return adam.FlatAdam(parameters, *kept, **options)


def train(shapes, max_norm: float, *, by_kernels: bool, monkeypatch) -> list[torch.Tensor]:
    """Return parameters, moments and norms after several steps, one of them with a loss that isn't finite."""
    monkeypatch.setattr(gradient_step, "_flat_adam", flat if by_kernels else lambda *_, **__: None)
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    step = GradientStep(parameters, learning_rate=0.01, max_norm=max_norm, capturable=False)
    step._fused = True
    norms = []
    for number in range(7):
        scale = float("nan") if number == 4 else 10.0 ** (number - 3)
        loss = sum((p * torch.randn(p.shape, generator=generator)).sum() for p in parameters) * scale
        norms.append(step(loss))
        if number == 2:
            step.set_learning_rate(0.003)
    assert (step._flat is not None) == by_kernels
    states = [step.optimizer.state[p] for p in parameters]
    kept = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq", "step")]
    assert all(state["step"].item() == 6 for state in states)
    return [*parameters, *kept, *norms]


def error(shapes, max_norm: float) -> float:
    """Return the largest relative difference between what the kernels and torch compute."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        expected = train(shapes, max_norm, by_kernels=False, monkeypatch=monkeypatch)
        found = train(shapes, max_norm, by_kernels=True, monkeypatch=monkeypatch)
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        difference = (one - other).nan_to_num().norm() / other.nan_to_num().norm().clamp_min(1e-30)
        worst = max(worst, difference.item())
    return worst


CHECKS = {
    f"{name} {most}": partial(error, shapes, most) for name, shapes in SHAPES.items() for most in (0.5, float("inf"))
}

if __name__ == "__main__":
    adam._DEVICES, adam._SUMS = ("cpu",), 16
    print_checks(CHECKS)

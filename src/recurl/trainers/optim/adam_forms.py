"""Faster forms of the step of :class:`~recurl.trainers.optim.gradient_step.GradientStep`, one per type of device.

A form has the results of ``GradientStep.reference_step``, the definition in torch, up to rounding. It is registered in
:data:`FORMS`, and the tests compare every registered form with the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from recurl.execution.explain import NotCompiled
from recurl.trainers.optim.cpp_adam import CpuAdam

__all__ = ["FORMS", "AdamForm"]


class AdamForm(Protocol):
    """Mean over the ranks, clipping and Adam for all parameters of an optimizer, whose state is updated in place."""

    def step(self, grads: Sequence[Tensor], loss: Tensor) -> Tensor:
        """Make a step and return the norm of the gradients before clipping.

        If the norm or the loss isn't finite, parameters and optimizer state stay unchanged.

        Args:
            grads: gradients of the parameters, in their order, which may be changed.
            loss: scalar loss without an autograd graph.

        Raises:
            NotCompiled: this step isn't supported; nothing has changed.
        """
        ...


Builder: TypeAlias = Callable[[torch.optim.Adam, float], AdamForm]
"""Function from an optimizer with state for all its parameters, and the maximum norm, to a form.

It raises ``NotCompiled`` if the parameters aren't supported.
"""


def _triton(optimizer: torch.optim.Adam, max_norm: float) -> AdamForm:
    if find_spec("triton") is None:
        raise NotCompiled("Triton isn't installed")
    return import_module("recurl.trainers.optim.triton_adam").FlatAdam(optimizer, max_norm)


FORMS: dict[str, tuple[str, Builder]] = {"cpu": ("cpp", CpuAdam), "cuda": ("triton", _triton)}
"""Name and builder of the form for each type of device."""

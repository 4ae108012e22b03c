"""One step of gradient descent, with what it costs beside the arithmetic kept small."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


class GradientStep:
    """Adam behind a bound on the norm of the gradient.

    The optimiser runs as one kernel over all parameters (``fused=True``) where they are floating point and on the CPU
    or a CUDA device.

    Args:
        parameters: what is trained.
        learning_rate: step size; see :meth:`set_learning_rate`.
        max_norm: largest norm of the gradient of all parameters together; a longer one is scaled down to it.
        eps: Adam's epsilon.

    Example:
        >>> weight = nn.Parameter(torch.zeros(2))
        >>> step = GradientStep([weight], learning_rate=0.1, max_norm=1.0)
        >>> step((weight * torch.tensor([3.0, 4.0])).sum())
        tensor(5.)
        >>> weight
        Parameter containing:
        tensor([-0.1000, -0.1000], requires_grad=True)
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, learning_rate: float, max_norm: float, eps: float = 1e-8
    ) -> None:
        self._parameters = list(parameters)
        self._max_norm = max_norm
        fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in self._parameters)
        self.optimizer = torch.optim.Adam(self._parameters, lr=learning_rate, eps=eps, fused=fused)

    def __call__(self, loss: Tensor) -> Tensor:
        """Step down the gradient of ``loss``; return the gradient's norm before it was scaled, a scalar."""
        for parameter in self._parameters:
            parameter.grad = None
        loss.backward()
        norm = get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        clip_grads_with_norm_(self._parameters, self._max_norm, norm)
        self.optimizer.step()
        return norm

    def set_learning_rate(self, learning_rate: float) -> None:
        """Take steps of another size from now on."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    def state_dict(self) -> dict[str, Any]:
        """Return the optimiser's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        self.optimizer.load_state_dict(state)

"""Test problems of linear recurrences, with a slow reference in NumPy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from recurl.core.relative_error import relative_error
from recurl.recurrence import Boundaries, linear_recurrence, record_backends

KERNELS = ("loop", "scan", "cpu")
BACKENDS = ("reference", *KERNELS)
DTYPES = (torch.float64, torch.complex128)


@dataclass(frozen=True)
class Problem:
    """Inputs of a linear recurrence and a gradient of its result."""

    a: Tensor
    b: Tensor
    states: Tensor
    boundaries: Boundaries
    grad: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.a, self.b, self.states

    def to(self, dtype: torch.dtype) -> Problem:
        a, b, states, grad = (one.to(dtype) for one in (*self.tensors, self.grad))
        return replace(self, a=a, b=b, states=states, grad=grad)

    def solve(self, backend: str) -> tuple[Tensor, ...]:
        """Return h and the gradients of a, b and states; checks that the requested backend has run."""
        tensors = [one.detach().requires_grad_() for one in self.tensors]
        with record_backends() as ran:
            h = linear_recurrence(*tensors, self.boundaries, backend)
        assert ran == [backend] * min(1, h.numel())
        found = torch.autograd.grad(h, tensors, self.grad, allow_unused=True)
        return h.detach(), *(torch.zeros_like(t) if one is None else one for t, one in zip(tensors, found, strict=True))


def problem(
    shape: tuple[int, ...] = (3, 7),
    channels: tuple[int, ...] = (5,),
    dtype: torch.dtype = torch.float64,
    constant: bool = False,
    rate: float = 0.2,
    seed: int = 0,
    decay: tuple[float, float] = (0.5, 1.0),
) -> Problem:
    """A random problem: ``|a|`` in ``decay``; segments start at row starts and elsewhere at ``rate``."""
    generator = torch.Generator().manual_seed(seed)
    boundaries = Boundaries.from_is_init(torch.rand(shape, generator=generator) < rate, batch_shape=shape)
    tokens = boundaries.num_tokens
    real = torch.float64
    of_a = channels if constant else (tokens, *channels)
    a = decay[0] + (decay[1] - decay[0]) * torch.rand(of_a, dtype=real, generator=generator)
    if dtype.is_complex:
        a = torch.polar(a, torch.rand(of_a, dtype=real, generator=generator))
    wide = torch.complex128 if dtype.is_complex else real
    b, states, grad = (torch.randn(tokens, *channels, dtype=wide, generator=generator) for _ in range(3))
    return Problem(a, b, states, boundaries, grad).to(dtype)


def exact(problem: Problem) -> tuple[Tensor, ...]:
    """Return h and the gradients of a, b and states, computed token by token in float64."""
    a, b, states, grad = (one.detach().cdouble().resolve_conj().numpy() for one in (*problem.tensors, problem.grad))
    constant, starts = problem.a.ndim < problem.b.ndim, problem.boundaries.starts.tolist()
    a = np.broadcast_to(a, b.shape)
    h, before = np.zeros_like(b), np.zeros_like(b)
    for n, begins in enumerate(starts):
        before[n] = states[n] if begins else h[n - 1]
        h[n] = a[n] * before[n] + b[n]
    grad_a, grad_b, grad_states = np.zeros_like(b), np.zeros_like(b), np.zeros_like(b)
    carried = np.zeros_like(b[:1])
    for n in reversed(range(len(starts))):
        grad_b[n] = grad[n] + (0 if n + 1 == len(starts) or starts[n + 1] else carried)
        grad_a[n] = grad_b[n] * before[n].conj()
        carried = grad_b[n] * a[n].conj()
        if starts[n]:
            grad_states[n] = carried
    found = (h, grad_a.sum(0) if constant else grad_a, grad_b, grad_states)
    tensors = (torch.from_numpy(np.ascontiguousarray(one)) for one in found)
    return tuple(one if problem.b.is_complex() else one.real for one in tensors)


def worst_error(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    return max(relative_error(one, other) for one, other in zip(found, expected, strict=True))

"""Adam step with gradient clipping for all parameters in a single library call."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from recurl.recurrence.cpu.library import INSTRUCTION_SETS, adam_function, check, instruction_sets
from recurl.recurrence.cpu.step import PLAIN_TYPES, can_step

__all__ = ["CpuAdam"]

_DTYPES = {torch.float32: 0, torch.float64: 1}
_ADAM = struct.Struct("6q5d")  # recurl_adam


class CpuAdam:
    """Adam optimizer with gradient clipping, for parameters and state tensors of the caller.

    Results equal those of ``clip_grad_norm_`` followed by ``torch.optim.Adam`` up to rounding.

    Args:
        parameters: the parameters.
        means: running means of the gradients. These tensors, ``squares`` and ``steps`` must not be replaced or move in
            memory.
        squares: running means of the squared gradients.
        steps: step counts, float32 scalars.
        instruction_set: one of :func:`~recurl.recurrence.cpu.instruction_sets`, or None for the fastest of them.

    Attributes:
        means: running means of the gradients.
        squares: running means of the squared gradients.
        steps: step counts.

    Example:
        >>> weight, *kept = (torch.zeros(2) for _ in range(3))
        >>> adam = CpuAdam([weight], [kept[0]], [kept[1]], [torch.tensor(0.0)])
        >>> with torch.no_grad():
        ...     adam.step([torch.tensor([3.0, 4.0])], torch.tensor(1.0), 1.0, 0.1, (0.9, 0.999), 1e-8)
        tensor(5.)
        >>> weight
        tensor([-0.1000, -0.1000])
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        means: Sequence[Tensor],
        squares: Sequence[Tensor],
        steps: Sequence[Tensor],
        instruction_set: str | None = None,
    ) -> None:
        self.means, self.squares, self.steps = list(means), list(squares), list(steps)
        self._parameters = list(parameters)
        self._dtype = parameters[0].dtype
        kept = all(_is_plain(x, self._dtype) for x in (*means, *squares)) and all(
            _is_plain(x, torch.float32) for x in steps
        )
        self._fits = kept and self._dtype in _DTYPES
        columns = zip(self.means, self.squares, self.steps, self._parameters, strict=True)
        self._numbers = [(m.data_ptr(), s.data_ptr(), n.data_ptr(), p.numel()) for m, s, n, p in columns]
        self._instruction_set = instruction_set
        self._parts = struct.Struct(f"{6 * len(self._numbers)}q")  # one recurl_parameter each

    def fits(self, grads: Sequence[Tensor], loss: Tensor) -> bool:
        """Return whether the library supports the step: plain contiguous CPU tensors of a supported dtype."""
        dtype, parameters = self._dtype, self._parameters
        if not (self._fits and can_step() and all(_is_plain(x, dtype) for x in (loss, *grads, *parameters))):
            return False
        columns = zip(self.means, parameters, grads, strict=True)
        return all(mean.shape == parameter.shape == grad.shape for mean, parameter, grad in columns)

    def step(
        self,
        grads: Sequence[Tensor],
        loss: Tensor,
        max_norm: float,
        learning_rate: float,
        betas: tuple[float, float],
        eps: float,
    ) -> Tensor:
        """Clip the gradients, make a step, and return the norm of the gradients before clipping.

        If the norm or the loss isn't finite, parameters and optimizer state are left unchanged.

        Args:
            grads: gradients of the parameters, accepted by :meth:`fits`.
            loss: scalar loss.
            max_norm: maximum norm of all gradients together.
            learning_rate: step size.
            betas: Adam's coefficients of the running means.
            eps: term added to Adam's denominator.
        """
        numbers = list[int]()
        for parameter, grad, kept in zip(self._parameters, grads, self._numbers, strict=True):
            numbers += (parameter.data_ptr(), grad.data_ptr(), *kept)
        parts = ctypes.create_string_buffer(self._parts.pack(*numbers))
        norm = torch.empty((), dtype=self._dtype)
        isa = INSTRUCTION_SETS.index(self._instruction_set or instruction_sets()[-1])
        pointers = ctypes.addressof(parts), loss.data_ptr(), norm.data_ptr()
        head = (_DTYPES[self._dtype], isa, len(self._numbers), *pointers)
        check(adam_function()(_ADAM.pack(*head, max_norm, learning_rate, *betas, eps)))
        increment_version([*self._parameters, *grads])
        return norm


def _is_plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype is dtype and tensor.is_cpu and tensor.is_contiguous() and type(tensor) in PLAIN_TYPES

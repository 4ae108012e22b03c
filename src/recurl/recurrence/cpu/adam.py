"""A step of Adam behind clipped gradients, for all parameters in one call of the library."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from recurl.recurrence.cpu.library import INSTRUCTION_SETS, adam_function, check, instruction_sets
from recurl.recurrence.cpu.step import PLAIN, can_step

__all__ = ["Adam"]

_DTYPES = {torch.float32: 0, torch.float64: 1}
_ADAM = struct.Struct("6q5d")  # recurl_adam


class Adam:
    """Parameters, and what Adam keeps of them, one tensor each.

    Results equal those of ``torch.optim.Adam`` behind ``clip_grad_norm_`` to rounding.

    Args:
        parameters: what is learnt.
        means: running means of the gradients; none of these three is replaced, or changes its memory.
        squares: running means of their squares.
        steps: numbers of steps, float32 scalars.
        instruction_set: one of :func:`~recurl.recurrence.cpu.instruction_sets`, or None for the fastest of them.

    Attributes:
        means: see above.
        squares: see above.
        steps: see above.

    Example:
        >>> weight, *kept = (torch.zeros(2) for _ in range(3))
        >>> adam = Adam([weight], [kept[0]], [kept[1]], [torch.tensor(0.0)])
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
        self._parts = struct.Struct(f"{6 * len(self._numbers)}q")  # recurl_parameter each

    def fits(self, grads: Sequence[Tensor], loss: Tensor) -> bool:
        """Return whether the library can make the step: plain contiguous tensors of one of its dtypes, on the CPU."""
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
        """Clip the gradients, make a step, and return their norm before.

        Where the norm or the loss isn't finite, parameters and what is kept of them stay as they were.

        Args:
            grads: one for each parameter, which fit.
            loss: a scalar.
            max_norm: largest norm of all gradients together.
            learning_rate: step size.
            betas: Adam's.
            eps: Adam's.
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
    return tensor.dtype is dtype and tensor.is_cpu and tensor.is_contiguous() and type(tensor) in PLAIN

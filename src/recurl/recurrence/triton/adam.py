"""Adam step with gradient clipping on a GPU, in three kernels. Imported only if Triton is installed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from recurl.recurrence.triton.adam_kernels import adam_kernel, decide_kernel, squares_kernel
from recurl.recurrence.triton.launch import on
from recurl.recurrence.triton.prepared import prepared

__all__ = ["FlatAdam"]

_DEVICES = ("cuda",)
_BLOCK = 1024
_SUMS = 256  # most programs that sum squares


class FlatAdam:
    """Adam on flat buffers: both moments of all parameters are in one tensor each, in the order of the parameters.

    Results equal those of ``torch.optim.Adam`` after ``clip_grad_norm_`` to rounding; on a GPU torch rounds betas to
    float32, so second moments differ by 1.3e-5 if beta is 0.999. torch's kernels process 65,536 numbers per thread
    block, so that small networks occupy only three multiprocessors.

    Args:
        parameters: learned parameters: float32, contiguous, on one GPU; see :meth:`fits`.
        means: running means of the gradients, which are copied.
        squares: running means of their squares, which are copied.
        steps: step counts, float32 scalars on the device, which must not be replaced.
        betas: betas of Adam.
        eps: eps of Adam.
        max_norm: largest norm of all gradients together.

    Attributes:
        means: views, in the shapes of the parameters, of the buffer that a step reads and writes.
        squares: likewise.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        means: Sequence[Tensor],
        squares: Sequence[Tensor],
        steps: Sequence[Tensor],
        *,
        betas: tuple[float, float],
        eps: float,
        max_norm: float,
    ) -> None:
        self._parameters, self._steps = list(parameters), list(steps)
        self._device = parameters[0].device
        sizes = [parameter.numel() for parameter in parameters]
        self._means, self._squares = (torch.cat([part.reshape(-1) for part in kept]) for kept in (means, squares))
        self.means, self.squares = (
            [part.view(like.shape) for part, like in zip(flat.split(sizes), parameters, strict=True)]
            for flat in (self._means, self._squares)
        )
        self._fixed = (tuple(betas), eps)
        self._settings = torch.tensor([max_norm, *betas, eps], dtype=torch.float64, device=self._device)
        self._addresses = [tensor.data_ptr() for tensor in (*self._parameters, *self._steps)]
        chunks = list[list[int]]()
        before = 0
        for number, (address, size) in enumerate(zip(self._addresses, sizes, strict=False)):
            for begin in range(0, size, _BLOCK):
                chunks.append([address + 4 * begin, before + begin, min(_BLOCK, size - begin), number])
            before += size
        self._count = before
        self._chunks = torch.tensor(chunks, device=self._device)
        self._step_addresses = torch.tensor(self._addresses[len(sizes) :], device=self._device)

    @staticmethod
    def takes(parameters: Sequence[Tensor], steps: Sequence[Tensor]) -> bool:
        """Return whether such a step is possible: non-empty parameters, all float32, contiguous and on one GPU."""
        device = parameters[0].device
        plain = all(
            x.dtype == torch.float32 and x.is_contiguous() and x.device == device for x in (*parameters, *steps)
        )
        return device.type in _DEVICES and plain and any(x.numel() for x in parameters)

    def fits(self, gradients: Sequence[Tensor], loss: Tensor, betas: tuple[float, float], eps: float) -> bool:
        """Return whether a step is possible: all tensors are float32, and parameters and settings are unchanged."""
        plain = all(x.dtype == torch.float32 and x.device == self._device for x in (*gradients, loss))
        same = self._addresses == [x.data_ptr() for x in (*self._parameters, *self._steps)]
        same = same and all(parameter.is_contiguous() for parameter in self._parameters)
        return plain and same and self._fixed == (tuple(betas), eps)

    def step(self, gradients: Tensor, loss: Tensor, rate: Tensor) -> Tensor:
        """Clip the gradients, take a step, and return their norm before clipping.

        If the norm or the loss isn't finite, parameters and moments remain unchanged.

        Args:
            gradients: gradients of all parameters, concatenated, float32; further entries aren't read.
            loss: a float32 scalar.
            rate: step size, a float32 scalar on the device.
        """
        number = len(self._parameters)
        programs = _power_of_two(min(_SUMS, -(-self._count // _BLOCK)))
        partial, norm = gradients.new_empty(programs), gradients.new_empty(())
        scalars = gradients.new_empty(2 + 2 * number)
        with on(self._device):
            prepared(squares_kernel, programs, PROGRAMS=programs, BLOCK=_BLOCK, num_warps=4)(
                gradients, partial, self._count
            )
            prepared(decide_kernel, 1, PROGRAMS=programs, PARAMETERS=_power_of_two(number), num_warps=4)(
                partial, loss, rate, self._settings, self._step_addresses, norm, scalars, number
            )
            prepared(adam_kernel, len(self._chunks), BLOCK=_BLOCK, num_warps=4)(
                self._chunks, gradients, self._means, self._squares, scalars, self._settings
            )
        increment_version([*self._parameters, *self._steps, *self.means, *self.squares])
        return norm


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()

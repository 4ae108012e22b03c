"""The step of :class:`~recurl.trainers.optim.gradient_step.GradientStep` on a GPU, in three kernels of Triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from recurl.distributed import average_
from recurl.execution.explain import NotCompiled, compiler_failed
from recurl.recurrence.cuda.launch import on
from recurl.recurrence.cuda.prepared import prepared
from recurl.trainers.optim.triton_adam_kernels import adam_kernel, decide_kernel, squares_kernel

if TYPE_CHECKING:
    from recurl.trainers.optim.gradient_step import GradientStep

__all__ = ["FlatAdam"]

_DEVICES = ("cuda",)
_BLOCK = 1024
_SUMS = 256  # most programs that sum squares


class FlatAdam:
    """Form of ``GradientStep.reference_step`` on a GPU.

    Both moments of all parameters are in one tensor each, in the order of the parameters; gradients aren't changed.
    On a GPU torch rounds betas to float32, so second moments differ by 1.3e-5 if beta is 0.999. torch's kernels process
    65,536 numbers per thread block, so that small networks occupy only three multiprocessors.

    Args:
        definition: the method. The moments of its optimizer become views of the buffers; step counts must not be
            replaced.

    Raises:
        NotCompiled: the parameters or step counts aren't contiguous, float32 and on one GPU.
        CompilerFailed: Triton can't compile the kernels. This is found out here, by a step that a loss of NaN skips:
            in a call it would come after ranks have exchanged their gradients.
    """

    def __init__(self, definition: Callable[..., Tensor]) -> None:
        owner: GradientStep = definition.__self__  # type: ignore[attr-defined] - a bound method
        self._group = owner.optimizer.param_groups[0]
        self._parameters: list[Tensor] = self._group["params"]
        states = [owner.optimizer.state[parameter] for parameter in self._parameters]
        self._steps: list[Tensor] = [state["step"] for state in states]
        self._device = self._parameters[0].device
        tensors = (*self._parameters, *self._steps)
        if self._device.type not in _DEVICES or any(x.device != self._device for x in tensors):
            raise NotCompiled("the parameters and step counts aren't on one GPU")
        if not all(x.dtype == torch.float32 and x.is_contiguous() for x in tensors):
            raise NotCompiled("the parameters and step counts aren't contiguous and float32")
        sizes = [parameter.numel() for parameter in self._parameters]
        if not any(sizes):
            raise NotCompiled("all parameters are empty")
        self._means, self._squares = (
            torch.cat([state[name].reshape(-1) for state in states]) for name in ("exp_avg", "exp_avg_sq")
        )
        parts = zip(states, self._parameters, self._means.split(sizes), self._squares.split(sizes), strict=True)
        for state, like, mean, square in parts:
            state.update(exp_avg=mean.view(like.shape), exp_avg_sq=square.view(like.shape))
        self._views: list[Tensor] = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
        self._fixed = (*self._group["betas"], self._group["eps"])
        self._settings = torch.tensor([owner.max_norm, *self._fixed], dtype=torch.float64, device=self._device)
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        chunks = list[list[int]]()
        before = 0
        for number, (address, size) in enumerate(zip(self._addresses, sizes, strict=False)):
            for begin in range(0, size, _BLOCK):
                chunks.append([address + 4 * begin, before + begin, min(_BLOCK, size - begin), number])
            before += size
        self._count = before
        self._chunks = torch.tensor(chunks, device=self._device)
        self._step_addresses = torch.tensor(self._addresses[len(sizes) :], device=self._device)
        nothing = torch.zeros(before + 1, device=self._device)
        nothing[-1] = torch.nan
        try:
            self._launch(nothing)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a compiler raises
            raise compiler_failed("the optimizer step", error) from error

    def __call__(self, grads: Sequence[Tensor], loss: Tensor) -> Tensor:
        """Make a step and return the norm of the gradients before clipping."""
        if not all(x.dtype == torch.float32 and x.device == self._device for x in (*grads, loss)):
            raise NotCompiled("the loss or a gradient isn't float32 on the GPU of the parameters")
        same = self._addresses == [x.data_ptr() for x in (*self._parameters, *self._steps)]
        if not same or not all(parameter.is_contiguous() for parameter in self._parameters):
            raise NotCompiled("a parameter or a step count was replaced or has moved in memory")
        if self._fixed != (*self._group["betas"], self._group["eps"]):
            raise NotCompiled("betas or epsilon were changed")
        gradients = torch.cat([*(grad.reshape(-1) for grad in grads), loss.reshape(1)])
        average_([gradients])
        norm = self._launch(gradients)
        increment_version([*self._parameters, *self._steps, *self._views])
        return norm

    def _launch(self, gradients: Tensor) -> Tensor:
        """Make a step with the gradients of all parameters, followed by the loss; return the norm."""
        loss, rate = gradients[-1], self._group["lr"]
        if not isinstance(rate, Tensor):
            rate = torch.full((), rate, device=self._device)
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
        return norm


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()

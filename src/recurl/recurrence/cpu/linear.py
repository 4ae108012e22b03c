"""Linear recurrences in C++: a pass over tokens in double precision, parallel over segments or over channels."""

from __future__ import annotations

import torch
from torch import Tensor

from recurl.core.torch_compat import is_compiling
from recurl.native.library import DTYPES, INSTRUCTION_SETS, StructArguments, instruction_sets, missing
from recurl.native.structures import Linear
from recurl.recurrence.backend import OperatorSupport
from recurl.recurrence.linear.kernels import Gradients, LinearInputs, LinearKernels, Needs

_COMPUTED_IN = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.bfloat16: torch.bfloat16,
    torch.float16: torch.float32,
    torch.complex64: torch.complex64,
    torch.complex128: torch.complex128,
}
_DTYPES = {**DTYPES, torch.bfloat16: 2}


class CpuLinear(LinearKernels):
    """CPU kernels of linear recurrences; float16 is converted to float32 and back.

    The result of a token doesn't depend on the number of threads, on the order of segments or on other channels.

    Attributes:
        instruction_set: one of :func:`~recurl.recurrence.cpu.instruction_sets`, or None for the fastest of them.
    """

    name = "cpu"

    def __init__(self, instruction_set: str | None = None) -> None:
        self.instruction_set = instruction_set
        self._missing = missing()

    def missing(self) -> str | None:
        """Return what must be installed, or None."""
        # missing() accesses the file system, which can't be traced.
        return self._missing if is_compiling() else missing()

    def unsupported(self, support: OperatorSupport) -> str | None:
        """Return why tensors can't be served: they aren't on the CPU."""
        device = support.device
        return None if device.type == "cpu" else f"its tensors must be on the CPU, they are on {device}; use 'loop'"

    def forward(self, inputs: LinearInputs) -> Tensor:
        """Return h, ``[N, D]``."""
        arguments, computed_in = self._arguments(inputs), _COMPUTED_IN[inputs.b.dtype]
        h = inputs.b.new_empty(inputs.b.shape, dtype=computed_in)
        arguments.set_rows(["b"], [_numbers(inputs.b.to(computed_in))])
        arguments.set_contiguous(["h"], [_numbers(h)])
        arguments.call("linear_forward")
        return h.to(inputs.b.dtype)

    def backward(self, inputs: LinearInputs, h: Tensor, grad: Tensor, needs: Needs) -> Gradients:
        """Return the gradients of a, b and states."""
        arguments, computed_in = self._arguments(inputs), _COMPUTED_IN[h.dtype]
        arguments.set_contiguous(["h"], [_numbers(h.to(computed_in))])
        arguments.set_rows(["grad"], [_numbers(grad.to(computed_in))])
        found = [
            like.new_empty(like.shape, dtype=computed_in) if need else None
            for like, need in zip((inputs.a, h, inputs.states), needs, strict=True)
        ]
        numbers = [None if gradient is None else _numbers(gradient) for gradient in found]
        arguments.set_contiguous(("grad_a", "grad_b", "grad_states"), numbers)
        arguments.call("linear_backward")
        a, b, states = (None if gradient is None else gradient.to(h.dtype) for gradient in found)
        return a, b, states

    def _arguments(self, inputs: LinearInputs) -> StructArguments:
        """Build the arguments shared by the forward and backward passes."""
        a, states = (_numbers(one.to(_COMPUTED_IN[one.dtype])) for one in (inputs.a, inputs.states))
        arguments = StructArguments(Linear())
        arguments.set_numbers(
            dtype=_DTYPES[a.dtype],
            isa=INSTRUCTION_SETS.index(self.instruction_set or instruction_sets()[-1]),
            threads=torch.get_num_threads(),
            tokens=states.shape[0],
            width=states.shape[1],
            is_complex=int(inputs.a.is_complex()),
            a_stride=0 if a.ndim == 1 else a.shape[1],
        )
        arguments.set_contiguous(("starts", "a"), (inputs.boundaries.starts, a))
        arguments.set_rows(["states"], [states])
        return arguments


def _numbers(tensor: Tensor) -> Tensor:
    """View complex numbers as pairs of real ones along the last dimension."""
    return torch.view_as_real(tensor.resolve_conj()).flatten(-2) if tensor.is_complex() else tensor.resolve_neg()

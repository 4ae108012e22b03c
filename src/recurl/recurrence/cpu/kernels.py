"""Forward and backward passes of the recurrence in C++, where each thread processes tiles of segments without padding.

The input product, the hidden product and their transposes run in the library, row by row in a fixed order. The result
of a token therefore doesn't depend on other tokens, on the number of threads or on the order of segments. Weight
gradients are summed over tokens in stream order for any number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recurl.core.torch_compat import is_compiling
from recurl.native.library import CELLS, DTYPES, INSTRUCTION_SETS, StructArguments, instruction_sets, missing
from recurl.native.structures import Layer
from recurl.recurrence.backend import LayerCall, Support
from recurl.recurrence.cells import LayerWeights, States
from recurl.recurrence.kernels import Gradients, Inputs, Kernels

_COMPUTED_IN = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
_STATES, _SAVED = ("h", "c"), ("gates", "unprojected")
_GRADIENTS = tuple(f"grad_{name}" for name in ("x", *LayerWeights._fields, "h0", "c0"))


class CpuKernels(Kernels):
    """CPU kernels in float32 and float64; bfloat16 and float16 are computed in float32.

    Attributes:
        instruction_set: one of :func:`~recurl.recurrence.cpu.instruction_sets`, or None for the fastest of them.
    """

    name = "cpu"
    cells = tuple(CELLS)

    def __init__(self, instruction_set: str | None = None) -> None:
        self.instruction_set = instruction_set
        self._missing = missing()

    def missing(self) -> str | None:
        """Return what must be installed, or None."""
        # missing() accesses the file system, which can't be traced.
        return self._missing if is_compiling() else missing()

    def unsupported(self, support: Support) -> str | None:
        """Return why the call can't be served: tensors elsewhere, an unsupported dtype, or a missing library."""
        if support.device.type != "cpu":
            return f"its tensors must be on the CPU, they are on {support.device}; use 'loop'"
        if support.dtype not in _COMPUTED_IN:
            return f"it has no kernels for {support.dtype}; use 'loop'"
        return self.missing()

    def forward(self, call: LayerCall, keep: bool) -> tuple[States, tuple[Tensor, ...]]:
        """Run the forward pass. Saves the gates and, with projection, o tanh(c)."""
        arguments, saved = self._arguments(call), self.saved_like(call)
        after = tuple([_empty(call, state.shape[1]) for state in call.states])
        arguments.set_contiguous(_SAVED, saved)
        arguments.set_contiguous(_STATES, after)
        arguments.call("forward")
        return _cast(after, call.x.dtype), saved if keep else ()

    def backward(
        self, call: LayerCall, after: States, saved: tuple[Tensor, ...], grads: States, needs: Inputs[bool]
    ) -> Gradients:
        """Return the gradients of the call's inputs."""
        arguments, dtype, w = self._arguments(call), _COMPUTED_IN[call.x.dtype], call.weights
        gates = saved or self.saved_like(call)
        arguments.set_contiguous(_SAVED, gates)
        arguments.set_contiguous(_STATES, _cast(after, dtype))
        if not saved:
            arguments.call("gates")
        arguments.set_rows(("grad_h", "grad_c"), _cast(grads, dtype))
        gradients = [
            tensor.new_empty(tensor.shape, dtype=dtype) if need and tensor is not None else None
            for tensor, need in zip(call.inputs, needs.flat, strict=True)
        ]
        for gradient in gradients[1 + len(w) :]:  # of the stored states: only the rows at segment starts are written
            if gradient is not None:
                gradient.zero_()
        arguments.set_contiguous(_GRADIENTS, gradients)
        wanted, width = needs.weights, after[0].shape[1]
        scratch = (
            torch.empty_like(gates[0]),
            _empty(call, width) if wanted.w_hh or wanted.b_hh else None,
            None if w.w_hr is None else _empty(call, width),
        )
        arguments.set_contiguous(("grad_gates", "h_before", "grad_output"), scratch)
        arguments.call("backward")
        return Inputs.from_flat(call.cell, _cast(gradients, call.x.dtype))

    def saved_like(self, call: LayerCall) -> tuple[Tensor, ...]:
        """Return empty tensors like those that :meth:`forward` saves."""
        hidden = call.weights.hidden_size
        gates = _empty(call, 4 * hidden)  # a GRU saves W_hn h + b_hn in addition to its three gates
        return (gates,) if call.weights.w_hr is None else (gates, _empty(call, hidden))

    def _arguments(self, call: LayerCall) -> StructArguments:
        """Build the arguments shared by the forward and backward passes."""
        w: LayerWeights = call.weights
        dtype, arguments = _COMPUTED_IN[call.x.dtype], StructArguments(Layer())
        arguments.set_numbers(
            cell=CELLS[call.cell.name],
            dtype=DTYPES[dtype],
            isa=INSTRUCTION_SETS.index(self.instruction_set or instruction_sets()[-1]),
            threads=torch.get_num_threads(),
            tokens=call.x.shape[0],
            inputs=call.x.shape[1],
            hidden=w.hidden_size,
            outputs=w.w_hh.shape[1],
        )
        arguments.set_contiguous(w._fields, _cast(w, dtype))
        arguments.set_contiguous(["starts"], [call.boundaries.starts])
        arguments.set_rows(("x", "h0", "c0"), _cast((call.x, *call.states), dtype))
        return arguments


def _empty(call: LayerCall, columns: int) -> Tensor:
    """Return an empty tensor ``[N, columns]`` in the dtype of the computation."""
    return call.x.new_empty(call.x.shape[0], columns, dtype=_COMPUTED_IN[call.x.dtype])


def _cast(tensors: Sequence[Any], dtype: torch.dtype) -> tuple[Any, ...]:
    """Return tensors in ``dtype``, and None for None."""
    return tuple([value if value is None or value.dtype == dtype else value.to(dtype) for value in tensors])

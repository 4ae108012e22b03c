"""Forward and backward passes of the recurrence in C++, where each thread processes tiles of segments without padding.

The input product, the hidden product and their transposes run in the library, row by row in a fixed order. The result
of a token therefore doesn't depend on other tokens, on the number of threads or on the order of segments. Weight
gradients are summed over tokens in stream order for any number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from recurl.core.torch_compat import is_compiling
from recurl.native.library import CELLS, DTYPES, INSTRUCTION_SETS, StructArguments, instruction_sets, missing
from recurl.native.structures import Layer
from recurl.recurrence.backend import LayerCall, Support
from recurl.recurrence.cells import LayerWeights, States
from recurl.recurrence.kernels import Gradients, Inputs, Kernels, inputs_of

_V = TypeVar("_V")
_COMPUTED_IN = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}


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
        after = tuple(_empty(call, state.shape[1]) for state in call.states)
        arguments.set_contiguous(**_named(call, "", after), **_named_saved(saved))
        arguments.call("forward")
        return tuple(state.to(call.x.dtype) for state in after), saved if keep else ()

    def backward(
        self, call: LayerCall, after: States, saved: tuple[Tensor, ...], grads: States, needs: Inputs[bool]
    ) -> Gradients:
        """Return the gradients of the call's inputs."""
        arguments, dtype = self._arguments(call), _COMPUTED_IN[call.x.dtype]
        gates = saved or self.saved_like(call)
        arguments.set_contiguous(**_named(call, "", [state.to(dtype) for state in after]), **_named_saved(gates))
        if not saved:
            arguments.call("gates")
        arguments.set_rows(**_named(call, "grad_", [grad.to(dtype) for grad in grads]))
        w, width = call.weights, after[0].shape[1]
        wanted: LayerWeights = needs.weights
        stored = [f"{name}0" for name in call.cell.state_names]
        names = ("x", *w._fields, *stored)
        gradients = {
            name: tensor.new_empty(tensor.shape, dtype=dtype) if need and tensor is not None else None
            for name, tensor, need in zip(names, inputs_of(call).flat, needs.flat, strict=True)
        }
        for name in stored:  # only the rows at segment starts are written
            if (gradient := gradients[name]) is not None:
                gradient.zero_()
        arguments.set_contiguous(
            grad_gates=torch.empty_like(gates[0]),
            grad_output=None if w.w_hr is None else _empty(call, width),
            h_before=_empty(call, width) if wanted.w_hh or wanted.b_hh else None,
            **{f"grad_{name}": gradient for name, gradient in gradients.items()},
        )
        arguments.call("backward")
        found = [None if gradient is None else gradient.to(call.x.dtype) for gradient in gradients.values()]
        return Inputs.from_flat(call.cell, found)

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
        weights = w._asdict().items()
        arguments.set_contiguous(**{name: None if weight is None else weight.to(dtype) for name, weight in weights})
        arguments.set_contiguous(starts=call.boundaries.starts)
        arguments.set_rows(x=call.x.to(dtype))
        stored = _named(call, "", [state.to(dtype) for state in call.states])
        arguments.set_rows(**{f"{name}0": state for name, state in stored.items()})
        return arguments


def _empty(call: LayerCall, columns: int) -> Tensor:
    """Return an empty tensor ``[N, columns]`` in the dtype of the computation."""
    return call.x.new_empty(call.x.shape[0], columns, dtype=_COMPUTED_IN[call.x.dtype])


def _named(call: LayerCall, prefix: str, values: Sequence[_V]) -> dict[str, _V]:
    return {f"{prefix}{name}": value for name, value in zip(call.cell.state_names, values, strict=True)}


def _named_saved(saved: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return dict(zip(("gates", "unprojected"), saved, strict=False))

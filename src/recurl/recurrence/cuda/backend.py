"""The ``triton`` backend: supported calls, and the forward and backward pass of a layer."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from recurl.recurrence.backend import LayerCall, Support
from recurl.recurrence.cells import States
from recurl.recurrence.cuda.family import lazy_import
from recurl.recurrence.cuda.hardware import hardware_of
from recurl.recurrence.cuda.layer import TritonLayer
from recurl.recurrence.cuda.plan import plan_for
from recurl.recurrence.cuda.portable.config import Tile, tile_for
from recurl.recurrence.kernels import Gradients, Inputs, Kernels

_OLDEST_TRITON = (3, 6)
_OLDEST_CAPABILITY = (8, 0)
_DTYPES = (torch.float32, torch.bfloat16)
_GATES = {"lstm": 4, "gru": 3}


class TritonKernels(Kernels):
    """Forward and backward pass over segments on the GPU, with resident weights and large products in ATen."""

    name = "triton"
    cells = tuple(_GATES)

    def __init__(self, tile_for: Callable[[str, int, int, str], Tile] = tile_for) -> None:
        self.tile_for = tile_for

    def missing(self) -> str | None:
        """Return how to install Triton, which comes with torch's CUDA builds, if it is missing, else None."""
        return missing_package()

    def unsupported(self, support: Support) -> str | None:
        """Return why a call isn't supported, or None.

        Required are an NVIDIA GPU of compute capability 8.0 or newer, float32 or bfloat16, and units that fit on it.
        """
        refusal = self.missing() or refused_device(support.device)
        if refusal is not None:
            return refusal
        processors = hardware_of(support.device).processors
        if support.dtype not in _DTYPES:
            return f"it computes in float32 and bfloat16, got {support.dtype}; use 'loop'"
        tile = self.tile_for("forward", support.hidden_size, _GATES[support.cell.name], "bf16")
        if tile.members > processors:
            largest = processors * tile.units
            return f"hidden_size={support.hidden_size} is too large: this GPU holds {largest} units; use 'loop'"
        return None

    def forward(self, call: LayerCall, keep: bool) -> tuple[States, tuple[Tensor, ...]]:
        """Return the states after every token and the saved tensors; see ``recurl.recurrence.kernels.Kernels.forward``.

        Saved are the gates, the arranged input weights and, with projection, the output before it.
        """
        layer = self._layer(call)
        with lazy_import("launch").on(call.x.device):
            weight, bias = layer.arranged_input()
            after, gates = layer.forward_pass(weight, bias, keep)
        saved = (gates, weight) if keep else ()
        if call.weights.w_hr is not None:
            saved = (*saved, after[0]) if keep else ()
            after = (after[0] @ call.weights.w_hr.float().t(), *after[1:])
        dtype = call.x.dtype
        return after if dtype == torch.float32 else tuple(state.to(dtype) for state in after), saved

    def backward(
        self, call: LayerCall, after: States, saved: tuple[Tensor, ...], grads: States, needs: Inputs[bool]
    ) -> Gradients:
        """Return the gradients; see :meth:`recurl.recurrence.kernels.Kernels.backward`."""
        layer = self._layer(call)
        with lazy_import("launch").on(call.x.device):
            return _backward(layer, after, saved, grads, needs)

    def saved_like(self, call: LayerCall) -> tuple[Tensor, ...]:
        """Return tensors like the saved ones; see :meth:`recurl.recurrence.kernels.Kernels.saved_like`."""
        plan, (tokens, inputs) = self._layer(call).plan, call.x.shape
        layout = plan.layout
        gates = call.x.new_empty(tokens, 4 * layout.width, dtype=plan.precision.kept)
        weight = call.x.new_empty(layout.num_gates * layout.width, inputs, dtype=plan.precision.operands)
        if call.weights.w_hr is None:
            return gates, weight
        return gates, weight, call.x.new_empty(tokens, layout.hidden, dtype=torch.float32)

    def _layer(self, call: LayerCall) -> TritonLayer:
        hidden = int(call.weights.hidden_size)  # a symbol where torch.compile has seen several sizes
        lowest = torch.bfloat16 in (call.x.dtype, call.options.compute_dtype)
        precision = "bf16" if lowest else call.options.precision
        hardware, rows = None, 1
        if call.x.device.type == "cuda":
            hardware = hardware_of(call.x.device)
            rows = call.known_rows
        return TritonLayer(call, plan_for(hardware, call.cell.name, hidden, precision, rows), self.tile_for)


def _backward(
    layer: TritonLayer, after: States, saved: tuple[Tensor, ...], grads: States, needs: Inputs[bool]
) -> Gradients:
    w = layer.call.weights
    after = tuple([state.float() for state in after])
    if saved:
        gates, weight, *others = saved
        h = after[0], True
    else:
        weight, bias = layer.arranged_input()
        before = layer.before(after[0])
        gates, others, h = layer.recomputed_gates(weight, bias, before), (), (before, False)
    unprojected = after[0]
    if w.w_hr is not None:
        unprojected = others[0] if others else layer.unprojected(gates, after[1])
    into_h = grads[0] if w.w_hr is None else grads[0].float() @ w.w_hr.float()
    grad_gates, grad_stored = layer.backward_pass(
        (into_h, *grads[1:]), gates, (unprojected, *after[1:]), to_stored=needs.states[-1]
    )
    weight = weight if needs.x else None
    return layer.gradients(grad_gates, grad_stored, weight, h, grads[0], unprojected, needs)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def refused_device(device: torch.device) -> str | None:
    """Return why the kernels can't run on ``device``, or None."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"it needs an NVIDIA GPU, the tensors are on {device}; use 'loop' or 'auto'"
    capability = hardware_of(device).capability
    if capability < _OLDEST_CAPABILITY:
        return f"it needs compute capability 8.0 or newer, this GPU has {capability[0]}.{capability[1]}; use 'loop'"
    return None


@torch.compiler.assume_constant_result
def missing_package() -> str | None:
    """Return what has to be installed, or None."""
    return _missing_package()


@cache
def _missing_package() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "it needs the package triton: pip install 'recurl[triton]', or use recurrent_backend='loop'"
    version = importlib.metadata.version("triton")
    if _release(version) < _OLDEST_TRITON:
        oldest = ".".join(map(str, _OLDEST_TRITON))
        return f"it needs triton {oldest} or newer, found {version}; or use recurrent_backend='loop'"
    return None

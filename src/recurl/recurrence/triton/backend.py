"""The ``triton`` backend: which calls it serves, and one layer as products, recurrence and products again."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recurl.recurrence.backend import LayerCall, Support
from recurl.recurrence.cells import States
from recurl.recurrence.ops import Gradients
from recurl.recurrence.triton.config import Tile, tile_for

_OLDEST_TRITON = (3, 6)
_OLDEST_CAPABILITY = (8, 0)
_DTYPES = (torch.float32, torch.bfloat16)


class TritonKernels:
    """Forward and backward walks over segments on the GPU, weights resident, big products in ATen."""

    name = "triton"

    def __init__(self, tile_for: Callable[[str, int, int, str], Tile] = tile_for) -> None:
        self.tile_for = tile_for

    def missing(self) -> str | None:
        """Triton, which comes with torch's CUDA builds."""
        if importlib.util.find_spec("triton") is None:
            return "it needs the package triton: pip install 'recurl[triton]', or use recurrent_backend='loop'"
        version = importlib.metadata.version("triton")
        if _release(version) < _OLDEST_TRITON:
            oldest = ".".join(map(str, _OLDEST_TRITON))
            return f"it needs triton {oldest} or newer, found {version}; or use recurrent_backend='loop'"
        return None

    def unsupported(self, support: Support) -> str | None:
        """It needs an NVIDIA GPU of compute capability 8.0 or newer, float32 or bfloat16, and all units on the chip."""
        missing = self.missing()
        if missing is not None:
            return missing
        device = support.device
        if device.type != "cuda" or torch.version.hip is not None:
            return f"it needs an NVIDIA GPU, the tensors are on {device}; use 'loop' or 'auto'"
        capability = torch.cuda.get_device_capability(device)
        if capability < _OLDEST_CAPABILITY:
            return f"it needs compute capability 8.0 or newer, this GPU has {capability[0]}.{capability[1]}; use 'loop'"
        if support.dtype not in _DTYPES:
            return f"it computes in float32 and bfloat16, got {support.dtype}; use 'loop'"
        tile = self.tile_for("forward", support.hidden_size, support.cell.num_gates, "bf16")
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        if tile.members > processors:
            largest = processors * tile.units
            return f"hidden_size={support.hidden_size} is too large: this GPU holds {largest} units; use 'loop'"
        return None

    def forward(self, call: LayerCall, keep: bool) -> tuple[States, tuple[Tensor, ...]]:
        """See :meth:`recurl.recurrence.ops.Kernels.forward`. Saves the gates (and the output before projection)."""
        layer = self._layer(call)
        kept = layer.kept_dtype if keep else None
        after, gates = layer.kernels.run_forward(
            layer.input_gates(),
            layer.hidden_bias(),
            layer.recurrent_weight,
            layer.initial,
            call.boundaries,
            layer.tile("forward"),
            layer.precision,
            kept,
        )
        saved = () if not keep else (gates,) if call.weights.w_hr is None else (gates, after[0])
        if call.weights.w_hr is not None:
            after = (after[0] @ call.weights.w_hr.float().t(), *after[1:])
        return tuple(state.to(call.x.dtype) for state in after), saved

    def backward(
        self, call: LayerCall, after: States, saved: tuple[Tensor, ...], grads: States, needs: tuple[bool, ...]
    ) -> Gradients:
        """See :meth:`recurl.recurrence.ops.Kernels.backward`."""
        layer = self._layer(call)
        after = tuple(state.float() for state in after)
        before = layer.before(after[0])
        gates = saved[0] if saved else layer.gates_again(before)
        w = call.weights
        unprojected = _unprojected(gates, after, saved) if w.w_hr is not None else after[0]
        into_h = grads[0] if w.w_hr is None else grads[0].float() @ w.w_hr.float()
        grad_gates, grad_stored = layer.kernels.run_backward(
            (into_h, *grads[1:]),
            gates,
            layer.recurrent_weight,
            layer.initial,
            (unprojected, *after[1:]),
            call.boundaries,
            layer.tile("backward"),
            layer.precision,
            layer.dtype,
            needs[-1],
        )
        return layer.gradients(grad_gates, grad_stored, before, grads[0], unprojected, needs)

    def saved_like(self, call: LayerCall) -> tuple[Tensor, ...]:
        """See :meth:`recurl.recurrence.ops.Kernels.saved_like`."""
        tokens, hidden = call.x.shape[0], call.weights.w_hh.shape[0] // call.cell.num_gates
        gates = call.x.new_empty(tokens, 4 * hidden, dtype=_kept_dtype(_precision(call)))
        if call.weights.w_hr is None:
            return (gates,)
        return gates, call.x.new_empty(tokens, hidden, dtype=torch.float32)

    def differentiable(self, call: LayerCall) -> States | None:
        """None: there are no second derivatives."""
        return None

    def _layer(self, call: LayerCall) -> _Layer:
        # By name: a static import would make torch's CPU users load Triton.
        kernels = importlib.import_module("recurl.recurrence.triton.launch")
        return _Layer(call, kernels, self.tile_for, _precision(call))


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def _precision(call: LayerCall) -> str:
    lowest = torch.bfloat16 in (call.x.dtype, call.options.compute_dtype)
    return "bf16" if lowest else call.options.precision


def _kept_dtype(precision: str) -> torch.dtype:
    # Gates are bounded: float16 keeps three more bits than bfloat16, and as many as tf32.
    return torch.float16 if precision in ("bf16", "tf32") else torch.float32


def _unprojected(gates: Tensor, after: States, saved: tuple[Tensor, ...]) -> Tensor:
    if len(saved) == 2:
        return saved[1]
    return gates[:, 3 * after[1].shape[1] :].float() * after[1].tanh()


@dataclass(frozen=True)
class _Layer:
    """One call with what follows from it.

    With projection, h = W_hr u, the kernels carry u: their recurrent weight is W_hh W_hr, and the stored h enters the
    first token of a segment through the input product.
    """

    call: LayerCall
    kernels: Any
    tile_for: Callable[[str, int, int, str], Tile]
    precision: str

    @property
    def lstm(self) -> bool:
        return self.call.cell.num_gates == 4

    @property
    def hidden(self) -> int:
        return self.call.weights.w_hh.shape[0] // self.call.cell.num_gates

    @property
    def dtype(self) -> torch.dtype:
        """Of the operands of the large products."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @property
    def kept_dtype(self) -> torch.dtype:
        return _kept_dtype(self.precision)

    def tile(self, direction: str) -> Tile:
        """How a walk is cut."""
        return self.tile_for(direction, self.hidden, self.call.cell.num_gates, self.precision)

    @property
    def recurrent_weight(self) -> Tensor:
        """Contiguous float32 ``[G * H, H]``."""
        w = self.call.weights
        weight = w.w_hh.float() if w.w_hr is None else w.w_hh.float() @ w.w_hr.float()
        return weight.contiguous()

    @property
    def initial(self) -> States:
        """The stored states that the kernels read."""
        if self.call.weights.w_hr is None:
            return self.call.states
        zero = torch.zeros(1, 1, dtype=self.call.states[1].dtype, device=self.call.x.device)
        return zero.expand(self.call.x.shape[0], self.hidden), self.call.states[1]

    def hidden_bias(self) -> Tensor:
        """float32 ``[H]``: a GRU's hidden bias of n."""
        b_hh = self.call.weights.b_hh
        if b_hh is None:
            return torch.zeros(self.hidden, dtype=torch.float32, device=self.call.x.device)
        return b_hh[-self.hidden :].float().contiguous()

    def input_gates(self, with_stored: bool = True) -> Tensor:
        """Input product with every bias that enters the gates by addition, ``[N, G * H]``."""
        call, w = self.call, self.call.weights
        bias = w.b_ih
        if bias is not None and w.b_hh is not None:
            extra = w.b_hh if self.lstm else torch.cat([w.b_hh[: 2 * self.hidden], w.b_hh.new_zeros(self.hidden)])
            bias = bias + extra
        gates = F.linear(*(_cast(value, self.dtype) for value in (call.x, w.w_ih, bias)))  # pyright: ignore[reportArgumentType]
        if w.w_hr is not None and with_stored:
            first = torch.where(call.boundaries.starts.unsqueeze(1), call.states[0], 0).to(self.dtype)
            gates = gates.addmm_(first, w.w_hh.to(self.dtype).t())
        return gates

    def before(self, after: Tensor) -> Tensor:
        """H before every token, an operand of the weight gradients."""
        return self.kernels.states_before(self.call.states[0], after, self.call.boundaries, self.dtype)

    def gates_again(self, before: Tensor) -> Tensor:
        """The gates of all tokens at once, from the states before them."""
        hidden_gates = before @ self.call.weights.w_hh.to(self.dtype).t()
        return self.kernels.finish_gates(
            self.input_gates(with_stored=False), hidden_gates, self.hidden_bias(), self.lstm, self.kept_dtype
        )

    def gradients(
        self,
        grad_gates: Tensor,
        grad_stored: Tensor,
        before: Tensor,
        grad_h: Tensor,
        unprojected: Tensor,
        needs: tuple[bool, ...],
    ) -> Gradients:
        """All gradients, from those of the gates."""
        call, w, width = self.call, self.call.weights, self.hidden
        to_input = grad_gates if self.lstm else grad_gates[:, : 3 * width]
        to_hidden = grad_gates if self.lstm else grad_gates[:, width:]
        shift = 0 if self.lstm else width  # the input part of a GRU's gates begins with n
        w_ih = w.w_ih.to(self.dtype) if self.lstm else w.w_ih.to(self.dtype).roll(shift, 0)
        total = grad_gates.sum(0, dtype=torch.float32) if needs[3] or needs[4] else grad_gates
        to_states = self._to_states(to_hidden, grad_stored, needs)
        found = (
            to_input @ w_ih if needs[0] else None,
            _unroll(to_input.t() @ call.x.to(self.dtype), shift) if needs[1] else None,
            to_hidden.t() @ before if needs[2] else None,
            _unroll(total[: to_input.shape[1]], shift) if needs[3] else None,
            total[-to_hidden.shape[1] :] if needs[4] else None,
            self._to_projection(to_hidden, grad_h, unprojected) if needs[5] else None,
            *to_states,
        )
        like = (call.x, w.w_ih, w.w_hh, w.b_ih, w.b_hh, w.w_hr, *call.states)
        return tuple(
            _cast(value, source.dtype) if source is not None else None
            for value, source in zip(found, like, strict=True)
        )

    def _to_states(self, to_hidden: Tensor, grad_stored: Tensor, needs: tuple[bool, ...]) -> Gradients:
        starts = self.call.boundaries.starts.unsqueeze(1)
        grads: list[Tensor | None] = []
        if needs[6]:
            through = (to_hidden @ self.call.weights.w_hh.to(self.dtype)).float()
            grads.append(torch.where(starts, through if self.lstm else through + grad_stored, 0))
        else:
            grads.append(None)
        if self.lstm:
            grads.append(grad_stored if needs[7] else None)
        return tuple(grads)

    def _to_projection(self, to_hidden: Tensor, grad_h: Tensor, unprojected: Tensor) -> Tensor:
        from_next = torch.where(
            self.call.boundaries.starts.unsqueeze(1), 0, to_hidden @ self.call.weights.w_hh.to(self.dtype)
        ).float()
        total = grad_h.float() + F.pad(from_next[1:], (0, 0, 0, 1))
        return total.t() @ unprojected


def _cast(value: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if value is None else value.to(dtype)


def _unroll(value: Tensor, shift: int) -> Tensor:
    return value.roll(-shift, 0) if shift else value

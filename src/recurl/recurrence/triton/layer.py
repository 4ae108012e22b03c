"""One layer: large products in ATen around the walks over segments."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recurl.recurrence.backend import LayerCall
from recurl.recurrence.cells import States
from recurl.recurrence.kernels import Gradients, Inputs, inputs_of
from recurl.recurrence.triton.config import Chosen, Tile
from recurl.recurrence.triton.layout import Layout


def _module(name: str) -> Any:
    # By name: a static import would make users without a GPU load Triton.
    return importlib.import_module(f"recurl.recurrence.triton.{name}")


@dataclass(frozen=True)
class Layer:
    """One call with what follows from it.

    With projection, h = W_hr u, the kernels carry u: their recurrent weight is W_hh W_hr, and the stored h enters the
    first token of a segment through the input product.

    Attributes:
        call: the call.
        layout: of the gates.
        precision: of the recurrent products.
        chosen: how the Gluon kernels run it, or None: the plain ones do.
        tile_for: the table of the plain kernels.
    """

    call: LayerCall
    layout: Layout
    precision: str
    chosen: Chosen | None
    tile_for: Callable[[str, int, int, str], Tile]

    @property
    def dtype(self) -> torch.dtype:
        """Of the operands of the large products."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @property
    def kept_dtype(self) -> torch.dtype:
        """Of the gates kept for the backward walk.

        Gates are bounded: float16 keeps three more bits than bfloat16, and as many as tf32.
        """
        return torch.float16 if self.precision in ("bf16", "tf32") else torch.float32

    @property
    def recurrent_weight(self) -> Tensor:
        """Contiguous float32 ``[G * H, H]``."""
        w = self.call.weights
        weight = w.w_hh.float() if w.w_hr is None else w.w_hh.float() @ w.w_hr.float()
        return weight.contiguous()

    @property
    def initial(self) -> States:
        """The stored states that the kernels read, float32."""
        states = tuple(state.float() for state in self.call.states)
        if self.call.weights.w_hr is None:
            return states
        zero = torch.zeros(1, 1, dtype=torch.float32, device=self.call.x.device)
        return zero.expand(self.call.x.shape[0], self.layout.hidden), states[1]

    def hidden_bias(self) -> Tensor:
        """float32 ``[H]``: a GRU's hidden bias of n."""
        b_hh = self.call.weights.b_hh
        if b_hh is None:
            return torch.zeros(self.layout.hidden, dtype=torch.float32, device=self.call.x.device)
        return b_hh[-self.layout.hidden :].float().contiguous()

    def input_gates(self, with_stored: bool = True) -> Tensor:
        """Input product with every bias that enters the gates by addition, ``[N, G * W]`` as the layout says."""
        call, w = self.call, self.call.weights
        weight, bias = _module("weights").arranged(w.w_ih, self.layout, self.dtype, (w.b_ih, w.b_hh))
        gates = self._product(call.x.to(self.dtype), weight.t(), bias if bias.shape[0] else None)
        if w.w_hr is not None and with_stored:
            first = torch.where(call.boundaries.starts.unsqueeze(1), call.states[0], 0).to(self.dtype)
            gates = gates.addmm_(first, self._arranged(w.w_hh).t())
        return gates

    def walk_forward(self, keep: bool) -> tuple[States, Tensor]:
        """States after every token (before projection) and, with ``keep``, the gates."""
        boundaries = self.call.boundaries
        gates, bias, weight = self.input_gates(), self.hidden_bias(), self.recurrent_weight
        if self.chosen is not None:
            run = _module("gluon_launch").run_forward
            walk = (self.layout, self.chosen.forward, self.kept_dtype, keep)
            return run(gates, bias, weight, self.initial, boundaries, *walk)
        tile = self.tile_for("forward", self.layout.hidden, self.layout.num_gates, self.precision)
        kept = self.kept_dtype if keep else None
        run = _module("launch").run_forward
        return run(gates, bias, weight, self.initial, boundaries, tile, self.precision, kept)

    def walk_backward(self, grads: States, gates: Tensor, after: States, to_stored: bool) -> tuple[Tensor, Tensor]:
        """Gradients of the gates and, with ``to_stored``, the pointwise part of that of the last stored state."""
        boundaries, weight = self.call.boundaries, self.recurrent_weight
        state = (grads, gates, weight, self.initial, after, boundaries)
        if self.chosen is not None:
            run = _module("gluon_launch").run_backward
            return run(*state, self.layout, self.chosen.backward, self.dtype, to_stored)
        tile = self.tile_for("backward", self.layout.hidden, self.layout.num_gates, self.precision)
        return _module("launch").run_backward(*state, tile, self.precision, self.dtype, to_stored)

    def before(self, after: Tensor) -> Tensor:
        """H before every token, an operand of the weight gradients."""
        return _module("launch").states_before(self.call.states[0], after, self.call.boundaries, self.dtype)

    def gates_again(self, before: Tensor) -> Tensor:
        """The gates of all tokens at once, from the states before them."""
        hidden_gates = before @ self.call.weights.w_hh.to(self.dtype).t()
        finish = _module("launch").finish_gates
        return finish(
            self.input_gates(with_stored=False), hidden_gates, self.hidden_bias(), self.layout, self.kept_dtype
        )

    def unprojected(self, gates: Tensor, c: Tensor, saved: tuple[Tensor, ...]) -> Tensor:
        """An LSTM's output before projection: kept, or made again from o and c."""
        if len(saved) == 2:
            return saved[1]
        width = self.layout.width
        by_unit = gates.view(-1, width, 4)[..., 3] if self.layout.interleaved else gates[:, 3 * width :]
        return by_unit[:, : self.layout.hidden].float() * c.tanh()

    def gradients(
        self,
        grad_gates: Tensor,
        grad_stored: Tensor,
        before: Tensor,
        grad_h: Tensor,
        unprojected: Tensor,
        needs: Inputs[bool],
    ) -> Gradients:
        """All gradients, from those of the gates."""
        call, w, layout, wanted = self.call, self.call.weights, self.layout, needs.weights
        columns = layout.num_gates * layout.width
        to_input, to_hidden = grad_gates[:, :columns], grad_gates[:, -columns:]
        # W_hh times the gradient: the gradient of h before each token, wanted where the walk doesn't carry it.
        back = self._product(to_hidden, self._hidden_weight()) if wanted.w_hr or needs.states[0] else grad_gates[:0]
        to_w_ih = self._product(to_input.t(), call.x.to(self.dtype)) if wanted.w_ih else None
        to_w_hh = self._product(to_hidden.t(), before) if wanted.w_hh else None
        found = (
            self._product(to_input, self._arranged(w.w_ih)) if needs.x else None,
            *_module("weights").restored(grad_gates, to_w_ih, to_w_hh, layout, wanted.b_ih or wanted.b_hh),
            self._to_projection(back, grad_h, unprojected) if wanted.w_hr else None,
            *self._to_states(back, grad_stored, needs),
        )
        each = zip(found, inputs_of(call).flat, needs.flat, strict=True)
        return Inputs.from_flat(
            call.cell,
            [value.to(at.dtype) if need and value is not None and at is not None else None for value, at, need in each],
        )

    def _product(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """``a @ b + bias``: ATen's product; on tensor cores to float32's accuracy where ATen's does without them."""
        plain = self.kept_dtype == torch.float16 or self.chosen is None
        if not plain and torch.get_float32_matmul_precision() == "highest":
            return _module("products").product(a, b, bias)
        return a @ b if bias is None else torch.addmm(bias, a, b)

    def _hidden_weight(self) -> Tensor:
        """W_hh in the order of the hidden part of the gradients, padded: ``[G * W, P or H]``."""
        arranged = self._arranged(self.call.weights.w_hh)
        return arranged if self.layout.lstm else arranged.roll(-self.layout.width, 0)

    def _arranged(self, w: Tensor) -> Tensor:
        return _module("weights").arranged(w, self.layout, self.dtype, (None, None))[0]

    def _to_states(self, back: Tensor, grad_stored: Tensor, needs: Inputs[bool]) -> tuple[Tensor | None, ...]:
        starts = self.call.boundaries.starts.unsqueeze(1)
        grad_h = None
        if needs.states[0]:
            whole = back.float() if self.layout.lstm else back.float() + grad_stored
            grad_h = torch.where(starts, whole, 0)
        if not self.layout.lstm:
            return (grad_h,)
        return grad_h, grad_stored if needs.states[1] else None

    def _to_projection(self, back: Tensor, grad_h: Tensor, unprojected: Tensor) -> Tensor:
        from_next = torch.where(self.call.boundaries.starts.unsqueeze(1), 0, back).float()
        total = grad_h.float() + F.pad(from_next[1:], (0, 0, 0, 1))
        return total.t() @ unprojected

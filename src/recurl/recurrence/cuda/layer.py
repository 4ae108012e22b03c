"""One layer: the recurrence over segments, with large products in ATen before and after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from recurl.recurrence.backend import LayerCall
from recurl.recurrence.cells import States
from recurl.recurrence.cuda.family import lazy_import
from recurl.recurrence.cuda.plan import LayerPlan
from recurl.recurrence.cuda.portable.config import Tile
from recurl.recurrence.kernels import Gradients, Inputs

# Multiplications from which our own kernel is faster or, in tf32, transposing an operand for ATen's.
_LEAST_EXACT, _LEAST_EXACT_SUM, _LEAST_TF32 = 2**28, 2**30, 2**33


@dataclass(eq=False, slots=True)
class TritonLayer:
    """One call of a layer, with its execution plan.

    With projection, h = W_hr u, the kernels carry u: their recurrent weight is W_hh W_hr, and the stored h enters the
    first token of a segment through the input product.

    Attributes:
        call: the call.
        plan: the execution plan.
        tile_for: the table of tiles of the portable kernels.
    """

    call: LayerCall
    plan: LayerPlan
    tile_for: Callable[[str, int, int, str], Tile]

    def _recurrent_weight(self) -> Tensor:
        """Return the recurrent weight, contiguous float32 ``[G * H, H]``."""
        w = self.call.weights
        weight = w.w_hh.float() if w.w_hr is None else w.w_hh.float() @ w.w_hr.float()
        return weight.contiguous()

    def _initial(self) -> States:
        """Return the stored states that the kernels read, float32."""
        states = tuple([state.float() for state in self.call.states])
        if self.call.weights.w_hr is None:
            return states
        zero = torch.zeros(1, 1, dtype=torch.float32, device=self.call.x.device)
        return zero.expand(self.call.x.shape[0], self.plan.layout.hidden), states[1]

    def _hidden_bias(self) -> Tensor:
        """Return the hidden bias of n of a GRU, float32 ``[H]``; for an LSTM a placeholder that is not read."""
        b_hh, hidden = self.call.weights.b_hh, self.plan.layout.hidden
        if self.plan.layout.lstm:
            return self.call.weights.w_hh
        if b_hh is None:
            return torch.zeros(hidden, dtype=torch.float32, device=self.call.x.device)
        return b_hh[-hidden:].float().contiguous()

    def arranged_input(self) -> States:
        """Return input weights and the sum of the biases in the order of the input product."""
        w = self.call.weights
        return lazy_import("weights").arranged(w.w_ih, self.plan.layout, self.plan.precision.operands, (w.b_ih, w.b_hh))

    def _input_gates(self, weight: Tensor, bias: Tensor, with_stored: bool = True) -> Tensor:
        """Return the input product with all biases added to the gates, ``[N, G * W]`` in the order of the layout."""
        call, w = self.call, self.call.weights
        gates = self._product(_cast(call.x, self.plan.precision.operands), weight.t(), bias if bias.shape[0] else None)
        if w.w_hr is not None and with_stored:
            first = torch.where(call.boundaries.starts.unsqueeze(1), call.states[0], 0).to(self.plan.precision.operands)
            gates = gates.addmm_(first, self._arranged(w.w_hh).t())
        return gates

    def forward_pass(self, weight: Tensor, bias: Tensor, keep: bool) -> tuple[States, Tensor]:
        """Return states after every token (before projection) and, with ``keep``, the gates.

        Args:
            weight: input weight of :meth:`arranged_input`.
            bias: bias of :meth:`arranged_input`.
            keep: whether to return the gates.
        """
        plan, boundaries = self.plan, self.call.boundaries
        tensors = (self._input_gates(weight, bias), self._hidden_bias(), self._recurrent_weight(), self._initial())
        if plan.chosen is not None:
            return lazy_import("families").run_forward(*tensors, boundaries, plan, keep)
        tile = self.tile_for("forward", plan.layout.hidden, plan.layout.num_gates, plan.precision.name)
        return lazy_import("portable.launch").run_forward(*tensors, boundaries, tile, plan.precision, keep)

    def backward_pass(self, grads: States, gates: Tensor, after: States, to_stored: bool) -> tuple[Tensor, Tensor]:
        """Return gradients of the gates and, with ``to_stored``, the pointwise part of the last stored state's."""
        plan = self.plan
        state = (grads, gates, self._recurrent_weight(), self._initial(), after, self.call.boundaries)
        if plan.chosen is not None:
            return lazy_import("families").run_backward(*state, plan, to_stored)
        tile = self.tile_for("backward", plan.layout.hidden, plan.layout.num_gates, plan.precision.name)
        return lazy_import("portable.launch").run_backward(*state, tile, plan.precision, to_stored)

    def before(self, after: Tensor) -> Tensor:
        """Return h before every token, an operand of the weight gradients."""
        return lazy_import("launch").states_before(
            self.call.states[0], after, self.call.boundaries, self.plan.precision.operands
        )

    def recomputed_gates(self, weight: Tensor, bias: Tensor, before: Tensor) -> Tensor:
        """Recompute the gates of all tokens at once, from the states before them."""
        hidden_gates = before @ self.call.weights.w_hh.to(self.plan.precision.operands).t()
        input_gates = self._input_gates(weight, bias, with_stored=False)
        finish = lazy_import("launch").finish_gates
        return finish(input_gates, hidden_gates, self._hidden_bias(), self.plan.layout, self.plan.precision.kept)

    def unprojected(self, gates: Tensor, c: Tensor) -> Tensor:
        """Return the output of an LSTM before projection, from o and c."""
        width = self.plan.layout.width
        by_unit = gates.view(-1, width, 4)[..., 3] if self.plan.layout.interleaved else gates[:, 3 * width :]
        return by_unit[:, : self.plan.layout.hidden].float() * c.tanh()

    def gradients(
        self,
        grad_gates: Tensor,
        grad_stored: Tensor,
        weight: Tensor | None,
        h: tuple[Tensor, bool],
        grad_h: Tensor,
        unprojected: Tensor,
        needs: Inputs[bool],
    ) -> Gradients:
        """Return all gradients, given those of the gates; ``h`` is that before every token, or that after and True."""
        call, layout, wanted = self.call, self.plan.layout, needs.weights
        to_input = to_hidden = grad_gates
        if not layout.lstm:
            columns = layout.num_gates * layout.width
            to_input, to_hidden = grad_gates[:, :columns], grad_gates[:, -columns:]
        # W_hh times the gradient: the gradient of h before each token, needed where the recurrence doesn't return it.
        back = self._product(to_hidden, self._hidden_weight()) if wanted.w_hr or needs.states[0] else None
        biases = wanted.b_ih or wanted.b_hh
        to_w_ih, to_w_hh, sums = None, None, None
        if wanted.w_ih:
            to_w_ih, _ = self._over_tokens(to_input, _cast(call.x, self.plan.precision.operands))
        if wanted.w_hh:
            to_w_hh, sums = self._over_tokens(to_hidden, *h)
        found = (
            self._product(to_input, weight) if weight is not None else None,
            *lazy_import("weights").restored(
                grad_gates, to_w_ih, to_w_hh, layout, biases, sums if layout.lstm else None
            ),
            self._to_projection(back, grad_h, unprojected) if wanted.w_hr and back is not None else None,
            *self._to_states(back, grad_stored, needs),
        )
        each = zip(found, call.inputs, needs.flat, strict=True)
        return Inputs.from_flat(
            call.cell,
            [
                _cast(value, at.dtype) if need and value is not None and at is not None else None
                for value, at, need in each
            ],
        )

    def _over_tokens(self, grad: Tensor, values: Tensor, before: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return ``grad.t() @ values`` and, where they come for free, partial sums of ``grad`` over the tokens.

        With ``before``, ``values`` are the states after every token, and those before every token are multiplied.
        """
        if self._large(grad.shape[1] * values.shape[1], _LEAST_EXACT_SUM):
            states = (self.call.states[0], self.call.boundaries) if before else None
            return lazy_import("products.launch").over_tokens(grad, values, states, _exact())
        return torch.mm(grad.t(), self.before(values) if before else values), None

    def _product(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``a @ b + bias``."""
        if self._large(b.numel()):
            if _exact():
                return lazy_import("products.launch").product(a, b, bias)
            if b.stride(0) != 1:  # in tf32 cuBLAS is faster with contiguous columns
                b = b.t().contiguous().t()
        return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)

    def _large(self, numbers: int, least_exact: int = _LEAST_EXACT) -> bool:
        """Return whether a float32 product of ``numbers`` multiplications per token is too large for plain ATen.

        The large products follow torch's setting, not the precision of the recurrent product. Of sums over tokens,
        accurate to float32, ``least_exact`` is larger: their operands are transposed.
        """
        if self.plan.precision.operands != torch.float32 or not self.plan.large_products:
            return False
        size = self.call.x.shape[0] * numbers
        return size >= least_exact and (size >= _LEAST_TF32 or _exact())

    def _hidden_weight(self) -> Tensor:
        """Return W_hh in the order of the hidden part of the gradients, padded: ``[G * W, P or H]``."""
        arranged = self._arranged(self.call.weights.w_hh)
        return arranged if self.plan.layout.lstm else arranged.roll(-self.plan.layout.width, 0)

    def _arranged(self, w: Tensor) -> Tensor:
        return lazy_import("weights").arranged(w, self.plan.layout, self.plan.precision.operands, (None, None))[0]

    def _to_states(self, back: Tensor | None, grad_stored: Tensor, needs: Inputs[bool]) -> tuple[Tensor | None, ...]:
        grad_h = None
        if needs.states[0] and back is not None:
            whole = back.float() if self.plan.layout.lstm else back.float() + grad_stored
            grad_h = torch.where(self.call.boundaries.starts.unsqueeze(1), whole, 0)
        if not self.plan.layout.lstm:
            return (grad_h,)
        return grad_h, grad_stored if needs.states[1] else None

    def _to_projection(self, back: Tensor, grad_h: Tensor, unprojected: Tensor) -> Tensor:
        from_next = torch.where(self.call.boundaries.starts.unsqueeze(1), 0, back).float()
        total = grad_h.float() + F.pad(from_next[1:], (0, 0, 0, 1))
        return total.t() @ unprojected


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value if value.dtype == dtype else value.to(dtype)  # Tensor.to takes a microsecond to do nothing


def _exact() -> bool:
    """Return whether torch's float32 products must be accurate to float32."""
    return torch.get_float32_matmul_precision() == "highest"

"""LSTM cell: step, derivatives, and loop kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recurl.recurrence.cells.by_hand import Derivatives, LoopKernel, States
from recurl.recurrence.cells.cell import Shape, Sizes
from recurl.recurrence.cells.gated import GatedCell


def _step(x_gates: Tensor, h_gates: Tensor, states: States) -> States:
    i, f, g, o = (x_gates + h_gates).chunk(4, -1)
    c = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _finish(x_gates: Tensor, h_gates: Tensor) -> Tensor:
    i, f, g, o = (x_gates + h_gates).chunk(4, 1)
    return torch.cat([i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()], 1)


def _coefficients(gates: Tensor, h_gates: Tensor, before: States, after: States) -> States:
    i, f, g, o = gates.chunk(4, 1)
    tanh_c = after[1].tanh()
    per_gate = torch.cat([g * i * (1 - i), before[1] * f * (1 - f), i * (1 - g * g), tanh_c * o * (1 - o)], 1)
    return per_gate, o * (1 - tanh_c * tanh_c), f


def _reverse(coefficients: States, grads: States) -> tuple[Tensor, Tensor | None, States]:
    per_gate, c_per_h, forget = coefficients
    grad_h, grad_c = grads
    grad_c = torch.addcmul(grad_c, grad_h, c_per_h)
    return per_gate * torch.cat([grad_c, grad_c, grad_c, grad_h], 1), None, (grad_c * forget,)


def _input_gradient(h_gradient: Tensor, coefficients: States, grad_h: Tensor) -> Tensor:
    return h_gradient


def _output(gates: Tensor, after: States) -> Tensor:
    return gates[:, 3 * after[1].shape[1] :] * after[1].tanh()


def _loop_forward(gates: Tensor, h_gates: Tensor, states: States, out: States) -> None:
    hidden = gates.shape[1] // 4
    gates[:, : 2 * hidden].sigmoid_()
    gates[:, 2 * hidden : 3 * hidden].tanh_()
    gates[:, 3 * hidden :].sigmoid_()
    i, f, g, o = gates.chunk(4, 1)
    h, c = out
    torch.mul(f, states[1], out=c).addcmul_(i, g)
    torch.tanh(c, out=h).mul_(o)


def _loop_backward(coefficients: States, grads: States, out: Tensor, flows: States) -> None:
    per_gate, c_per_h, forget = coefficients
    grad_h, grad_c = grads
    hidden = grad_h.shape[1]
    grad_c.addcmul_(grad_h, c_per_h)
    by_gate = (3, hidden)
    cell_gates = per_gate[:, : 3 * hidden].unflatten(1, by_gate)
    torch.mul(cell_gates, grad_c.unsqueeze(1), out=out[:, : 3 * hidden].unflatten(1, by_gate))
    torch.mul(per_gate[:, 3 * hidden :], grad_h, out=out[:, 3 * hidden :])
    torch.mul(grad_c, forget, out=flows[1])


class LSTMCell(GatedCell, name="lstm"):
    """LSTM cell as in ``torch.nn.LSTM``: gates i, f, g, o; states h, c.

    Source: Hochreiter and Schmidhuber (1997), with a forget gate.
    """

    state_names = ("h", "c")
    child_name = "lstm"
    num_gates = 4
    projects = True
    derivatives = Derivatives(_step, _finish, _coefficients, _reverse, _input_gradient, _output)
    loop = LoopKernel(_loop_forward, _loop_backward, keeps_h_gates=False)

    def state_shapes(self, sizes: Sizes) -> tuple[Shape, ...]:
        """Return the shapes of h, P wide with projection, and c."""
        return (sizes.output_size,), (sizes.hidden_size,)

    def fused_step(self, x: Tensor, states: States, *weights: Any) -> tuple[Tensor, States]:
        """Run the step with ATen's kernel, or :meth:`step` with projection, which ATen doesn't support."""
        *matrices, w_hr = weights
        if w_hr is not None:
            return self.step(x, states, *weights)
        after = torch.lstm_cell(x, states, *matrices)
        return after[0], after


LSTM = LSTMCell()

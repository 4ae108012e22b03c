"""GRU cell: step, derivatives, and loop kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recurl.recurrence.cells.by_hand import Derivatives, LoopKernel, States
from recurl.recurrence.cells.gated import GatedCell


def _step(x_gates: Tensor, h_gates: Tensor, states: States) -> States:
    x_r, x_z, x_n = x_gates.chunk(3, -1)
    h_r, h_z, h_n = h_gates.chunk(3, -1)
    n = (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
    return (n + (x_z + h_z).sigmoid() * (states[0] - n),)


def _finish(x_gates: Tensor, h_gates: Tensor) -> Tensor:
    x_r, x_z, x_n = x_gates.chunk(3, 1)
    h_r, h_z, h_n = h_gates.chunk(3, 1)
    r = (x_r + h_r).sigmoid()
    return torch.cat([r, (x_z + h_z).sigmoid(), (x_n + r * h_n).tanh()], 1)


def _coefficients(gates: Tensor, h_gates: Tensor, before: States, after: States) -> States:
    r, z, n = gates.chunk(3, 1)
    h_n = h_gates.chunk(3, 1)[2]
    by_n = (1 - z) * (1 - n * n)
    per_gate = torch.cat([by_n * h_n * r * (1 - r), (before[0] - n) * z * (1 - z), by_n * r], 1)
    return per_gate, z, by_n


def _reverse(coefficients: States, grads: States) -> tuple[Tensor, Tensor | None, States]:
    per_gate, z, _ = coefficients
    (grad_h,) = grads
    return per_gate * grad_h.repeat(1, 3), grad_h * z, ()


def _input_gradient(h_gradient: Tensor, coefficients: States, grad_h: Tensor) -> Tensor:
    two = 2 * grad_h.shape[1]
    return torch.cat([h_gradient[:, :two], grad_h * coefficients[2]], 1)


def _output(gates: Tensor, after: States) -> Tensor:
    return after[0]


def _loop_forward(gates: Tensor, h_gates: Tensor, states: States, out: States) -> None:
    hidden = gates.shape[1] // 3
    gates[:, : 2 * hidden].add_(h_gates[:, : 2 * hidden]).sigmoid_()
    r, z, n = gates.chunk(3, 1)
    n.addcmul_(r, h_gates[:, 2 * hidden :]).tanh_()
    torch.lerp(n, states[0], z, out=out[0])


def _loop_backward(coefficients: States, grads: States, out: Tensor, flows: States) -> None:
    per_gate, z, _ = coefficients
    (grad_h,) = grads
    by_gate = (3, grad_h.shape[1])
    torch.mul(per_gate.unflatten(1, by_gate), grad_h.unsqueeze(1), out=out.unflatten(1, by_gate))
    torch.mul(grad_h, z, out=flows[0])


class GRUCell(GatedCell, name="gru"):
    """GRU cell as in ``torch.nn.GRU``: gates r, z, n; state h.

    Source: Cho et al. (2014), in the variant with the reset gate after the product.
    """

    child_name = "gru"
    num_gates = 3
    derivatives = Derivatives(_step, _finish, _coefficients, _reverse, _input_gradient, _output)
    loop = LoopKernel(_loop_forward, _loop_backward, keeps_h_gates=True)

    def fused_step(self, x: Tensor, states: States, *weights: Any) -> tuple[Tensor, States]:
        """Run the step with ATen's kernel."""
        h = torch.gru_cell(x, states[0], *weights[:4])
        return h, (h,)


GRU = GRUCell()

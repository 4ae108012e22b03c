"""Hand-written derivatives of the cells, as pure functions; columns of gates in the order of ``torch.nn``.

H units, GH gate columns, N tokens in any order. They follow from the definitions in ``cells.py`` by the chain rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from recurl.recurrence.cells import States


@dataclass(frozen=True)
class Derivatives:
    """What the backward pass of one cell is made of.

    Attributes:
        finish: ``(x_gates [N, GH], h_gates [N, GH]) -> gates [N, GH]``, activations applied.
        coefficients: ``(gates, h_gates, states before, states after)``, all tokens at once -> what ``reverse`` needs:
            the derivatives that don't depend on the incoming gradient. Of ``h_gates`` a GRU's last H columns count.
        reverse: ``(coefficients, gradients of the states after, h unprojected)`` of one step -> (gradient of h_gates,
            part of h's gradient that bypasses the hidden product or None, gradients of the other states before).
        input_gradient: ``(gradient of h_gates, coefficients, gradient of h unprojected)``, all tokens -> gradient of
            x_gates.
        output: ``(gates, states after)`` -> h before projection.
    """

    finish: Callable[[Tensor, Tensor], Tensor]
    coefficients: Callable[[Tensor, Tensor, States, States], States]
    reverse: Callable[[States, States], tuple[Tensor, Tensor | None, States]]
    input_gradient: Callable[[Tensor, States, Tensor], Tensor]
    output: Callable[[Tensor, States], Tensor]


def _lstm_finish(x_gates: Tensor, h_gates: Tensor) -> Tensor:
    i, f, g, o = (x_gates + h_gates).chunk(4, 1)
    return torch.cat([i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()], 1)


def _lstm_coefficients(gates: Tensor, h_gates: Tensor, before: States, after: States) -> States:
    i, f, g, o = gates.chunk(4, 1)
    tanh_c = after[1].tanh()
    per_gate = torch.cat([g * i * (1 - i), before[1] * f * (1 - f), i * (1 - g * g), tanh_c * o * (1 - o)], 1)
    return per_gate, o * (1 - tanh_c * tanh_c), f


def _lstm_reverse(coefficients: States, grads: States) -> tuple[Tensor, Tensor | None, States]:
    per_gate, c_per_h, forget = coefficients
    grad_h, grad_c = grads
    grad_c = torch.addcmul(grad_c, grad_h, c_per_h)
    return per_gate * torch.cat([grad_c, grad_c, grad_c, grad_h], 1), None, (grad_c * forget,)


def _lstm_input_gradient(h_gradient: Tensor, coefficients: States, grad_h: Tensor) -> Tensor:
    return h_gradient


def _lstm_output(gates: Tensor, after: States) -> Tensor:
    return gates[:, 3 * after[1].shape[1] :] * after[1].tanh()


def _gru_finish(x_gates: Tensor, h_gates: Tensor) -> Tensor:
    x_r, x_z, x_n = x_gates.chunk(3, 1)
    h_r, h_z, h_n = h_gates.chunk(3, 1)
    r = (x_r + h_r).sigmoid()
    return torch.cat([r, (x_z + h_z).sigmoid(), (x_n + r * h_n).tanh()], 1)


def _gru_coefficients(gates: Tensor, h_gates: Tensor, before: States, after: States) -> States:
    r, z, n = gates.chunk(3, 1)
    h_n = h_gates.chunk(3, 1)[2]
    by_n = (1 - z) * (1 - n * n)
    per_gate = torch.cat([by_n * h_n * r * (1 - r), (before[0] - n) * z * (1 - z), by_n * r], 1)
    return per_gate, z, by_n


def _gru_reverse(coefficients: States, grads: States) -> tuple[Tensor, Tensor | None, States]:
    per_gate, z, _ = coefficients
    (grad_h,) = grads
    return per_gate * grad_h.repeat(1, 3), grad_h * z, ()


def _gru_input_gradient(h_gradient: Tensor, coefficients: States, grad_h: Tensor) -> Tensor:
    two = 2 * grad_h.shape[1]
    return torch.cat([h_gradient[:, :two], grad_h * coefficients[2]], 1)


def _gru_output(gates: Tensor, after: States) -> Tensor:
    return after[0]


DERIVATIVES = {
    "lstm": Derivatives(_lstm_finish, _lstm_coefficients, _lstm_reverse, _lstm_input_gradient, _lstm_output),
    "gru": Derivatives(_gru_finish, _gru_coefficients, _gru_reverse, _gru_input_gradient, _gru_output),
}

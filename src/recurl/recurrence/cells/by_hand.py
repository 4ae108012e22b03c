"""Hand-written parts of gated cells: derivatives, and in-place kernels for the ``loop`` backend.

H is the number of hidden units, GH the number of gate columns in the order of ``torch.nn``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

States: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True)
class Derivatives:
    """Pointwise part of a step and its derivatives, as pure functions over N tokens in any order.

    Attributes:
        step: ``(x_gates, h_gates, states) -> states after``, over ``[..., GH]`` and ``[..., H]``, before projection;
            x_gates = W_ih x + b_ih, h_gates = W_hh h + b_hh. The other functions follow from it by the chain rule.
        finish: ``(x_gates [N, GH], h_gates [N, GH]) -> gates [N, GH]``, activations applied.
        coefficients: ``(gates, h_gates, states before, states after)``, all tokens at once -> inputs of ``reverse``:
            the derivatives that don't depend on the incoming gradient. A GRU reads only the last H columns of
            ``h_gates``.
        reverse: ``(coefficients, gradients of the states after, h unprojected)`` of one step -> (gradient of h_gates,
            part of h's gradient that bypasses the hidden product or None, gradients of the other states before).
        input_gradient: ``(gradient of h_gates, coefficients, gradient of h unprojected)``, all tokens -> gradient of
            x_gates.
        output: ``(gates, states after)`` -> h before projection.
    """

    step: Callable[[Tensor, Tensor, States], States]
    finish: Callable[[Tensor, Tensor], Tensor]
    coefficients: Callable[[Tensor, Tensor, States, States], States]
    reverse: Callable[[States, States], tuple[Tensor, Tensor | None, States]]
    input_gradient: Callable[[Tensor, States, Tensor], Tensor]
    output: Callable[[Tensor, States], Tensor]


@dataclass(frozen=True)
class LoopKernel:
    """In-place pointwise kernels of one cell on the R packed rows of one step.

    Attributes:
        forward: ``(gates [R, GH], h_gates [R, GH], states, states after to fill)``, before projection. Applies the
            activations to ``gates``, which hold the input product, in place. ``h_gates`` hold the hidden product if
            the cell keeps it separate; otherwise it is already in ``gates``.
        backward: ``reverse`` of :class:`Derivatives`, with two more arguments to fill: the hidden-gate gradient and
            the gradients of the states before. The gradient of h includes only the part that bypasses the hidden
            product. Overwrites its second argument.
        keeps_h_gates: whether the hidden product is kept separate because it doesn't enter the gates by addition, and
            h also reaches the next h directly.
    """

    forward: Callable[[Tensor, Tensor, States, States], None]
    backward: Callable[[States, States, Tensor, States], None]
    keeps_h_gates: bool

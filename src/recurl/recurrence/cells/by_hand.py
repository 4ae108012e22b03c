"""What a cell made of gates brings for hand-written kernels: its derivatives, and in-place work for the loop.

H units, GH gate columns in the order of ``torch.nn``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

States: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True)
class Derivatives:
    """The pointwise part of a step and its derivatives, as pure functions, over N tokens in any order.

    Attributes:
        step: ``(x_gates, h_gates, states) -> states after``, over ``[..., GH]`` and ``[..., H]``, before projection;
            x_gates = W_ih x + b_ih, h_gates = W_hh h + b_hh. What follows derives from it by the chain rule.
        finish: ``(x_gates [N, GH], h_gates [N, GH]) -> gates [N, GH]``, activations applied.
        coefficients: ``(gates, h_gates, states before, states after)``, all tokens at once -> what ``reverse`` needs:
            the derivatives that don't depend on the incoming gradient. Of ``h_gates`` a GRU's last H columns count.
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
    """Pointwise work of one cell on packed rows; R rows of one step.

    Attributes:
        forward: ``(gates [R, GH], h_gates [R, GH], states, states after to fill)``, before projection. Finishes
            ``gates``, which hold the input product, in place. ``h_gates`` hold the hidden product if the cell keeps it
            apart; else it is already in ``gates``.
        backward: ``reverse`` of :class:`Derivatives`, given also the hidden-gate gradient to fill, and the gradients
            of the states before to fill, h's with what bypasses the hidden product only. Spoils its second argument.
        keeps_h_gates: the hidden product enters the gates other than by addition, so it is kept apart; and h reaches
            the next h otherwise than through it.
    """

    forward: Callable[[Tensor, Tensor, States, States], None]
    backward: Callable[[States, States, Tensor, States], None]
    keeps_h_gates: bool

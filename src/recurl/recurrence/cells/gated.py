"""Base class of LSTM and GRU, whose gates combine an input product and a hidden product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from recurl.recurrence.cells.by_hand import Derivatives, States
from recurl.recurrence.cells.cell import Cell, Shape, Sizes


class LayerWeights(NamedTuple):
    """Weights of one layer of an LSTM or GRU in one direction, in the layout of ``torch.nn``; G gates, H units.

    Attributes:
        w_ih: ``[G * H, I]``.
        w_hh: ``[G * H, P or H]``.
        b_ih: ``[G * H]`` or None.
        b_hh: ``[G * H]`` or None.
        w_hr: ``[P, H]``, the LSTM's projection of its output to P units, or None.
    """

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None = None
    b_hh: Tensor | None = None
    w_hr: Tensor | None = None

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.w_hh.shape[1] if self.w_hr is None else self.w_hr.shape[1]


class GatedCell(Cell):
    """Cell with ``num_gates`` gates, stacked in the order of ``torch.nn``, and hand-written derivatives."""

    num_gates: ClassVar[int]
    derivatives: ClassVar[Derivatives]  # pyright: ignore[reportIncompatibleVariableOverride] - never None here

    def parameters(self, sizes: Sizes) -> Mapping[str, Shape]:
        """Return the shapes of the parameters of one layer. Names and shapes are those of ``torch.nn``."""
        rows = self.num_gates * sizes.hidden_size
        shapes: dict[str, Shape] = {
            "weight_ih": (rows, sizes.input_size),
            "weight_hh": (rows, sizes.output_size),
        }
        if sizes.bias:
            shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)}
        if sizes.proj_size:
            shapes["weight_hr"] = (sizes.proj_size, sizes.hidden_size)
        return shapes

    def step(  # pyright: ignore[reportIncompatibleMethodOverride] - the contract: a subclass names its weights
        self,
        x: Tensor,
        states: States,
        weight_ih: Tensor,
        weight_hh: Tensor,
        bias_ih: Tensor | None = None,
        bias_hh: Tensor | None = None,
        weight_hr: Tensor | None = None,
    ) -> tuple[Tensor, States]:
        """Return the features and the states after one step."""
        x_gates, h_gates = F.linear(x, weight_ih, bias_ih), F.linear(states[0], weight_hh, bias_hh)
        h, *rest = self.derivatives.step(x_gates, h_gates, states)
        h = h if weight_hr is None else F.linear(h, weight_hr)
        return h, (h, *rest)

    features_are_first_state = True

    def initialize_for_training(self, name: str, parameter: Tensor, sizes: Sizes) -> None:
        """Initialize biases to zero and matrices orthogonally."""
        if name.startswith("bias"):
            nn.init.zeros_(parameter)
        else:
            nn.init.orthogonal_(parameter)

    def pack(self, tensors: Sequence[Any]) -> Any:
        """Return :class:`LayerWeights`."""
        return LayerWeights(*tensors)

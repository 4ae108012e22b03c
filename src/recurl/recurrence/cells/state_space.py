"""Block of LRU and S5: norm, complex diagonal recurrence, gated linear unit, skip connection."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recurl.recurrence.cells.blocks import Block, affine, encode, encoder
from recurl.recurrence.cells.cell import Shape, Sizes


class StateSpace(Block):
    """Base class of LRU and S5: x + GLU(GELU(Re(C h) + D u)) with u = norm(x) and h = a h + B u.

    Subclasses define a and scale B. Complex numbers, including states, are pairs of real ones, ``[..., 2]``.
    ``weight_b`` holds B as alternating rows Re, Im; ``weight_c`` holds C as alternating columns Re, -Im, so that one
    real product yields the real part.

    Attributes:
        norm: whether the block has a layer norm.
    """

    norm: bool

    @abstractmethod
    def modes(self, sizes: Sizes) -> int:
        """Return the number of complex numbers in the state."""

    def state_shapes(self, sizes: Sizes) -> tuple[Shape, ...]:
        """Return the shape of each state."""
        return ((self.modes(sizes), 2),)

    def parameters(self, sizes: Sizes) -> Mapping[str, Shape]:
        """Return the shapes of the parameters of one layer."""
        hidden, bias, modes = sizes.hidden_size, sizes.bias, self.modes(sizes)
        shapes = encoder(sizes) | affine("glu", 2 * hidden, hidden, bias)
        shapes |= {"weight_b": (2 * modes, hidden), "weight_c": (hidden, 2 * modes), "skip": (hidden,)}
        if self.norm:
            shapes |= {"scale_norm": (hidden,)} | ({"bias_norm": (hidden,)} if bias else {})
        return shapes

    def initialize(self, name: str, parameter: Tensor, sizes: Sizes) -> None:
        """Initialize the skip D from N(0, 1) and other parameters as :class:`Block` does."""
        if name == "skip":
            nn.init.normal_(parameter)
        else:
            super().initialize(name, parameter, sizes)

    @staticmethod
    def block_input(
        x: Tensor, weight_in: Tensor | None, bias_in: Tensor | None, scale: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the inputs of the block and of the recurrence, each ``[R, H]``."""
        x = encode(x, weight_in, bias_in)
        return x, x if scale is None else F.layer_norm(x, x.shape[-1:], scale, bias)

    @staticmethod
    def block_output(x: Tensor, y: Tensor, weight_glu: Tensor, bias_glu: Tensor | None) -> Tensor:
        """Return the features, given the input of the block and the output of the recurrence."""
        value, gate = F.linear(F.gelu(y, approximate="tanh"), weight_glu, bias_glu).chunk(2, -1)
        return x + value * gate.sigmoid()


def polar(log_modulus: Tensor, phase: Tensor) -> Tensor:
    """Return exp(log_modulus + i phase) as pairs."""
    return log_modulus.exp().unsqueeze(-1) * torch.stack([phase.cos(), phase.sin()], -1)


def input_to_state(u: Tensor, weight_b: Tensor) -> Tensor:
    """Return B u as pairs, ``[R, N, 2]``."""
    return F.linear(u, weight_b).unflatten(-1, (-1, 2))

"""Mamba-2 cell: a matrix memory with one decay per head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recurl.recurrence.cells.blocks import (
    Block,
    affine,
    check_conv_width,
    check_optional_sizes,
    check_sizes,
    convolve,
    encode,
    encoder,
    heads_of,
    initialize_convolution,
    initialize_step_offset,
    number_of_heads,
    rms_norm,
)
from recurl.recurrence.cells.by_hand import States
from recurl.recurrence.cells.cell import Shape, Sizes
from recurl.recurrence.cells.time import ONE_STEP, Time

_RATES = 1.0, 16.0


@dataclass(frozen=True, repr=False)
class Mamba2Cell(Block, name="mamba2"):
    """Mamba-2 cell: S = a S + d B x^T, read as S^T C, one matrix per head (SSD, state space duality).

    Source: Dao and Gu, "Transformers are SSMs" (2024), with the block of its code: x, B and C are linear maps of the
    input (after a root mean square norm), then a convolution and SiLU; B and C are shared by the heads; with a step
    size d = softplus(W_d u + e), log a = -exp(A) d. The result plus D x is multiplied by SiLU(W_z u), normed, and
    mapped to the block's width, with a residual connection. Step sizes aren't limited.

    Args:
        heads: number of heads, which must divide the width of x; None for 4, 2 or 1, the first that does. The paper has
            heads of width 64.
        state_size: N, width of B and C. The paper has 128.
        expand: width of x as a multiple of H.
        conv_width: number of inputs covered by the convolution; 0 for none.
    """

    heads: int | None = None
    state_size: int = 64
    expand: int = 2
    conv_width: int = 4
    child_name: ClassVar[str] = "mamba2"
    states_at_ends: ClassVar[tuple[str, ...]] = ("h",)
    read_at_starts: ClassVar[tuple[str, ...]] = ("h",)

    def __post_init__(self) -> None:
        check_optional_sizes(heads=(self.heads, 1))
        check_sizes(state_size=(self.state_size, 1), expand=(self.expand, 1))
        check_conv_width(self.conv_width)

    def _heads(self, sizes: Sizes) -> tuple[int, int]:
        """Return the number of heads and their width."""
        width = self.expand * sizes.hidden_size
        heads = number_of_heads(self.heads, width, "the width of x, expand times hidden_size")
        return heads, width // heads

    @property
    def state_names(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride] - by options
        """Names of the states: h, the matrices, and the window of the convolution if there is one."""
        return ("h", "window") if self.conv_width else ("h",)

    def state_shapes(self, sizes: Sizes) -> tuple[Shape, ...]:
        """Return the shape of each state."""
        heads, size = self._heads(sizes)
        window = (self.conv_width - 1, heads * size + 2 * self.state_size)
        return ((heads, self.state_size, size), *((window,) if self.conv_width else ()))

    def parameters(self, sizes: Sizes) -> Mapping[str, Shape]:
        """Return the shapes of the parameters of one layer."""
        hidden, (heads, size) = sizes.hidden_size, self._heads(sizes)
        width = heads * size
        inner = width + 2 * self.state_size
        shapes = encoder(sizes) | {"scale_norm": (hidden,)}
        shapes |= affine("branches", width + inner + heads, hidden, bias=False)
        if self.conv_width:
            shapes |= {"weight_conv": (self.conv_width, inner)} | ({"bias_conv": (inner,)} if sizes.bias else {})
        shapes |= {"decay": (heads,), "step_offset": (heads,), "skip": (heads,), "scale_out": (width,)}
        return shapes | affine("out", hidden, width, sizes.bias)

    def initialize(self, name: str, parameter: Tensor, sizes: Sizes) -> None:
        """Initialize as the paper's code: exp(A) uniform from 1 to 16, step sizes log-uniform from 0.001 to 0.1."""
        if name == "decay":
            with torch.no_grad():
                parameter.uniform_(*_RATES).log_()
        elif name == "step_offset":
            initialize_step_offset(parameter)
        elif name == "skip":
            nn.init.ones_(parameter)
        elif name == "weight_conv":
            initialize_convolution(parameter)
        else:
            super().initialize(name, parameter, sizes)

    def step(  # noqa: PLR0913 # pyright: ignore[reportIncompatibleMethodOverride] - the contract: weights by name
        self,
        x: Tensor,
        states: States,
        scale_norm: Tensor,
        weight_branches: Tensor,
        decay: Tensor,
        step_offset: Tensor,
        skip: Tensor,
        scale_out: Tensor,
        weight_out: Tensor,
        bias_out: Tensor | None = None,
        weight_in: Tensor | None = None,
        bias_in: Tensor | None = None,
        weight_conv: Tensor | None = None,
        bias_conv: Tensor | None = None,
        *,
        time: Time = ONE_STEP,
    ) -> tuple[Tensor, States]:
        """Return the features and the states after one step."""
        x = encode(x, weight_in, bias_in)
        heads, width, both = decay.shape[0], scale_out.shape[0], 2 * self.state_size
        branches = F.linear(rms_norm(x, scale_norm), weight_branches)
        opening, inner, step = branches.split([width, width + both, heads], -1)
        inner, window = convolve(time, inner, states[1:], weight_conv, bias_conv)
        value, key, query = F.silu(inner).split([width, self.state_size, self.state_size], -1)
        key, query = (part.unsqueeze(1).expand(-1, heads, -1) for part in (key, query))
        value, step = heads_of(value, heads), F.softplus(step + step_offset)
        read, h = time.remember(query, key, value, -decay.exp() * step, step, states[0])
        read = (read + skip.unsqueeze(-1) * value).flatten(1)
        return x + F.linear(rms_norm(read * F.silu(opening), scale_out), weight_out, bias_out), (h, *window)


MAMBA2 = Mamba2Cell()

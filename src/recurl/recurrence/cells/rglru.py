"""RG-LRU cell: the recurrence of Griffin and Hawk in their residual block."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
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
    gated_feed_forward,
    heads_of,
    number_of_heads,
    rms_norm,
)
from recurl.recurrence.cells.by_hand import States
from recurl.recurrence.cells.cell import Shape, Sizes
from recurl.recurrence.cells.time import ONE_STEP, Time

_SHARPNESS = 8.0  # c of the paper
_SLOW, _FAST = 0.999, 0.9  # bounds of the initial radii exp(-softplus(L))
_CONV_VARIANCE = 0.01
_LARGEST_SLOPE = 1000.0


@dataclass(frozen=True, repr=False)
class RGLRUCell(Block, name="rglru"):
    """RG-LRU cell: a = exp(-8 softplus(L) r), h = a h + sqrt(1 - a^2) i x.

    Source: De et al., "Griffin" (2024), section 2.4.

    r = sigmoid(W_a x + b_a) and i = sigmoid(W_x x + b_x). The block is that of the paper and of Google's
    recurrentgemma: a GELU branch times a branch of convolution and recurrence, then a gated feed-forward network. Each
    of the two parts follows a root mean square norm and has a residual connection. Unlike the original, there is no
    special case at the start of a sequence, since the start of a slice need not be the start of an episode, and the
    slope of the square root is bounded.

    Args:
        state_size: S, width of the state; None for H.
        heads: number of blocks of the block-diagonal W_a and W_x; must divide S.
        conv_width: number of inputs covered by the convolution; 0 for none. The paper uses 4.
        feed_forward: hidden units of the feed-forward network, as a multiple of H; 0 for none.
    """

    state_size: int | None = None
    heads: int = 1
    conv_width: int = 0
    feed_forward: int = 3
    child_name: ClassVar[str] = "rglru"

    def __post_init__(self) -> None:
        check_optional_sizes(state_size=(self.state_size, 1))
        check_sizes(heads=(self.heads, 1), feed_forward=(self.feed_forward, 0))
        check_conv_width(self.conv_width)

    @property
    def state_names(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride] - by options
        """Names of the states: h, and the window of the convolution if there is one."""
        return ("h", "window") if self.conv_width else ("h",)

    def state_shapes(self, sizes: Sizes) -> tuple[Shape, ...]:
        """Return the shape of each state."""
        state = self.state_size or sizes.hidden_size
        return ((state,), *(((self.conv_width - 1, state),) if self.conv_width else ()))

    def parameters(self, sizes: Sizes) -> Mapping[str, Shape]:
        """Return the shapes of the parameters of one layer.

        Raises:
            ArgumentError: the width of the state is not a multiple of the number of heads.
        """
        hidden, bias = sizes.hidden_size, sizes.bias
        state = self.state_size or hidden
        per_head = state // number_of_heads(self.heads, state, "the state's width")
        shapes = encoder(sizes) | {"scale_branches": (hidden,)} | affine("branches", 2 * state, hidden, bias)
        if self.conv_width:
            shapes |= {"weight_conv": (self.conv_width, state)} | ({"bias_conv": (state,)} if bias else {})
        shapes |= {"weight_gates": (self.heads, 2 * per_head, per_head), "decay": (state,)}
        shapes |= {"bias_gates": (self.heads, 2 * per_head)} if bias else {}
        shapes |= affine("out", hidden, state, bias)
        if self.feed_forward:
            width = self.feed_forward * hidden
            shapes |= {"scale_up": (hidden,)}
            shapes |= affine("up", 2 * width, hidden, bias) | affine("down", hidden, width, bias)
        return shapes

    def initialize(self, name: str, parameter: Tensor, sizes: Sizes) -> None:
        """Initialize as recurrentgemma does: exp(-softplus(L)) uniform by area between the radii 0.9 and 0.999."""
        if name == "decay":
            with torch.no_grad():
                log_a = parameter.uniform_(_FAST**2, _SLOW**2).log_().mul_(0.5)
                log_a.neg_().expm1_().log_()  # softplus(decay) = -log a
        elif name == "weight_conv":
            nn.init.normal_(parameter, std=math.sqrt(_CONV_VARIANCE / self.conv_width))
        else:
            super().initialize(name, parameter, sizes)

    def step(  # noqa: PLR0913 # pyright: ignore[reportIncompatibleMethodOverride] - the contract: weights by name
        self,
        x: Tensor,
        states: States,
        scale_branches: Tensor,
        weight_branches: Tensor,
        weight_gates: Tensor,
        decay: Tensor,
        weight_out: Tensor,
        bias_branches: Tensor | None = None,
        bias_gates: Tensor | None = None,
        bias_out: Tensor | None = None,
        weight_in: Tensor | None = None,
        bias_in: Tensor | None = None,
        weight_conv: Tensor | None = None,
        bias_conv: Tensor | None = None,
        scale_up: Tensor | None = None,
        weight_up: Tensor | None = None,
        bias_up: Tensor | None = None,
        weight_down: Tensor | None = None,
        bias_down: Tensor | None = None,
        *,
        time: Time = ONE_STEP,
    ) -> tuple[Tensor, States]:
        """Return the features and the states after one step."""
        x = encode(x, weight_in, bias_in)
        gate, inner = F.linear(rms_norm(x, scale_branches), weight_branches, bias_branches).chunk(2, -1)
        inner, window = convolve(time, inner, states[1:], weight_conv, bias_conv)
        gates = torch.einsum("rhi,hoi->rho", heads_of(inner, self.heads), weight_gates)
        gates = gates if bias_gates is None else gates + bias_gates
        recurrence, input_gate = (part.flatten(1).sigmoid() for part in gates.chunk(2, -1))
        log_a = -_SHARPNESS * F.softplus(decay) * recurrence
        h = time.recur(log_a.exp(), _bounded_sqrt(-torch.expm1(2 * log_a)) * input_gate * inner, states[0])
        x = x + F.linear(h * F.gelu(gate, approximate="tanh"), weight_out, bias_out)
        gelu = partial(F.gelu, approximate="tanh")
        return gated_feed_forward(x, gelu, scale_up, weight_up, bias_up, weight_down, bias_down), (h, *window)


def _bounded_sqrt(x: Tensor) -> Tensor:
    """Return the square root for x >= 1e-6; below, a line through 0, so that no slope exceeds 1000."""
    return x * x.clamp(min=_LARGEST_SLOPE**-2).rsqrt()


RGLRU = RGLRUCell()

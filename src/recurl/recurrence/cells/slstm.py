"""sLSTM cell: an LSTM with exponential gates, in the residual block of xLSTM."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recurl.core.errors import ArgumentError
from recurl.recurrence.cells.blocks import (
    Block,
    affine,
    check_conv_width,
    check_flags,
    check_numbers,
    check_sizes,
    convolve,
    encode,
    encoder,
    initialize_convolution,
    number_of_heads,
)
from recurl.recurrence.cells.by_hand import States
from recurl.recurrence.cells.cell import Shape, Sizes
from recurl.recurrence.cells.time import ONE_STEP

_LEAST_BIAS, _LARGEST_BIAS = 3.0, 6.0  # initial biases of sigmoid forget gates


@dataclass(frozen=True, repr=False)
class SLSTMCell(Block, name="slstm"):
    """sLSTM cell: c = f c + i tanh(z), n = f n + i, h = sigmoid(o) c / n, with i = exp(..) and f = sigmoid(..).

    Source: Beck et al., "xLSTM: Extended long short-term memory" (2024), with the post up-projection block of the
    authors' code, NX-AI/xlstm. The paper allows sigmoid and exponential forget gates; sigmoid is the code's.

    The gates i, f, z, o are linear in the layer-normed input and in h, within each head; with a convolution, i and f
    see its SiLU instead of the input. h, layer-normed within each head, is added to the input, then follows a gated
    feed-forward network, W_down (GELU(W_g norm(x)) W_up norm(x)), with a residual connection. As in the code, only the
    gates and the convolution have biases, and there are none in norms.

    The stabilizer m is the logarithm of the largest weight among past inputs: c and n are stored times exp(-m), so that
    no gate overflows. A state with n = 0 holds no input and counts as m = -inf. In all others n is at least 1, and
    foreign states with a smaller n are divided by 1.

    Initial values are those of the code for a single block: zero recurrent matrices, and forget biases evenly spaced
    from 3 to 6 in each head, its ``small_init``. Its default, a power law whose exponent depends on the depth, is not
    possible here, since a cell doesn't know its layer. Without biases, forget gates start half open.

    Args:
        heads: number of blocks of the block-diagonal matrices of the gates; must divide H. The paper uses 4.
        conv_width: number of inputs covered by the convolution; 0 for none. The paper uses 4, or none.
        feed_forward: hidden units of the feed-forward network, as a multiple of H, rounded up; 0 for none.
        exponential_forget: whether f = exp(..). Its initial values are those of the sigmoid.
    """

    heads: int = 1
    conv_width: int = 0
    feed_forward: float = 4 / 3
    exponential_forget: bool = False
    child_name: ClassVar[str] = "slstm"

    def __post_init__(self) -> None:
        check_sizes(heads=(self.heads, 1))
        check_conv_width(self.conv_width)
        check_numbers(feed_forward=self.feed_forward)
        check_flags(exponential_forget=self.exponential_forget)
        if not 0 <= self.feed_forward < math.inf:
            raise ArgumentError(f"feed_forward must be at least 0 and finite, got {self.feed_forward}.")

    @property
    def state_names(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride] - by options
        """Names of the states: h, c, n, m, and the window of the convolution if there is one."""
        return ("h", "c", "n", "m", *(("window",) if self.conv_width else ()))

    def state_shapes(self, sizes: Sizes) -> tuple[Shape, ...]:
        """Return the shape of each state."""
        hidden = sizes.hidden_size
        return (*(((hidden,),) * 4), *(((self.conv_width - 1, hidden),) if self.conv_width else ()))

    def parameters(self, sizes: Sizes) -> Mapping[str, Shape]:
        """Return the shapes of the parameters of one layer.

        Raises:
            ArgumentError: the number of heads doesn't divide H, or leaves 1 unit to a head, whose norm is always 0.
        """
        hidden = sizes.hidden_size
        heads = number_of_heads(self.heads, hidden, "hidden_size", least=2)  # the norm of 1 unit is always 0
        width = hidden // heads
        shapes = encoder(sizes) | {"scale_gates": (hidden,)}
        if self.conv_width:
            shapes |= {"weight_conv": (self.conv_width, hidden)} | ({"bias_conv": (hidden,)} if sizes.bias else {})
        shapes |= {"weight_gates": (heads, 2 * width, width), "weight_cell": (heads, 2 * width, width)}
        shapes |= {"weight_hidden": (heads, 4 * width, width), "scale_hidden": (hidden,)}
        shapes |= {"bias_gates": (heads, 4 * width)} if sizes.bias else {}
        if self.feed_forward:
            up = math.ceil(self.feed_forward * hidden)
            shapes |= {"scale_up": (hidden,)} | affine("up", 2 * up, hidden, bias=False)
            shapes |= affine("down", hidden, up, bias=False)
        return shapes

    def initialize(self, name: str, parameter: Tensor, sizes: Sizes) -> None:
        """Initialize as the authors' code does, for a network of one block."""
        if name == "bias_gates":
            width = sizes.hidden_size // self.heads
            forget = torch.linspace(_LEAST_BIAS, _LARGEST_BIAS, width)
            with torch.no_grad():
                parameter.zero_()[:, width : 2 * width] = F.logsigmoid(forget) if self.exponential_forget else forget
        elif name == "weight_hidden":
            nn.init.zeros_(parameter)
        elif name == "weight_conv":
            initialize_convolution(parameter)
        elif name in ("weight_gates", "weight_cell", "weight_up"):
            nn.init.normal_(parameter, std=math.sqrt(2 / (5 * sizes.hidden_size)))
        elif name == "weight_down":
            nn.init.normal_(parameter, std=2 / math.sqrt(sizes.hidden_size))
        else:
            super().initialize(name, parameter, sizes)

    def step(  # noqa: PLR0913 # pyright: ignore[reportIncompatibleMethodOverride] - the contract: weights by name
        self,
        x: Tensor,
        states: States,
        scale_gates: Tensor,
        weight_gates: Tensor,
        weight_cell: Tensor,
        weight_hidden: Tensor,
        scale_hidden: Tensor,
        bias_gates: Tensor | None = None,
        weight_in: Tensor | None = None,
        bias_in: Tensor | None = None,
        weight_conv: Tensor | None = None,
        bias_conv: Tensor | None = None,
        scale_up: Tensor | None = None,
        weight_up: Tensor | None = None,
        weight_down: Tensor | None = None,
    ) -> tuple[Tensor, States]:
        """Return the features and the states after one step."""
        x = encode(x, weight_in, bias_in)
        normed = F.layer_norm(x, x.shape[-1:], scale_gates)
        seen, window = convolve(ONE_STEP, normed, states[4:], weight_conv, bias_conv)
        seen = seen if weight_conv is None else F.silu(seen)
        gates = torch.cat([self._by_head(seen, weight_gates), self._by_head(normed, weight_cell)], -1)
        gates = gates + self._by_head(states[0], weight_hidden)
        gates = gates if bias_gates is None else gates + bias_gates
        h, *rest = self._recur(states, *(part.flatten(1) for part in gates.chunk(4, -1)))
        per_head = h.unflatten(-1, (self.heads, -1))
        x = x + F.layer_norm(per_head, per_head.shape[-1:]).flatten(1) * scale_hidden
        if scale_up is not None and weight_up is not None and weight_down is not None:
            opening, value = F.linear(F.layer_norm(x, x.shape[-1:], scale_up), weight_up).chunk(2, -1)
            x = x + F.linear(F.gelu(opening) * value, weight_down)
        return x, (h, *rest, *window)

    def _by_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the product with a block-diagonal matrix, ``[R, heads, outputs of a head]``."""
        return torch.einsum("rhi,hoi->rho", x.unflatten(-1, (self.heads, -1)), weight)

    def _recur(self, states: States, enter: Tensor, forget: Tensor, value: Tensor, leave: Tensor) -> States:
        """Return h, c, n and m after one step, given the gates before activation."""
        _, c, n, m, *_ = states
        kept = torch.where(n == 0, -torch.inf, m) + (forget if self.exponential_forget else F.logsigmoid(forget))
        m = torch.maximum(enter, kept)
        i, f = (enter - m).exp(), (kept - m).exp()
        c, n = f * c + i * value.tanh(), f * n + i
        return leave.sigmoid() * c / n.clamp(min=1), c, n, m


SLSTM = SLSTMCell()

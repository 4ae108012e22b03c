"""minGRU and minLSTM cells, whose gates depend only on the input."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

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
    rms_norm,
)
from recurl.recurrence.cells.by_hand import States
from recurl.recurrence.cells.cell import Shape, Sizes
from recurl.recurrence.cells.time import ONE_STEP, Time


@dataclass(frozen=True, repr=False)
class Minimal(Block):
    """Block of minGRU and minLSTM: convolution, recurrence and feed-forward network, each with a residual connection.

    The cells follow Feng et al. 2024, "Were RNNs all we needed?". The block follows Wang's minGRU-pytorch, with root
    mean square norms before the recurrence and the feed-forward network.

    Args:
        state_size: S, width of the state; None for H.
        conv_width: number of inputs covered by a convolution before the recurrence; 0 for none.
        feed_forward: hidden units of the feed-forward network, as a multiple of H; 0 for none.
    """

    state_size: int | None = None
    conv_width: int = 0
    feed_forward: int = 4
    num_gates: ClassVar[int]

    def __post_init__(self) -> None:
        check_optional_sizes(state_size=(self.state_size, 1))
        check_sizes(feed_forward=(self.feed_forward, 0))
        check_conv_width(self.conv_width)

    @property
    def state_names(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride] - by options
        """Names of the states: h, and the window of the convolution if there is one."""
        return ("h", "window") if self.conv_width else ("h",)

    def state_shapes(self, sizes: Sizes) -> tuple[Shape, ...]:
        """Return the shape of each state."""
        hidden = sizes.hidden_size
        window = ((self.conv_width - 1, hidden),) if self.conv_width else ()
        return ((self.state_size or hidden,), *window)

    def parameters(self, sizes: Sizes) -> Mapping[str, Shape]:
        """Return the shapes of the parameters of one layer."""
        hidden, bias = sizes.hidden_size, sizes.bias
        state = self.state_size or hidden
        shapes = encoder(sizes)
        if self.conv_width:
            shapes |= {"weight_conv": (self.conv_width, hidden)} | ({"bias_conv": (hidden,)} if bias else {})
        shapes |= {"scale_gates": (hidden,)} | affine("gates", self.num_gates * state, hidden, bias)
        if state != hidden:
            shapes |= affine("out", hidden, state, bias)
        if self.feed_forward:
            width = self.feed_forward * hidden
            shapes |= {"scale_up": (hidden,)} | affine("up", width, hidden, bias) | affine("down", hidden, width, bias)
        return shapes

    def initialize(self, name: str, parameter: Tensor, sizes: Sizes) -> None:
        """Initialize matrices and the convolution as ``torch.nn`` does, from U(-1/sqrt(inputs), 1/sqrt(inputs))."""
        if name.startswith("weight"):
            bound = 1 / math.sqrt(self.conv_width if name == "weight_conv" else parameter.shape[-1])
            nn.init.uniform_(parameter, -bound, bound)
        else:
            super().initialize(name, parameter, sizes)

    @abstractmethod
    def coefficients(self, gates: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return a and b of the recurrence from the pre-activations, each ``[R, S]``."""

    def step(  # noqa: PLR0913 # pyright: ignore[reportIncompatibleMethodOverride] - the contract: weights by name
        self,
        x: Tensor,
        states: States,
        scale_gates: Tensor,
        weight_gates: Tensor,
        bias_gates: Tensor | None = None,
        weight_in: Tensor | None = None,
        bias_in: Tensor | None = None,
        weight_conv: Tensor | None = None,
        bias_conv: Tensor | None = None,
        weight_out: Tensor | None = None,
        bias_out: Tensor | None = None,
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
        seen, window = convolve(time, x, states[1:], weight_conv, bias_conv)
        x = x if weight_conv is None else x + seen
        gates = F.linear(rms_norm(x, scale_gates), weight_gates, bias_gates)
        h = time.recur(*self.coefficients(gates.chunk(self.num_gates, -1)), states[0])
        x = x + encode(h, weight_out, bias_out)
        if scale_up is not None and weight_up is not None and weight_down is not None:
            hidden = F.gelu(F.linear(rms_norm(x, scale_up), weight_up, bias_up))
            x = x + F.linear(hidden, weight_down, bias_down)
        return x, (h, *window)


class MinGRUCell(Minimal, name="mingru"):
    """minGRU: h = (1 - z) h + z c with z = sigmoid(W_z x) and c = W_h x (Feng et al. 2024, section 3.1)."""

    child_name = "mingru"
    num_gates = 2

    def coefficients(self, gates: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return a and b of the recurrence."""
        update, candidate = gates
        return (-update).sigmoid(), update.sigmoid() * candidate


class MinLSTMCell(Minimal, name="minlstm"):
    """minLSTM: h = f' h + i' c, with c = W_h x and forget and input gates f', i' that sum to 1.

    This is the variant of Feng et al. 2024, section 3.2, whose scale is independent of time: f' = f / (f + i), where f
    and i are sigmoids. It is computed as the sigmoid of the difference of their logarithms, which can't overflow.
    """

    child_name = "minlstm"
    num_gates = 3

    def coefficients(self, gates: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return a and b of the recurrence."""
        forget, input_gate, candidate = gates
        log_odds = F.softplus(-input_gate) - F.softplus(-forget)
        return log_odds.sigmoid(), (-log_odds).sigmoid() * candidate


MINGRU, MINLSTM = MinGRUCell(), MinLSTMCell()

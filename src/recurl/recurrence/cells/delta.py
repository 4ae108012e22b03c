"""Gated DeltaNet cell: a matrix memory that replaces what it holds for a key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

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
    heads_and_width,
    heads_of,
    initialize_convolution,
    initialize_step_offset,
    rms_norm,
)
from recurl.recurrence.cells.by_hand import States
from recurl.recurrence.cells.cell import Shape, Sizes
from recurl.recurrence.cells.time import ONE_STEP, Time

_LARGEST_RATE = 16.0


@dataclass(frozen=True, repr=False)
class GatedDeltaNetCell(Block, name="gated_deltanet"):
    """Gated DeltaNet cell: S = a (I - b k k^T) S + b k v^T, read as S^T q, one matrix per head.

    Source: Yang, Kautz and Hatamizadeh, "Gated delta networks" (2025), with the block of its code: queries, keys and
    values are linear maps of the input (after a root mean square norm), then a convolution and SiLU; queries and keys
    have length one; b = sigmoid(W_b x), log a = -exp(A) softplus(W_a x + d); results are normed per head, multiplied by
    SiLU(W_g x) and mapped to the block's width. A gated feed-forward network follows, each part with a residual
    connection.

    Args:
        heads: number of heads, which must divide H unless ``key_size`` is given; None for 4, 2 or 1, the first that
            does.
        key_size: K, width of a key; None for H / heads.
        value_size: V, width of a value; None for K. The paper doubles it.
        conv_width: number of inputs covered by the convolution; 0 for none.
        feed_forward: hidden units of the feed-forward network, as a multiple of H; 0 for none.
    """

    heads: int | None = None
    key_size: int | None = None
    value_size: int | None = None
    conv_width: int = 4
    feed_forward: int = 3
    child_name: ClassVar[str] = "gated_deltanet"
    states_at_ends: ClassVar[tuple[str, ...]] = ("h",)
    read_at_starts: ClassVar[tuple[str, ...]] = ("h",)

    def __post_init__(self) -> None:
        check_optional_sizes(heads=(self.heads, 1), key_size=(self.key_size, 1), value_size=(self.value_size, 1))
        check_sizes(feed_forward=(self.feed_forward, 0))
        check_conv_width(self.conv_width)

    def _matrices(self, sizes: Sizes) -> tuple[int, int, int]:
        """Return the number of heads, K and V."""
        heads, key = heads_and_width(self.heads, self.key_size, sizes.hidden_size, "key_size")
        return heads, key, self.value_size or key

    @property
    def state_names(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride] - by options
        """Names of the states: h, the matrices, and the window of the convolution if there is one."""
        return ("h", "window") if self.conv_width else ("h",)

    def state_shapes(self, sizes: Sizes) -> tuple[Shape, ...]:
        """Return the shape of each state."""
        heads, key, value = self._matrices(sizes)
        window = (self.conv_width - 1, heads * (2 * key + value))
        return ((heads, key, value), *((window,) if self.conv_width else ()))

    def parameters(self, sizes: Sizes) -> Mapping[str, Shape]:
        """Return the shapes of the parameters of one layer."""
        hidden, bias = sizes.hidden_size, sizes.bias
        heads, key, value = self._matrices(sizes)
        inner = heads * (2 * key + value)
        shapes = encoder(sizes) | {"scale_norm": (hidden,)}
        shapes |= affine("branches", inner + heads * value, hidden, bias=False)
        shapes |= affine("gates", 2 * heads, hidden, bias=False)
        if self.conv_width:
            shapes |= {"weight_conv": (self.conv_width, inner)} | ({"bias_conv": (inner,)} if bias else {})
        shapes |= {"decay": (heads,), "step_offset": (heads,), "scale_heads": (value,)}
        shapes |= affine("out", hidden, heads * value, bias)
        if self.feed_forward:
            width = self.feed_forward * hidden
            shapes |= {"scale_up": (hidden,)}
            shapes |= affine("up", 2 * width, hidden, bias) | affine("down", hidden, width, bias)
        return shapes

    def initialize(self, name: str, parameter: Tensor, sizes: Sizes) -> None:
        """Initialize as the paper's code does: exp(A) uniform up to 16, softplus(d) log-uniform from 0.001 to 0.1."""
        if name == "decay":
            with torch.no_grad():
                parameter.uniform_(0.0, _LARGEST_RATE).clamp_(min=1e-4).log_()
        elif name == "step_offset":
            initialize_step_offset(parameter)
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
        weight_gates: Tensor,
        decay: Tensor,
        step_offset: Tensor,
        scale_heads: Tensor,
        weight_out: Tensor,
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
        normed = rms_norm(x, scale_norm)
        heads = decay.shape[0]
        keys, values = heads * states[0].shape[-2], heads * states[0].shape[-1]
        inner, opening = F.linear(normed, weight_branches).split([2 * keys + values, values], -1)
        inner, window = convolve(time, inner, states[1:], weight_conv, bias_conv)
        query, key, value = (heads_of(part, heads) for part in F.silu(inner).split([keys, keys, values], -1))
        query, key = (F.normalize(part, dim=-1, eps=1e-6) for part in (query, key))
        rate, step = F.linear(normed, weight_gates).chunk(2, -1)
        log_decay = -decay.exp() * F.softplus(step + step_offset)
        scale = query.shape[-1] ** -0.5
        read, h = time.remember(scale * query, key, value, log_decay, rate.sigmoid(), states[0], delta=True)
        read = rms_norm(read, scale_heads).flatten(1) * F.silu(opening)
        x = x + F.linear(read, weight_out, bias_out)
        return gated_feed_forward(x, F.silu, scale_up, weight_up, bias_up, weight_down, bias_down), (h, *window)


GATED_DELTANET = GatedDeltaNetCell()

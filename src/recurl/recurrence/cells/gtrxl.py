"""GTrXL (gated Transformer-XL) cell."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recurl.core.errors import ArgumentError
from recurl.recurrence.cells.attention import Attention, sinusoids
from recurl.recurrence.cells.blocks import (
    Block,
    affine,
    check_numbers,
    check_optional_sizes,
    check_sizes,
    encode,
    encoder,
    heads_and_width,
    heads_of,
    number_of_heads,
)
from recurl.recurrence.cells.by_hand import States
from recurl.recurrence.cells.cell import Shape, Sizes
from recurl.recurrence.cells.time import ONE_STEP, Time

_GATES = ("attention", "feed_forward")


@dataclass(frozen=True, repr=False)
class GTrXLCell(Block, name="gtrxl"):
    """GTrXL cell: a Transformer-XL block with gates, whose memory is a window of its past inputs.

    Source: Parisotto et al., "Stabilizing transformers for reinforcement learning" (2020), with GRU-type gates and
    identity map reordering; attention with relative positions as in Dai et al., "Transformer-XL" (2019).

    With x the block's input, each token attends to its own input and the M before it in its episode, all layer-normed:
    y = gate(x, relu(attention(x))), and the features are gate(y, relu(f(norm(y)))), where f has one hidden layer with
    ReLU. A gate is a GRU whose update starts nearly closed: gate(x, y) = (1 - z) x + z tanh(W_h y + U_h (r x)),
    z = sigmoid(W_z y + U_z x - b), r = sigmoid(W_r y + U_r x).

    The state holds the last M inputs of the block, normed without scale and bias, oldest first, each followed by 1;
    what lies before the episode is 0, and isn't attended to. So L layers look back L M steps. Gradients reach the past
    inputs of the same sequence. The papers cut episodes into segments of which a token sees all, and the M inputs
    before; here it is always M.

    Args:
        window: M.
        heads: number of heads, which must divide H unless ``head_size`` is given; None for 4, 2 or 1, the first that
            does.
        head_size: width of a head; None for H / heads.
        feed_forward: hidden units of f, as a multiple of H.
        gate_bias: initial b.
    """

    window: int = 64
    heads: int | None = None
    head_size: int | None = None
    feed_forward: int = 4
    gate_bias: float = 2.0
    decays: ClassVar[bool] = False
    child_name: ClassVar[str] = "gtrxl"
    read_at_starts: ClassVar[tuple[str, ...]] = ("h",)

    def __post_init__(self) -> None:
        check_optional_sizes(heads=(self.heads, 1), head_size=(self.head_size, 1))
        check_sizes(window=(self.window, 1), feed_forward=(self.feed_forward, 1))
        check_numbers(gate_bias=self.gate_bias)
        if not math.isfinite(self.gate_bias):
            raise ArgumentError(f"gate_bias must be finite, got {self.gate_bias}.")

    def state_shapes(self, sizes: Sizes) -> tuple[Shape, ...]:
        """Return the shape of each state."""
        return ((self.window, sizes.hidden_size + 1),)

    def attention(self, hidden_size: int) -> tuple[int, int]:
        """Return the widths of heads and of stored inputs."""
        heads = self.heads or number_of_heads(None, hidden_size, "hidden_size")
        return self.head_size or max(1, hidden_size // heads), hidden_size + 1

    def _heads(self, hidden_size: int) -> tuple[int, int]:
        """Return the number of heads and their width."""
        return heads_and_width(self.heads, self.head_size, hidden_size, "head_size")

    def parameters(self, sizes: Sizes) -> Mapping[str, Shape]:
        """Return the shapes of the parameters of one layer."""
        hidden = sizes.hidden_size
        inner = math.prod(self._heads(hidden))
        shapes = encoder(sizes)
        for name in ("query", "key", "value", "position"):
            shapes |= affine(name, inner, hidden, bias=False)
        shapes |= {"bias_content": (inner,), "bias_position": (inner,)} | affine("out", hidden, inner, bias=False)
        shapes |= affine("up", self.feed_forward * hidden, hidden, sizes.bias)
        shapes |= affine("down", hidden, self.feed_forward * hidden, sizes.bias)
        for name in _GATES:
            shapes |= {f"scale_{name}": (hidden,)} | ({f"bias_{name}": (hidden,)} if sizes.bias else {})
            shapes |= {f"weight_{name}_y": (3 * hidden, hidden), f"weight_{name}_x": (2 * hidden, hidden)}
            shapes |= {f"weight_{name}_reset": (hidden, hidden), f"gate_{name}": (hidden,)}
        return shapes

    def initialize(self, name: str, parameter: Tensor, sizes: Sizes) -> None:
        """Initialize b, and other parameters as :class:`Block` does."""
        if name.startswith("gate"):
            nn.init.constant_(parameter, self.gate_bias)
        else:
            super().initialize(name, parameter, sizes)

    def step(  # noqa: PLR0913 # pyright: ignore[reportIncompatibleMethodOverride] - the contract: weights by name
        self,
        x: Tensor,
        states: States,
        weight_query: Tensor,
        weight_key: Tensor,
        weight_value: Tensor,
        weight_position: Tensor,
        weight_out: Tensor,
        bias_content: Tensor,
        bias_position: Tensor,
        weight_up: Tensor,
        weight_down: Tensor,
        scale_attention: Tensor,
        weight_attention_y: Tensor,
        weight_attention_x: Tensor,
        weight_attention_reset: Tensor,
        gate_attention: Tensor,
        scale_feed_forward: Tensor,
        weight_feed_forward_y: Tensor,
        weight_feed_forward_x: Tensor,
        weight_feed_forward_reset: Tensor,
        gate_feed_forward: Tensor,
        bias_attention: Tensor | None = None,
        bias_feed_forward: Tensor | None = None,
        bias_up: Tensor | None = None,
        bias_down: Tensor | None = None,
        weight_in: Tensor | None = None,
        bias_in: Tensor | None = None,
        *,
        time: Time = ONE_STEP,
    ) -> tuple[Tensor, States]:
        """Return the features and the states after one step."""
        x = encode(x, weight_in, bias_in)
        heads, size = self._heads(x.shape[-1])
        split = partial(heads_of, heads=heads)
        plain = F.layer_norm(x, x.shape[-1:])
        normed = plain * scale_attention if bias_attention is None else plain * scale_attention + bias_attention
        query = F.linear(normed, weight_query)
        distances = split(F.linear(sinusoids(self.window + 1, x.shape[-1], x), weight_position))
        position = torch.einsum("rhd,phd->rhp", split(query + bias_position), distances)
        scale = size**-0.5
        attention = Attention(
            scale * split(query + bias_content),
            split(F.linear(normed, weight_key)),
            split(F.linear(normed, weight_value)),
            scale * position,
            _of_inputs(weight_key, scale_attention, bias_attention, heads),
            _of_inputs(weight_value, scale_attention, bias_attention, heads),
        )
        inputs = torch.cat([plain, torch.ones_like(x[:, :1])], 1)
        attended, after = time.attend(attention, inputs, states[0])
        attended = F.linear(attended.flatten(1), weight_out).relu()
        y = _gate(x, attended, weight_attention_y, weight_attention_x, weight_attention_reset, gate_attention)
        hidden = F.layer_norm(y, y.shape[-1:], scale_feed_forward, bias_feed_forward)
        hidden = F.linear(F.linear(hidden, weight_up, bias_up).relu(), weight_down, bias_down).relu()
        weights = weight_feed_forward_y, weight_feed_forward_x, weight_feed_forward_reset, gate_feed_forward
        return _gate(y, hidden, *weights), (after,)


def _of_inputs(weight: Tensor, scale: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    """Return the map to keys or values of an input that is followed by 1, ``[heads, D, H + 1]``."""
    constant = torch.zeros_like(weight[:, 0]) if bias is None else weight @ bias
    return torch.cat([weight * scale, constant.unsqueeze(1)], 1).unflatten(0, (heads, -1))


def _gate(x: Tensor, y: Tensor, weight_y: Tensor, weight_x: Tensor, weight_reset: Tensor, bias: Tensor) -> Tensor:
    """Return the GRU-type gate of x, which passes, and y, which is let in."""
    of_y, of_x = F.linear(y, weight_y), F.linear(x, weight_x)
    (reset_y, update_y, new_y), (reset_x, update_x) = of_y.chunk(3, -1), of_x.chunk(2, -1)
    reset, update = (reset_y + reset_x).sigmoid(), (update_y + update_x - bias).sigmoid()
    new = (new_y + F.linear(reset * x, weight_reset)).tanh()
    return (1 - update) * x + update * new


GTRXL = GTrXLCell()

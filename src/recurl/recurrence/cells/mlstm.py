"""mLSTM cell: a matrix memory with exponential input gates."""

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
    number_of_heads,
)
from recurl.recurrence.cells.by_hand import States
from recurl.recurrence.cells.cell import Shape, Sizes
from recurl.recurrence.cells.time import ONE_STEP, Time

_FORGET_BIASES = 3.0, 6.0
_INPUT_BIAS_STD = 0.1
_LARGEST_EXPONENT = 80.0
_NORM_EPSILON = 1e-5  # of torch.nn.LayerNorm
_LEAST = 1e-15  # size of a query, and divisor of one of size 1; the authors add 1e-6 to divisors of all queries


@dataclass(frozen=True, repr=False)
class MLSTMCell(Block, name="mlstm"):
    """mLSTM cell: C = f C + i k v^T and n = f n + i k, read as C^T q / max(|n q|, 1), one matrix per head.

    Source: Beck et al., "xLSTM" (2024), with f = sigmoid, i = exp, and the block of its code: after a layer norm, the
    input is mapped to two branches; one passes a convolution and SiLU, from which queries and keys come, values come
    from the branch before it; the result is normed per head, joined by the convolution's output, multiplied by SiLU of
    the other branch, and mapped to the block's width, with a residual connection. Each head has dense maps to queries,
    keys and values, where the paper's code has blocks of 4.

    The states are those of the paper's stabilized form, C' = C / exp(m) and n' = n / exp(m) with m = max(log f + m,
    log i); m begins at 0, which changes no result.

    Args:
        heads: number of heads, which must divide the width of the branches; None for 4, 2 or 1, the first that does.
        expand: width of the branches as a multiple of H.
        conv_width: number of inputs covered by the convolution; 0 for none.
    """

    heads: int | None = None
    expand: int = 2
    conv_width: int = 4
    child_name: ClassVar[str] = "mlstm"
    states_at_ends: ClassVar[tuple[str, ...]] = ("h",)
    read_at_starts: ClassVar[tuple[str, ...]] = ("h",)

    def __post_init__(self) -> None:
        check_optional_sizes(heads=(self.heads, 1))
        check_sizes(expand=(self.expand, 1))
        check_conv_width(self.conv_width)

    def _heads(self, sizes: Sizes) -> tuple[int, int]:
        """Return the number of heads and their width."""
        width = self.expand * sizes.hidden_size
        heads = number_of_heads(self.heads, width, "the width of the branches, expand times hidden_size", least=2)
        return heads, width // heads

    @property
    def state_names(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride] - by options
        """Names of the states: h (the matrices), n, m, and the window of the convolution if there is one."""
        return ("h", "n", "m", *(("window",) if self.conv_width else ()))

    def state_shapes(self, sizes: Sizes) -> tuple[Shape, ...]:
        """Return the shape of each state."""
        heads, size = self._heads(sizes)
        window = (self.conv_width - 1, heads * size)
        shapes = (heads, size, size), (heads, size), (heads,)
        return (*shapes, *((window,) if self.conv_width else ()))

    def parameters(self, sizes: Sizes) -> Mapping[str, Shape]:
        """Return the shapes of the parameters of one layer."""
        hidden, bias, (heads, size) = sizes.hidden_size, sizes.bias, self._heads(sizes)
        width = heads * size
        shapes = encoder(sizes) | {"scale_norm": (hidden,)} | affine("branches", 2 * width, hidden, bias)
        if self.conv_width:
            shapes |= {"weight_conv": (self.conv_width, width)} | ({"bias_conv": (width,)} if bias else {})
        shapes |= {f"weight_{name}": (heads, size, size) for name in ("query", "key", "value")}
        shapes |= {"weight_gates": (2 * heads, 3 * width), "gates_input": (heads,)}
        shapes |= {"gates_forget": (heads,), "scale_heads": (width,), "skip": (width,)}
        return shapes | affine("out", hidden, width, bias)

    def initialize(self, name: str, parameter: Tensor, sizes: Sizes) -> None:
        """Initialize as the paper's code does: gates from their biases, forget gates from 3 to 6."""
        if name == "weight_gates":
            nn.init.zeros_(parameter)
        elif name == "gates_input":
            nn.init.normal_(parameter, std=_INPUT_BIAS_STD)
        elif name == "gates_forget":
            with torch.no_grad():
                parameter.copy_(torch.linspace(*_FORGET_BIASES, parameter.shape[0]))
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
        weight_query: Tensor,
        weight_key: Tensor,
        weight_value: Tensor,
        weight_gates: Tensor,
        gates_input: Tensor,
        gates_forget: Tensor,
        scale_heads: Tensor,
        skip: Tensor,
        weight_out: Tensor,
        bias_branches: Tensor | None = None,
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
        before, normalizer, maximum, *window = states
        normed = F.layer_norm(x, x.shape[-1:], scale_norm)
        inner, opening = F.linear(normed, weight_branches, bias_branches).chunk(2, -1)
        mixed, window = convolve(time, inner, tuple(window), weight_conv, bias_conv)
        mixed = F.silu(mixed)
        query, key, value = (
            torch.einsum("rhi,hoi->rho", heads_of(part, weight.shape[0]), weight)
            for part, weight in ((mixed, weight_query), (mixed, weight_key), (inner, weight_value))
        )
        gates = F.linear(torch.cat([query, key, value], 1).flatten(1), weight_gates)
        enter, forget = gates.chunk(2, -1)
        enter, forget = enter + gates_input, F.logsigmoid(forget + gates_forget)
        latest = time.recur_max(forget, enter, maximum)
        previous = time.window(latest, maximum.unsqueeze(1))[:, 0]
        log_decay, rate = (forget + previous - latest).clamp(max=0), (enter - latest).exp()
        key = key * key.shape[-1] ** -0.5
        wide = latest.to(torch.promote_types(latest.dtype, torch.float32))  # float16 ends at exp(11)
        least = (-wide).clamp(max=_LARGEST_EXPONENT).exp().unsqueeze(-1)
        # Dividend and divisor are scaled by the larger of exp(-m) and the query: their gradients don't overflow.
        unit = _power_of_two(torch.maximum(query.abs().amax(-1, keepdim=True), least).clamp(min=_LEAST))
        query = (query / unit).to(key.dtype)
        read, h = time.remember(query, key, value, log_decay, rate, before)
        n = time.recur(log_decay.exp().unsqueeze(-1).expand_as(key), rate.unsqueeze(-1) * key, normalizer)
        scale = torch.maximum((n * query).sum(-1, keepdim=True).abs(), (least / unit).clamp(min=_LEAST))
        read = _normed_quotient(read, scale).flatten(1) * scale_heads
        read = (read + skip * mixed) * F.silu(opening)
        return x + F.linear(read, weight_out, bias_out), (h, n, latest, *window)


def _normed_quotient(x: Tensor, divisor: Tensor) -> Tensor:
    """Return ``layer_norm(x / divisor)``, which depends on the divisor only through the norm's epsilon.

    Dividing first would lose that dependence, and with it the gradient of n, to rounding. Both are scaled by their
    largest number, as the square of exp(-50) is 0 in float32. The divisor is at least float32 and not 0, and the result
    has the dtype of ``x``.
    """
    centered, least = x.to(divisor.dtype), _NORM_EPSILON**0.5 * divisor
    centered = centered - centered.mean(-1, keepdim=True)
    unit = _power_of_two(torch.maximum(centered.abs().amax(-1, keepdim=True), least))
    centered, least = centered / unit, least / unit
    spread = centered.square().mean(-1, keepdim=True) + least.square()
    return (centered * spread.rsqrt()).to(x.dtype)


def _power_of_two(x: Tensor) -> Tensor:
    """Return the largest power of two up to each number, without a gradient: scaling by it doesn't round."""
    return x.detach().log2().floor().exp2()


MLSTM = MLSTMCell()

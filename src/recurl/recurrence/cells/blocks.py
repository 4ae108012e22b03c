"""Cells that are blocks, and their parts: linear maps, norms and convolutions, with their shapes and first values."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recurl.core.errors import ArgumentError, ArgumentTypeError
from recurl.recurrence.cells.by_hand import States
from recurl.recurrence.cells.cell import Cell, Shape, Sizes
from recurl.recurrence.cells.time import Time

_EPSILON = 1e-6
_STEPS = 0.001, 0.1
_DEFAULT_HEADS = 4, 2, 1


def affine(name: str, outputs: int, inputs: int, bias: bool) -> dict[str, Shape]:
    """Return the shapes of ``weight_<name>`` and ``bias_<name>`` of a linear map."""
    return {f"weight_{name}": (outputs, inputs)} | ({f"bias_{name}": (outputs,)} if bias else {})


def encoder(sizes: Sizes) -> dict[str, Shape]:
    """Return the shapes of the linear map to the block's width; empty if the input already has this width."""
    if sizes.input_size == sizes.hidden_size:
        return {}
    return affine("in", sizes.hidden_size, sizes.input_size, sizes.bias)


def encode(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return the input of the block, ``[R, H]``."""
    return x if weight is None else F.linear(x, weight, bias)


def rms_norm(x: Tensor, scale: Tensor) -> Tensor:
    """Return ``x`` divided by its root mean square (Zhang and Sennrich 2019), scaled; squares are at least float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (wide.square().mean(-1, keepdim=True) + _EPSILON).rsqrt()).to(x.dtype) * scale


def gated_feed_forward(
    x: Tensor,
    activation: Callable[[Tensor], Tensor],
    scale: Tensor | None,
    weight_up: Tensor | None,
    bias_up: Tensor | None,
    weight_down: Tensor | None,
    bias_down: Tensor | None,
) -> Tensor:
    """Return x + W_down (activation(W_g u) W_up u), with u the root mean square norm of x; x without weights."""
    if scale is None or weight_up is None or weight_down is None:
        return x
    gate, up = F.linear(rms_norm(x, scale), weight_up, bias_up).chunk(2, -1)
    return x + F.linear(activation(gate) * up, weight_down, bias_down)


def convolve(
    time: Time, x: Tensor, before: States, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, States]:
    """Apply a causal depthwise convolution; return its result and the next window.

    Without a ``weight``, returns ``x`` and an empty tuple.

    Args:
        time: access to past inputs.
        x: ``[R, D]``.
        before: the window, ``([R, W - 1, D],)``.
        weight: ``[W, D]``, oldest first, or None.
        bias: ``[D]`` or None.
    """
    if weight is None:
        return x, ()
    window = time.window(x, before[0])
    result = (window * weight).sum(1)
    return (result if bias is None else result + bias), (window[:, 1:],)


def heads_of(x: Tensor, heads: int) -> Tensor:
    """Return ``[..., D]`` as ``[..., heads, D / heads]``."""
    return x.unflatten(-1, (heads, -1))


def number_of_heads(heads: int | None, width: int, what: str, least: int = 1, instead: str = "") -> int:
    """Return ``heads``, or for None 4, 2 or 1: the largest that divides ``width`` into parts of ``least`` or more.

    Raises:
        ArgumentError: ``heads`` is more than 1 and doesn't do so; ``what`` names the width, and ``instead`` an option
            with which any number would do.
    """
    fitting = [number for number in range(1, width + 1) if width % number == 0 and width // number >= least] or [1]
    if heads is None:
        return max(number for number in fitting if number in _DEFAULT_HEADS)
    if heads not in fitting:
        parts = f", into parts of {least} or more" if least > 1 else ""
        near = sorted(sorted(fitting, key=lambda number: abs(number - heads))[:3])
        raise ArgumentError(
            f"heads must divide {what}, {width}{parts}; got {heads}. Use {', '.join(map(str, near))}, for example"
            f"{f', or give {instead}' if instead else ''}."
        )
    return heads


def heads_and_width(heads: int | None, width: int | None, hidden_size: int, option: str) -> tuple[int, int]:
    """Return the number of heads and their width, by default H divided among them.

    Args:
        heads: the number, if it is given.
        width: the width, if it is given.
        hidden_size: H.
        option: name of the width, for error messages.
    """
    if heads is None or width is None:
        heads = number_of_heads(heads, hidden_size, "hidden_size", instead=option)
    return heads, width or hidden_size // heads


def initialize_convolution(weight: Tensor) -> None:
    """Initialize the weight ``[W, D]`` of a convolution as ``torch.nn.Conv1d`` does, from U(-1/sqrt(W), 1/sqrt(W))."""
    bound = 1 / math.sqrt(weight.shape[0])
    nn.init.uniform_(weight, -bound, bound)


def initialize_step_offset(offset: Tensor) -> None:
    """Initialize an offset so that its softplus is log-uniform between 0.001 and 0.1, as Mamba does."""
    low, high = _STEPS
    with torch.no_grad():
        step = offset.uniform_(math.log(low), math.log(high)).exp_()
        step += torch.log(-torch.expm1(-step))  # the inverse of softplus


def check_sizes(**least: tuple[int, int]) -> None:
    """Check that sizes are integers and not too small; each is given with its minimum."""
    for name, (size, smallest) in least.items():
        if not isinstance(size, int) or isinstance(size, bool):  # pyright: ignore[reportUnnecessaryIsInstance] - users
            raise ArgumentTypeError(f"{name} must be an int, got {size!r}.")
        if size < smallest:
            raise ArgumentError(f"{name} must be at least {smallest}, got {size}.")


def check_optional_sizes(**least: tuple[int | None, int]) -> None:
    """Check sizes that may also be None."""
    check_sizes(**{name: (size, smallest) for name, (size, smallest) in least.items() if size is not None})


def check_flags(**values: object) -> None:
    """Check that values are bools."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ArgumentTypeError(f"{name} must be True or False, got {value!r}.")


def check_numbers(**values: object) -> None:
    """Check that values are real numbers."""
    for name, value in values.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ArgumentTypeError(f"{name} must be a number, got {value!r}.")


def check_conv_width(width: int) -> None:
    """Check the width of a convolution: 0 for none, otherwise the number of inputs that it covers, at least 2."""
    check_sizes(conv_width=(width, 0))
    if width == 1:
        raise ArgumentError("conv_width must be 0, for none, or at least 2: a convolution over 1 input has no memory.")


class Block(Cell):
    """Recurrence inside the residual block of its paper.

    Unless a cell overrides it, matrices are initialized from N(0, 1 / inputs), norm scales to 1 and biases to 0.
    """

    decays = True

    def initialize(self, name: str, parameter: Tensor, sizes: Sizes) -> None:
        """Initialize one parameter."""
        if name.startswith("scale"):
            nn.init.ones_(parameter)
        elif name.startswith("bias"):
            nn.init.zeros_(parameter)
        else:
            nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[-1]))

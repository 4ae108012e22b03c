"""Layers of torch.nn that run on recurl's backends, in the place that they have in a model."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from recurl.core.torch_compat import is_exporting
from recurl.nn.plain import is_tracing
from recurl.nn.rnn import GRU, LSTM

__all__ = ["SwappedGRU", "SwappedLSTM", "is_swapped", "is_traced", "swap_layer"]


class SwappedLSTM(LSTM, nn.LSTM):
    """A ``torch.nn.LSTM``, with its Parameters, hooks and place in a model, that runs as :class:`recurl.nn.LSTM` does.

    Packed sequences, and models that are exported or traced, run torch's own operations.
    """

    def forward(self, input: Any, hx: Any = None, resets: Tensor | None = None) -> Any:  # noqa: A002 - torch.nn's name
        """Run sequences, as :meth:`recurl.nn.LSTM.forward`."""
        if resets is None and (isinstance(input, PackedSequence) or is_traced()):
            return nn.LSTM.forward(self, input, hx)
        return LSTM.forward(self, input, hx, resets)


class SwappedGRU(GRU, nn.GRU):
    """A ``torch.nn.GRU`` that runs as :class:`recurl.nn.GRU` does; see :class:`SwappedLSTM`."""

    def forward(self, input: Any, hx: Any = None, resets: Tensor | None = None) -> Any:  # noqa: A002 - torch.nn's name
        """Run sequences, as :meth:`recurl.nn.GRU.forward`."""
        if resets is None and (isinstance(input, PackedSequence) or is_traced()):
            return nn.GRU.forward(self, input, hx)
        return GRU.forward(self, input, hx, resets)


_SWAPPED: dict[type, type[SwappedLSTM] | type[SwappedGRU]] = {nn.LSTM: SwappedLSTM, nn.GRU: SwappedGRU}


def is_swapped(module: object) -> bool:
    """Return whether a module is a swapped layer."""
    return isinstance(module, SwappedLSTM | SwappedGRU)


def swap_layer(module: nn.Module) -> str | None:
    """Turn a ``torch.nn.LSTM`` or ``GRU`` into a swapped one, in place; return why it can't be, or None.

    Example:
        >>> lstm = nn.LSTM(4, 8)
        >>> swap_layer(lstm), isinstance(lstm, nn.LSTM), lstm(torch.randn(5, 3, 4))[0].shape
        (None, True, torch.Size([5, 3, 8]))
    """
    if is_swapped(module):
        return None
    kind = _SWAPPED.get(type(module))
    if kind is None:
        name = type(module).__name__
        if isinstance(module, nn.RNN):
            return "torch.nn.RNN has no kernels in recurl: use a GRU or an LSTM"
        return f"{name} is a subclass or parametrization of torch.nn's layer, whose own operations a swap would lose"
    if "forward" in vars(module):
        return "its forward has been replaced by an attribute of the object, which would still run torch.nn's"
    dtypes = {parameter.dtype for parameter in module.parameters()}
    if not dtypes <= {torch.float32, torch.float64, torch.bfloat16, torch.float16}:
        return f"its parameters are {', '.join(map(str, dtypes))}: only real floating-point ones are supported"
    module.__class__ = kind
    layer = cast(SwappedLSTM, module)
    layer.python_based = False
    layer._derive()  # pyright: ignore[reportPrivateUsage] - in the place of the constructor
    return None


def is_traced() -> bool:
    """Return whether torch is exporting or tracing the call, in a form that has no resets."""
    jit: Any = torch.jit
    return is_tracing() or jit.is_scripting() or is_exporting()

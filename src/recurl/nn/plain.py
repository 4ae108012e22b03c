"""The layer of torch.nn with the Parameters of a network, for TorchScript and ONNX, which run no code of recurl."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from recurl.core.errors import UnsupportedError
from recurl.core.torch_compat import has_hooks, parameters_of

__all__ = ["is_of_onnx", "is_tracing", "plain_layer"]

_LAYERS: dict[str, type[nn.LSTM] | type[nn.GRU]] = {"lstm": nn.LSTM, "gru": nn.GRU}


def is_tracing() -> bool:
    """Return whether ``torch.jit.trace`` records the call."""
    jit: Any = torch.jit
    return jit.is_tracing()


def is_of_onnx(net: Any) -> bool:
    """Return whether ``torch.onnx.export`` records the call, and ONNX has an operator for the network."""
    return torch.onnx.is_in_onnx_export() and str(net.cell) in _LAYERS


def plain_layer(net: Any) -> nn.LSTM | nn.GRU:
    """Return a ``torch.nn.LSTM`` or ``GRU`` with the same Parameters (not copies) and settings.

    Raises:
        UnsupportedError: torch.nn has no such cell, or the network has hooks, which the layer would lose.
    """
    kind = _LAYERS.get(str(net.cell))
    if kind is None or has_hooks(net):
        why = "has hooks" if kind is not None else f"runs the cell {net.cell}, which torch.nn doesn't have"
        raise UnsupportedError(
            f"torch.jit and ONNX replace a recurl.nn network by torch.nn's LSTM or GRU, but this one {why}. "
            "Use torch.export."
        )
    named = ("num_layers", "bias", "batch_first", "dropout", "bidirectional")
    settings: dict[str, Any] = {name: getattr(net, name) for name in named}
    if kind is nn.LSTM:
        settings["proj_size"] = net.proj_size
    made = kind(net.input_size, net.hidden_size, **settings, device="meta")
    for name, parameter in parameters_of(net).items():
        setattr(made, name, parameter)
    return made.train(net.training)

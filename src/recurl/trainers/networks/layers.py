"""Layers shared by the networks of a run."""

from __future__ import annotations

import math

from torch import nn

from recurl.trainers.config import RunConfig


def initialized(layer: nn.Linear, gain: float) -> nn.Linear:
    """Initialize ``layer`` with orthogonal weights and zero bias, and return it."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def make_head(config: RunConfig, outputs: int, gain: float | None = None) -> nn.Module:
    """Build the layers from the memory to an output of the network, hidden ones only if ``head_width`` is set.

    Args:
        config: provides ``hidden_size``, ``head_width`` and ``head_layers``.
        outputs: size of the output.
        gain: gain of the last layer's orthogonal initialization; None keeps torch's default initialization.
    """
    last = nn.Linear(config.head_width or config.hidden_size, outputs)
    last = last if gain is None else initialized(last, gain)
    if not config.head_width:
        return last
    layers, inputs = list[nn.Module](), config.hidden_size
    for _ in range(config.head_layers):
        layers += [initialized(nn.Linear(inputs, config.head_width), math.sqrt(2)), nn.Tanh()]
        inputs = config.head_width
    return nn.Sequential(*layers, last)

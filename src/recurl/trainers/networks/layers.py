"""Layers that the networks of a run have in common."""

from __future__ import annotations

import math

from torch import nn

from recurl.trainers.config import RunConfig


def initialised(layer: nn.Linear, gain: float) -> nn.Linear:
    """Return ``layer`` with orthogonal weights of this gain and no bias."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def make_head(config: RunConfig, outputs: int, gain: float | None = None) -> nn.Module:
    """Return the layers between the memory and an output of the network: one, or with ``head_width`` two.

    Args:
        config: ``hidden_size`` and ``head_width``.
        outputs: size of the output.
        gain: of the last layer's orthogonal weights; torch's own initialisation when None.
    """
    last = nn.Linear(config.head_width or config.hidden_size, outputs)
    last = last if gain is None else initialised(last, gain)
    if not config.head_width:
        return last
    hidden = initialised(nn.Linear(config.hidden_size, config.head_width), math.sqrt(2))
    return nn.Sequential(hidden, nn.Tanh(), last)

"""Schedules: factors that decay from 1 to 0 over a run, and the learning rate that follows the KL divergence."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from recurl.trainers.config import ADAPTIVE_RANGE, Schedule

_STEP = 1.5

SCHEDULES: dict[Schedule, Callable[[float], float]] = {
    "constant": lambda remaining: 1.0,
    "linear": lambda remaining: remaining,
    "cosine": lambda remaining: (1.0 - math.cos(math.pi * remaining)) / 2.0,
}
"""Factor as a function of the remaining fraction of the run, by name of the schedule.

Example:
    >>> [round(SCHEDULES["cosine"](remaining), 3) for remaining in (1.0, 0.75, 0.5, 0.0)]
    [1.0, 0.854, 0.5, 0.0]
"""


def adapted_rate(rate: Tensor, kl: Tensor, target: float) -> Tensor:
    """Return the learning rate after a KL divergence was measured, without waiting for the device.

    Divided by 1.5 above twice the target, multiplied by 1.5 below half of it, within ``ADAPTIVE_RANGE``; unchanged if
    the divergence is NaN.

    Source: rsl_rl, the library of Rudin et al., "Learning to walk in minutes using massively parallel deep
    reinforcement learning" (2022); after the adaptive KL penalty of Schulman et al., "Proximal policy optimization
    algorithms" (2017), section 4.

    Args:
        rate: learning rate, a scalar.
        kl: KL divergence of the current policy from the one that collected, a scalar on the same device.
        target: the divergence to aim at.

    Example:
        >>> rate = torch.tensor(1e-3)
        >>> [round(adapted_rate(rate, torch.tensor(kl), 0.01).item(), 6) for kl in (0.03, 0.01, 0.004)]
        [0.000667, 0.001, 0.0015]
    """
    lower = torch.where(kl > 2.0 * target, rate / _STEP, rate)
    return torch.where(kl < 0.5 * target, rate * _STEP, lower).clamp(*ADAPTIVE_RANGE)

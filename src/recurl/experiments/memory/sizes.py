"""Hidden sizes with which policies of different cells have equal numbers of parameters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache

from recurl.core.errors import ArgumentError
from recurl.core.seeding import preserved_rng
from recurl.experiments.memory.suites import REFERENCE
from recurl.trainers.algorithms.configs import PPOConfig
from recurl.trainers.algorithms.environment import make_env
from recurl.trainers.algorithms.table import make_agent

TOLERANCE = 0.02
"""Accepted relative difference from the number of parameters of the reference."""
_MULTIPLES = (16, 8, 4, 2, 1)  # multiples of 16 fill the tiles of kernels, and divide into heads
_REFUSED = 64  # successive sizes that a cell may refuse


def equal_size(config: PPOConfig) -> tuple[int, int]:
    """Return a hidden size with the reference's number of parameters, and that number.

    The reference is one layer of a GRU with the hidden size of the options, and the same encoder and heads. The size is
    the nearest multiple of 16, 8, 4, 2 or 1: the first of them that is within 2 %, or else the nearest of all.

    Args:
        config: the options of a run.

    Raises:
        ArgumentError: the cell accepts no size near it.
    """
    plain = replace(config.on_cpu(), compile=False, cuda_graph=False, num_envs=1, minibatches=1, seed=0)
    wanted = count_parameters(replace(plain, cell=REFERENCE, num_layers=1), config.hidden_size)
    if (config.cell, config.num_layers) == (REFERENCE, 1):
        return config.hidden_size, wanted
    return nearest_size(cache(lambda size: count_parameters(plain, size)), wanted, config.hidden_size), wanted


def count_parameters(config: PPOConfig, hidden_size: int) -> int:
    """Return the number of parameters of the policy and its critic with a hidden size.

    Raises:
        ArgumentError: the cell refuses the size.
    """
    config = replace(config, hidden_size=hidden_size)
    with preserved_rng(), make_env(config, 1) as env:
        return sum(parameter.numel() for parameter in make_agent(config, env).parameters())


def nearest_size(count: Callable[[int], int], wanted: int, start: int) -> int:
    """Return the size whose count is nearest to the wanted one; see :func:`equal_size`.

    Args:
        count: returns the number of parameters of a size, which grows with it; raises ArgumentError for one that is
            refused.
        wanted: the number of parameters.
        start: a size to begin with.

    Raises:
        ArgumentError: sizes near it are refused.

    Example:
        >>> nearest_size(lambda size: 4 * size**2 + 100, 4 * 200**2, 256)
        200
        >>> nearest_size(lambda size: size**2, 103 * 103, 16)
        104
        >>> nearest_size(lambda size: size**2, 50, 16)
        7
    """
    below, above = 1, max(2, start)
    while count(_accepted(count, above)) <= wanted:
        below, above = above, 2 * above
    while above - below > 1:  # the count of the next accepted size is not above the wanted one, and above it
        middle = (below + above) // 2
        below, above = (middle, above) if count(_accepted(count, middle)) <= wanted else (below, middle)
    found: dict[int, float] = {}
    for multiple in _MULTIPLES:
        for size in (below // multiple * multiple, (below // multiple + 1) * multiple):
            size = _accepted(count, max(1, size)) if multiple == 1 else size
            with suppress(ArgumentError):
                found[size] = abs(count(size) / wanted - 1)
        best = min(found, key=found.__getitem__, default=0)
        if best and found[best] <= TOLERANCE:
            return best
    return min(found, key=found.__getitem__)


def _accepted(count: Callable[[int], int], size: int) -> int:
    """Return the first size from this one on that isn't refused."""
    for other in range(size, size + _REFUSED):
        with suppress(ArgumentError):
            count(other)
            return other
    count(size)
    return size

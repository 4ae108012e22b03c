"""The options of a run, whatever its algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recurl.errors import ArgumentError
from recurl.trainers.config import PPOConfig, RunConfig
from recurl.trainers.replay_config import DQNConfig, R2D2Config

OPTIONS: dict[str, type[RunConfig]] = {kind.algorithm: kind for kind in (PPOConfig, DQNConfig, R2D2Config)}
"""The options of each algorithm, by its name."""


def read_options(values: Mapping[str, Any]) -> RunConfig:
    """Build options from what ``to_dict`` of any of them returned.

    Raises:
        ArgumentError: there is no such algorithm, or see :meth:`RunConfig.from_dict`.

    Example:
        >>> read_options({"algorithm": "r2d2", "env": "recurl/TMaze-v0"}).n_steps
        5
    """
    name = values.get("algorithm", PPOConfig.algorithm)
    if not isinstance(name, str) or name not in OPTIONS:
        raise ArgumentError(f"There is no algorithm {name!r}, only {', '.join(OPTIONS)}.")
    return OPTIONS[name].from_dict(values)

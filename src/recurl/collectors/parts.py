"""What collectors with several workers or actors make of their parts: one batch, one state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from recurl.envs.trajectories import TRAJECTORY_IDS
from recurl.errors import ArgumentError

__all__ = ["check_cat_results", "dimension", "load_requests"]


def check_cat_results(cat_results: str | int | None) -> None:
    """Refuse another word than ``"stack"``, before any worker starts.

    Raises:
        ArgumentError: it is one.
    """
    if isinstance(cat_results, str) and cat_results != "stack":
        raise ArgumentError(f"cat_results must be 'stack', None or a dimension, got {cat_results!r}.")


def dimension(cat_results: str | int | None, rows: torch.Size) -> int | None:
    """Return the dimension of ``[*B, T]`` to concatenate along, or None to stack.

    Raises:
        ArgumentError: there is no such dimension.
    """
    if not isinstance(cat_results, int):
        return None
    ndim = len(rows) + 1
    if not -ndim <= cat_results < ndim:
        raise ArgumentError(f"cat_results must be a dimension of a worker's batch {[*rows, 'T']}, got {cat_results}.")
    return cat_results % ndim


def load_requests(states: Sequence[Any], count: int, who: str) -> list[tuple[Any, ...]]:
    """Return the requests to load what each of ``count`` workers saved, with trajectory ids that nobody has.

    Args:
        states: what they saved.
        count: how many there are.
        who: what they are called.

    Raises:
        ArgumentError: there are others.
    """
    if len(states) != count:
        raise ArgumentError(f"The state must be of a collector with {count} {who}, got that of {len(states)}.")
    for saved in states:
        TRAJECTORY_IDS.skip(saved["collector"]["traj_ids"])
    return [("load", saved, TRAJECTORY_IDS.reserve()) for saved in states]

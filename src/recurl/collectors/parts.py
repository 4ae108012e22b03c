"""Helpers that combine the batches and states of several workers or actors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from recurl.core.errors import ArgumentError
from recurl.sequences.trajectories import TRAJECTORY_IDS

__all__ = ["check_cat_results", "dimension", "load_requests"]


def check_cat_results(cat_results: str | int | None) -> None:
    """Check that ``cat_results``, if a string, is ``"stack"``; called before any worker starts.

    Raises:
        ArgumentError: it is another string.
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


def load_requests(states: Sequence[Any], count: int, kind: str) -> list[tuple[Any, ...]]:
    """Return the requests to load the saved states of ``count`` workers, with unused trajectory ids.

    Args:
        states: the saved states.
        count: number of workers.
        kind: name of the workers, for the message.

    Raises:
        ArgumentError: the number of states differs from ``count``.
    """
    if len(states) != count:
        raise ArgumentError(f"The state must be of a collector with {count} {kind}, got that of {len(states)}.")
    for saved in states:
        TRAJECTORY_IDS.skip(saved["collector"]["traj_ids"])
    return [("load", saved, TRAJECTORY_IDS.reserve()) for saved in states]

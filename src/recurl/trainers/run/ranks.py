"""Per-rank parts of a checkpoint: environments, running episodes, random generators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from recurl.core.errors import ArgumentError
from recurl.core.ranges import flag
from recurl.distributed import gather, gather_on_first, rank, world_size
from recurl.trainers.config import RunConfig

__all__ = ["check_same_options", "for_this_rank", "ranks_of", "with_other_ranks"]

_ALGORITHM, _RANKS = "algorithm", "ranks"
_PER_RANK_STATE = ("stats", "faults", "rng")
_PER_RANK_OPTIONS = ("threads", "logger", "callback", "ray_address")
"""Options that may differ between ranks."""


def check_same_options(config: RunConfig) -> None:
    """Check that all ranks have the same options; must be called on all ranks.

    Raises:
        ArgumentError: if an option differs.
    """
    first, *others = gather(config.to_dict())
    for number, options in enumerate(others, 1):
        for name, value in first.items():
            other = options.get(name)
            if other != value and name not in _PER_RANK_OPTIONS:
                what = "algorithm" if name == "algorithm" else flag(name)
                raise ArgumentError(
                    f"All ranks must have the same options, but {what} is {value} on rank 0 and {other} on rank "
                    f"{number}."
                )


def with_other_ranks(state: dict[str, Any], parts: Sequence[str]) -> dict[str, Any]:
    """Add the per-rank state of the other ranks to the state of rank 0; must be called on all ranks.

    Args:
        state: state of this rank.
        parts: names of the algorithm's parts that differ between ranks.
    """
    if world_size() == 1:
        return state
    algorithm = {name: part for name, part in state[_ALGORITHM].items() if name in parts}
    own = _on_cpu({_ALGORITHM: algorithm, **{name: state[name] for name in _PER_RANK_STATE}})
    _, *others = gather_on_first(own if rank() else None) or [None]
    return {**state, _RANKS: others}


def for_this_rank(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state for this rank; if the saved run had fewer ranks, several ranks get the same state."""
    saved = rank() % ranks_of(state)
    if saved == 0:
        return state
    own = state[_RANKS][saved - 1]
    return {**state, **own, _ALGORITHM: {**state[_ALGORITHM], **own[_ALGORITHM]}}


def ranks_of(state: Mapping[str, Any]) -> int:
    """Return the number of ranks of the run that saved a checkpoint.

    Example:
        >>> ranks_of({}), ranks_of({"ranks": [{}]})
        (1, 2)
    """
    return 1 + len(state.get(_RANKS, ()))


def _on_cpu(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.detach().cpu()
    if isinstance(state, dict):
        return {name: _on_cpu(part) for name, part in cast(dict[Any, Any], state).items()}
    if isinstance(state, list | tuple):
        return type(cast(Any, state))(map(_on_cpu, cast(Any, state)))
    return state

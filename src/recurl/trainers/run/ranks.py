"""The parts of a checkpoint that each rank has for itself: environments, running episodes, random generators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from recurl.distributed import gather, gather_on_first, rank, world_size
from recurl.errors import ArgumentError
from recurl.ranges import flag
from recurl.trainers.config import RunConfig

__all__ = ["check_same_options", "for_this_rank", "ranks_of", "with_other_ranks"]

_ALGORITHM, _RANKS = "algorithm", "ranks"
_OWN = ("stats", "faults", "rng")
_OF_A_RANK = ("threads", "logger", "callback", "ray_address")
"""Options that may differ between ranks."""


def check_same_options(config: RunConfig) -> None:
    """Refuse ranks whose options differ in what they do together; all ranks call it together.

    Raises:
        ArgumentError: an option differs.
    """
    first, *others = gather(config.to_dict())
    for number, options in enumerate(others, 1):
        for name, value in first.items():
            came = options.get(name)
            if came != value and name not in _OF_A_RANK:
                what = "algorithm" if name == "algorithm" else flag(name)
                raise ArgumentError(
                    f"All ranks must have the same options, but {what} is {value} on rank 0 and {came} on rank "
                    f"{number}."
                )


def with_other_ranks(state: dict[str, Any], parts: Sequence[str]) -> dict[str, Any]:
    """Return the state of rank 0 with what the other ranks have for themselves; all ranks call it together.

    Args:
        state: this rank's state.
        parts: names of the parts of the algorithm that each rank has for itself.
    """
    if world_size() == 1:
        return state
    algorithm = {name: part for name, part in state[_ALGORITHM].items() if name in parts}
    own = _on_cpu({_ALGORITHM: algorithm, **{name: state[name] for name in _OWN}})
    _, *others = gather_on_first(own if rank() else None) or [None]
    return {**state, _RANKS: others}


def for_this_rank(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of this rank; where the run went over fewer, ranks share what one of them had."""
    saved = rank() % ranks_of(state)
    if saved == 0:
        return state
    own = state[_RANKS][saved - 1]
    return {**state, **own, _ALGORITHM: {**state[_ALGORITHM], **own[_ALGORITHM]}}


def ranks_of(state: Mapping[str, Any]) -> int:
    """Return over how many ranks the run of a checkpoint went.

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

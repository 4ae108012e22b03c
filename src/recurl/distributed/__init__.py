"""Data-parallel training of several processes started by torchrun: gradients and statistics over all ranks.

Without a process group, every function is the identity or has no effect, as appropriate for a single process.
"""

from typing import TYPE_CHECKING

from recurl.core.lazy import lazy_names

if TYPE_CHECKING:
    from recurl.distributed.collectives import (
        average_,
        average_gradients,
        broadcast,
        broadcast_parameters,
        gather,
        gather_on_first,
        on_any_rank,
        rank,
        world_size,
    )
    from recurl.distributed.launch import is_launched, is_local_main_process, joined, raise_once, restarted
    from recurl.distributed.statistics import global_statistics, is_global, merge_max, merge_moments
    from recurl.distributed.watch import Watch

lazy_names(
    __name__,
    {
        ".collectives": (
            "average_ average_gradients broadcast broadcast_parameters gather gather_on_first on_any_rank rank "
            "world_size"
        ),
        ".launch": (
            "is_launched is_local_main_process joined raise_once restarted speaks=is_local_main_process "
            "said_once=raise_once"
        ),
        ".statistics": "global_statistics is_global merge_max merge_moments",
        ".watch": "Watch",
    },
)

__all__ = [
    "Watch",
    "average_",
    "average_gradients",
    "broadcast",
    "broadcast_parameters",
    "gather",
    "gather_on_first",
    "global_statistics",
    "is_global",
    "is_launched",
    "is_local_main_process",
    "joined",
    "merge_max",
    "merge_moments",
    "on_any_rank",
    "raise_once",
    "rank",
    "restarted",
    "world_size",
]

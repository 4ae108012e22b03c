"""Data-parallel training of several processes started by torchrun: gradients and statistics over all ranks.

Without a process group, every function is the identity or has no effect, as appropriate for a single process.
"""

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

# Names of earlier versions.
speaks, said_once = is_local_main_process, raise_once

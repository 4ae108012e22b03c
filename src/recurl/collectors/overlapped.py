"""Collection in a worker process that overlaps with learning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from recurl.collectors.multi import MultiCollector
from recurl.envs import EnvBase
from recurl.envs.rollout import Policy

__all__ = ["OverlappedCollector"]


class OverlappedCollector(MultiCollector):
    """Collects each batch ``[*B, T]`` in a worker while this process learns from the previous one.

    A batch begins when the previous one is fetched, with the policy's weights at that time: the first batch is
    on-policy, and every later one is exactly one update old. Its log-probabilities are those of the acting weights, so
    importance ratios are correct. The same seed gives the same batches, regardless of the speed of either process.

    Args:
        create_env_fn: function that creates the environment, in the worker.
        policy: maps a root to one with ``"action"``; random actions when None. Its current weights are sent to the
            worker at the beginning of each batch.
        **arguments: further arguments of ``MultiCollector``; see :class:`~recurl.collectors.MultiSyncCollector`.

    Raises:
        ArgumentError: a number is out of range.

    Example:
        >>> from recurl.envs import GymEnv
        >>> create = lambda: GymEnv("CartPole-v1", num_envs=2)
        >>> with OverlappedCollector(create, frames_per_batch=20, total_frames=40) as collector:
        ...     [batch.shape for batch in collector]
        [torch.Size([2, 10]), torch.Size([2, 10])]
    """

    def __init__(self, create_env_fn: Callable[[], EnvBase], policy: Policy | None = None, **arguments: Any) -> None:
        super().__init__([create_env_fn], policy, sync=True, max_lag=1, follows=True, **arguments)

"""Replay buffer for TensorDicts."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from recurl.core.errors import ArgumentTypeError, MissingKeyError
from recurl.core.keys import MASK, NestedKey
from recurl.data.replay_buffers.buffers import ReplayBuffer
from recurl.data.replay_buffers.storages import LazyTensorStorage, Storage
from recurl.sequences.sample_marks import INDEX, WRITE_STEP

__all__ = ["TensorDictReplayBuffer"]


class TensorDictReplayBuffer(ReplayBuffer):
    """A :class:`ReplayBuffer` for TensorDicts that can read priorities from samples.

    Args:
        priority_key: entry that :meth:`update_tensordict_priority` reads priorities from.
        storage: storage of the steps; ``LazyTensorStorage(1000)`` when None.
        **options: further arguments of :class:`ReplayBuffer`.

    Raises:
        ArgumentTypeError: (when extending) the data is not a TensorDict.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from recurl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
        >>> _ = buffer.extend(TensorDict({"observation": torch.zeros(6, 3)}, [6]))
        >>> sample = buffer.sample()
        >>> sample["observation"].shape, sample["is_init"].squeeze(-1).tolist()
        (torch.Size([2, 3]), [True, True])
    """

    def __init__(self, *, priority_key: NestedKey = "td_error", storage: Storage | None = None, **options: Any) -> None:
        super().__init__(storage=LazyTensorStorage(1000) if storage is None else storage, **options)
        self.priority_key = priority_key

    def extend(self, data: Any) -> Tensor:
        """Add a batch of steps, which must be a TensorDict; see :meth:`ReplayBuffer.extend`."""
        if not isinstance(data, TensorDictBase):
            raise ArgumentTypeError(f"A TensorDict is needed, got {type(data).__name__}: use ReplayBuffer for others.")
        return super().extend(data)

    def update_tensordict_priority(self, sample: TensorDictBase) -> None:
        """Set priorities from the entry ``priority_key`` of a sample, ``[N]`` or ``[N, ...]`` (the maximum per item).

        Padding and steps overwritten since they were sampled are skipped.

        Raises:
            MissingKeyError: the sample lacks the entry, or its ``"index"``.
            ArgumentError: a priority is negative or not finite.
            UsageError: the sampler has no priorities.
        """
        index, priority, write_step, mask = (
            sample.get(key, None) for key in (INDEX, self.priority_key, WRITE_STEP, MASK)
        )
        if index is None or priority is None:
            raise MissingKeyError(
                f"The sample must have the entries {INDEX!r} and {self.priority_key!r}; it has "
                f"{sorted(map(str, sample.keys(True, True)))}."
            )
        items = index.shape[0]
        index, priority = index.reshape(items, -1)[:, 0], priority.reshape(items, -1).amax(1)
        if write_step is not None:
            write_step = write_step.reshape(items, -1)[:, 0]
        if mask is not None:
            index, priority = index[mask], priority[mask]
            write_step = None if write_step is None else write_step[mask]
        self.update_priority(index, priority, write_step)

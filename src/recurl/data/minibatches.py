"""Minibatches of shuffled sequences for recurrent training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from tensordict import TensorDictBase
from torch import Tensor

from recurl.core.errors import ArgumentError
from recurl.sequences.continuity import check_order
from recurl.sequences.entries import Entries, Step, leaves
from recurl.sequences.index import SequenceIndex
from recurl.sequences.sample_marks import mark_starts
from recurl.sequences.start_states import check_sequences

__all__ = ["SequenceMinibatches"]


class SequenceMinibatches:
    """Iterable that splits a batch into sequences and shuffles them into minibatches; each iteration is one epoch.

    Every token of the batch occurs exactly once per epoch. Shuffling is stratified: each minibatch gets one of every
    ``num_minibatches`` consecutive sequences. A sequence starts from the recurrent state stored at its first token,
    where ``"is_init"`` is set; within a sequence, tokens keep their order and resets stay marked. The marks are written
    to a new entry of the minibatch, never into the batch. Iteration does not synchronize with the device.

    Args:
        batch: collected data, ``[T]`` or ``[*B, T]``, time last. To save memory, drop unused entries first:
            ``batch.select(*loss.in_keys, strict=False)``.
        num_minibatches: number of minibatches per epoch; their sizes differ by at most one sequence.
        slice_len: length of a sequence; if it does not divide T, the last sequence of each row is shorter. Whole rows
            when None.
        generator: CPU generator for shuffling; torch's default generator when None.
        rank: rank of this process; each of the ``ranks`` processes holds an equal part of a larger batch. If all
            generators have the same seed, their combined minibatches are those of the larger batch, with its rows in
            the order of the ranks.
        ranks: number of processes.

    Yields:
        Flat TensorDicts ``[M]`` with the entries of the batch and ``"is_init"`` (``[M, 1]`` if the batch has none). As
        in samples of a replay buffer, the collected flag is at ``("collector", "stored", "is_init")``.

    Raises:
        ArgumentError: the batch has no time dimension, ``slice_len`` or ``num_minibatches`` is not positive, or there
            are fewer sequences than minibatches.
        UsageError: the tokens of the batch are not consecutive; see :func:`~recurl.sequences.continuity.check_order`.
            Or sequences would begin where no state is stored; see ``sequence_length`` of ``Collector``.

    Example:
        >>> from tensordict import TensorDict
        >>> batch = TensorDict({"observation": torch.arange(8).reshape(2, 4)}, [2, 4])
        >>> minibatches = SequenceMinibatches(batch, 2, slice_len=2, generator=torch.Generator().manual_seed(0))
        >>> for minibatch in minibatches:
        ...     print(minibatch["observation"].tolist(), minibatch["is_init"].squeeze(-1).tolist())
        [0, 1, 4, 5] [True, False, True, False]
        [2, 3, 6, 7] [True, False, True, False]
    """

    def __init__(
        self,
        batch: TensorDictBase,
        num_minibatches: int,
        slice_len: int | None = None,
        generator: torch.Generator | None = None,
        *,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        if batch.batch_dims == 0:
            raise ArgumentError("Minibatches need a batch with a time dimension, [T] or [*B, T], got shape [].")
        if slice_len is not None and slice_len < 1:
            raise ArgumentError(f"slice_len must be positive, got {slice_len}.")
        rows, length = batch.batch_size[:-1].numel(), batch.batch_size[-1]
        slice_len = None if slice_len is None or slice_len >= length else slice_len  # whole rows
        in_row = torch.arange(0, length, slice_len or max(length, 1))
        self._starts = (torch.arange(rows).unsqueeze(-1) * length + in_row).flatten()
        self._lengths = torch.diff(in_row, append=torch.tensor([length])).repeat(rows)
        if not 0 < num_minibatches <= len(self._starts):
            raise ArgumentError(
                f"num_minibatches must be between 1 and the number of sequences, got {num_minibatches} for "
                f"{len(self._starts)} sequences of {slice_len or length} tokens in a batch of shape "
                f"{tuple(batch.batch_size)}. Use fewer minibatches or a shorter slice_len."
            )
        if ranks > 1 and (len(self._starts) % num_minibatches or length % (slice_len or length)):
            raise ArgumentError(
                f"With {ranks} ranks, all minibatches must have the same size: num_minibatches must divide the "
                f"sequences of each rank, and slice_len its rows; got {num_minibatches} for {len(self._starts)} "
                f"sequences, and {slice_len or length} for rows of {length} tokens."
            )
        check_order(batch)
        check_sequences(batch, slice_len or length)
        self._rank, self._ranks = rank, ranks
        self._flat = batch.reshape(-1)
        self._num_minibatches = num_minibatches
        self._generator = generator

    def __len__(self) -> int:
        return self._num_minibatches

    def __iter__(self) -> Iterator[TensorDictBase]:
        order, counts = self._deal()
        epoch = self._flat[self._tokens(order)]
        sizes = self._mark(epoch, order, counts)
        for minibatch, index in zip(epoch.split(sizes), _indices(epoch, sizes), strict=True):
            index.attach(minibatch)
            yield minibatch

    def entries(self, order: Tensor | None = None) -> Iterator[Entries]:
        """Iterate over one epoch of minibatches as ``Entries``, without the overhead of TensorDicts.

        Args:
            order: an order drawn by :meth:`deal`, if all minibatches have one size; drawn here when None.
        """
        if order is None:
            order, counts = self._deal()
        else:
            counts = [len(order) // self._num_minibatches] * self._num_minibatches
        flat = dict(leaves(self._flat))
        gathered = self._gather(list(flat.values()), order)
        epoch = Entries({}, torch.Size([int(self._lengths[order].sum())]), self._flat.device)
        for key, value in zip(flat, gathered, strict=True):
            epoch.set(key, value)
        sizes = self._mark(epoch, order, counts)
        parts = {key: value.split(sizes) for key, value in leaves(epoch)}
        for number, index in enumerate(_indices(epoch, sizes)):
            minibatch = Entries({}, index.batch_shape, epoch.device)
            for key, value in parts.items():
                minibatch.set(key, value[number])
            index.attach(minibatch)
            yield minibatch

    def deal(self) -> Tensor:
        """Draw the order of the sequences of an epoch, int64 ``[S]`` on the CPU."""
        return self._deal()[0]

    def rows(self, order: Tensor) -> Iterator[Entries]:
        """Iterate over one epoch of minibatches ``[S / num_minibatches, slice_len]``; all sequences have one length.

        This does not wait for the device or copy to it.

        Args:
            order: an order drawn by :meth:`deal`, on the device of the batch.

        Raises:
            ArgumentError: sequences differ in length, or minibatches in size.
        """
        length = int(self._lengths[0])
        if bool((self._lengths != length).any()) or len(order) % self._num_minibatches:
            raise ArgumentError(
                f"Minibatches must have the same size, so slice_len must divide the rows and num_minibatches the "
                f"number of sequences; got {len(order)} sequences of {int(self._lengths.min())} to {length} tokens for "
                f"{self._num_minibatches} minibatches."
            )
        flat = dict(leaves(self._flat))
        epoch = {key: value.unflatten(0, (-1, length)).index_select(0, order) for key, value in flat.items()}
        size = len(order) // self._num_minibatches
        for index in range(self._num_minibatches):
            minibatch = Entries({}, torch.Size([size, length]), self._flat.device)
            for key, value in epoch.items():
                minibatch.set(key, value.narrow(0, index * size, size))
            yield minibatch

    def _deal(self) -> tuple[Tensor, list[int]]:
        """Return the sequences in the order of a new epoch, and the number of sequences in each minibatch."""
        number, sequences = self._num_minibatches, len(self._starts)
        strata = -(-sequences // number)
        drawn = torch.rand(strata * self._ranks, number, generator=self._generator).argsort(dim=-1, stable=True)
        places = drawn[strata * self._rank : strata * (self._rank + 1)] + torch.arange(strata).unsqueeze(-1) * number
        dealt = places.T.reshape(-1)  # one row per minibatch
        valid = dealt < sequences  # the last stratum may be smaller
        return dealt[valid], valid.view(number, strata).sum(-1).tolist()

    def _tokens(self, order: Tensor) -> Tensor:
        """Return the indices of all tokens for an order of the sequences, int64 on the device of the batch."""
        starts, lengths = self._starts[order], self._lengths[order]
        before = lengths.cumsum(0) - lengths
        index = torch.arange(int(lengths.sum())) + (starts - before).repeat_interleave(lengths)
        return index.to(_device_of(self._flat), non_blocking=True)

    def _gather(self, values: list[Tensor], order: Tensor) -> list[Tensor]:
        """Return the tokens of entries in an order of the sequences; sequences of one length are copied as a whole."""
        length = int(self._lengths[0])
        if bool((self._lengths != length).any()):
            index = self._tokens(order)
            return [value.index_select(0, index) for value in values]
        order = order.to(_device_of(self._flat), non_blocking=True)
        return [value.unflatten(0, (-1, length)).index_select(0, order).flatten(0, 1) for value in values]

    def _mark(self, epoch: Step, order: Tensor, counts: list[int]) -> list[int]:
        """Mark the starts of the sequences of an epoch, and return the sizes of its minibatches."""
        lengths = self._lengths[order]
        first = lengths.cumsum(0) - lengths
        mark_starts(epoch, torch.zeros(epoch.batch_size, dtype=torch.bool).index_fill_(0, first, True))
        return [int(part.sum()) for part in lengths.split(counts)]


def _indices(epoch: Step, sizes: list[int]) -> list[SequenceIndex]:
    """Return the index of every minibatch, derived once per epoch: each minibatch begins with a mark."""
    parts = SequenceIndex.of(epoch).parts(sizes)
    for part in parts:
        part.begin_at_states = True
    return parts


def _device_of(tensordict: TensorDictBase) -> torch.device:
    if tensordict.device is not None:
        return tensordict.device
    return next((cast(Tensor, value).device for value in tensordict.values(True, True)), torch.device("cpu"))

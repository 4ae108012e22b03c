"""Advantages that are normalised per minibatch over the tokens of several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from recurl.data import SequenceMinibatches
from recurl.distributed import global_statistics
from recurl.keys import NestedKey
from recurl.lowering import Entries
from recurl.objectives.common import moments


class RankAdvantages:
    """Means and deviations of all minibatches of an update, exchanged once before its gradient steps.

    Args:
        minibatches: of the advantages alone.
        key: of the advantages.
        orders: the order of the sequences in each epoch, ``[epochs, S]``, on the device of the batch.
    """

    def __init__(self, minibatches: SequenceMinibatches, key: NestedKey, orders: Tensor) -> None:
        self._key = key
        with global_statistics():
            found = moments([part.get(key) for order in orders for part in minibatches.rows(order)], None)
        means, variances = (torch.stack(column).view(len(orders), -1) for column in zip(*found, strict=True))
        self._means, self._deviations = means, variances.sqrt().clamp_min(1e-8)

    def normalized(self, epoch: int, dealt: Iterable[Entries]) -> Iterator[Entries]:
        """Iterate over the minibatches of an epoch with their advantages shifted and scaled."""
        for minibatch, mean, deviation in zip(dealt, self._means[epoch], self._deviations[epoch], strict=True):
            minibatch.set(self._key, (minibatch.get(self._key) - mean) / deviation)
            yield minibatch

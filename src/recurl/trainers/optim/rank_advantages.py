"""Advantages that are normalised per minibatch over the tokens of several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from recurl.data import SequenceMinibatches
from recurl.distributed import global_statistics, merge_moments
from recurl.keys import NestedKey
from recurl.lowering import Entries


class RankAdvantages:
    """Means and deviations of all minibatches of an update, exchanged once before its gradient steps.

    Args:
        minibatches: of the advantages alone.
        key: of the advantages.
        orders: the order of the sequences in each epoch, ``[epochs, S]``, on the device of the batch.
    """

    def __init__(self, minibatches: SequenceMinibatches, key: NestedKey, orders: Tensor) -> None:
        self._key = key
        own = [part.get(key) for order in orders for part in minibatches.rows(order)]
        variances, means = (
            torch.stack(column) for column in zip(*(torch.var_mean(part, correction=0) for part in own), strict=True)
        )
        with global_statistics():
            _, means, variances = merge_moments(own[0].numel(), means, variances)
        self._means = means.view(len(orders), -1)
        self._deviations = variances.sqrt().clamp_min(1e-8).view(len(orders), -1)

    def normalized(self, epoch: int, dealt: Iterable[Entries]) -> Iterator[Entries]:
        """Iterate over the minibatches of an epoch with their advantages shifted and scaled."""
        for minibatch, mean, deviation in zip(dealt, self._means[epoch], self._deviations[epoch], strict=True):
            minibatch.set(self._key, (minibatch.get(self._key) - mean) / deviation)
            yield minibatch

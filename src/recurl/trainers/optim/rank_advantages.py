"""Advantages that are normalised per minibatch over the tokens of several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from recurl.distributed import global_statistics, merge_moments
from recurl.keys import NestedKey
from recurl.lowering import Entries


class RankAdvantages:
    """Advantages of all minibatches of an update, whose means and deviations are exchanged once before its steps.

    Args:
        advantages: those of a batch, whose rows are cut into S sequences of one length.
        key: of the advantages.
        orders: the order of the sequences in each epoch, ``[epochs, S]``, on the device of the batch.
        count: number of minibatches of an epoch.
    """

    def __init__(self, advantages: Tensor, key: NestedKey, orders: Tensor, count: int) -> None:
        self._key = key
        epochs, sequences = orders.shape
        dealt = advantages.reshape(sequences, -1)[orders].reshape(epochs * count, -1)
        variances, means = torch.var_mean(dealt, 1, correction=0)
        with global_statistics():
            _, means, variances = merge_moments(dealt.shape[1], means, variances)
        deviations = variances.sqrt().clamp_min(1e-8)
        self._normalized = ((dealt - means.unsqueeze(1)) / deviations.unsqueeze(1)).unflatten(0, (epochs, count))

    def normalized(self, epoch: int, dealt: Iterable[Entries]) -> Iterator[Entries]:
        """Iterate over the minibatches of an epoch with their advantages shifted and scaled."""
        for minibatch, advantages in zip(dealt, self._normalized[epoch], strict=True):
            minibatch.set(self._key, advantages.view(minibatch.get(self._key).shape))
            yield minibatch

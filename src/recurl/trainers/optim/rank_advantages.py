"""Per-minibatch advantage normalization over several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from recurl.core.keys import NestedKey
from recurl.distributed import global_statistics, merge_moments
from recurl.sequences.entries import Entries


class RankAdvantages:
    """Normalized advantages of all minibatches of an update.

    Means and standard deviations are exchanged between ranks once, before the gradient steps.

    Args:
        advantages: advantages of a batch, whose rows are split into S sequences of equal length.
        key: key of the advantages.
        orders: order of the sequences in each epoch, ``[epochs, S]``, on the device of the batch.
        count: number of minibatches per epoch.
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
        """Yield the minibatches of an epoch with normalized advantages."""
        for minibatch, advantages in zip(dealt, self._normalized[epoch], strict=True):
            minibatch.set(self._key, advantages.view(minibatch.get(self._key).shape))
            yield minibatch

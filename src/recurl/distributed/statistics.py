"""Statistics over the data of all ranks."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from recurl.core.errors import UnsupportedError
from recurl.distributed.collectives import all_gather, world_size

__all__ = ["global_statistics", "is_global", "merge_max", "merge_moments"]


class _Setting(threading.local):
    on = False


_SETTING = _Setting()


@contextmanager
def global_statistics() -> Generator[None]:
    """Compute the statistics of recurl's modules and losses over the data of all ranks inside the block.

    This affects the means and variances used to normalize advantages and rewards, those kept by
    :class:`~recurl.modules.ObservationNorm`, :class:`~recurl.modules.RewardScaler` and
    :class:`~recurl.modules.ImageScale`, and the explained variance. All ranks must enter the block together. Other
    values returned by losses are over a rank's own tokens: average them with :func:`~recurl.distributed.average_`.

    Example:
        >>> from recurl.modules import ObservationNorm
        >>> norm = ObservationNorm((1,))
        >>> with global_statistics():
        ...     norm.update(torch.tensor([[0.0], [2.0]]))  # under torchrun: merged with the other ranks' data
        >>> norm(torch.tensor([2.0]))
        tensor([1.])
    """
    before, _SETTING.on = _SETTING.on, True
    try:
        yield
    finally:
        _SETTING.on = before


def is_global() -> bool:
    """Return whether statistics are merged: inside :func:`global_statistics`, with more than one rank.

    Example:
        >>> is_global()
        False
    """
    return _SETTING.on and world_size() > 1


def merge_moments(count: int | Tensor, mean: Tensor, var: Tensor) -> tuple[int | Tensor, Tensor, Tensor]:
    """Merge count, mean and biased variance over all ranks; return them unchanged outside ``global_statistics``.

    This takes one all-gather, in float64, and does not wait for the device.

    Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979).

    Args:
        count: number of this rank's samples, an int or a tensor ``[]`` on any device. A rank with 0 samples is ignored.
        mean: means of the samples, ``[...]``; any finite numbers if there are none.
        var: biased variances of the samples, ``[...]``; any finite numbers if there are none.

    Raises:
        RankError: a rank is gone.
        UnsupportedError: they require gradients, which can't be propagated through other ranks.

    Example:
        >>> merge_moments(2, torch.tensor(1.0), torch.tensor(0.5))
        (2, tensor(1.), tensor(0.5000))
    """
    if not is_global():
        return count, mean, var
    if torch.is_grad_enabled() and (mean.requires_grad or var.requires_grad):
        raise UnsupportedError(
            "Statistics over several ranks have no gradients: detach their inputs (differentiable=False)."
        )
    number = count if isinstance(count, Tensor) else mean.new_full((), count, dtype=torch.float64)
    own = torch.cat([number.reshape(1).double(), mean.reshape(-1).double(), var.reshape(-1).double()])
    table = all_gather(own)
    counts, means, variances = table[:, :1], *table[:, 1:].chunk(2, 1)
    total = counts.sum(0)
    weights = counts / total.clamp_min(1)
    merged = (weights * means).sum(0)
    spread = (weights * torch.addcmul(variances, means - merged, means - merged)).sum(0)
    merged, spread = (value.to(mean.dtype).view(mean.shape) for value in (merged, spread))
    return total[0].to(torch.int64), merged, spread


def merge_max(values: Tensor) -> Tensor:
    """Return the elementwise maximum over all ranks; return ``values`` unchanged outside ``global_statistics``."""
    return all_gather(values.contiguous()).amax(0) if is_global() else values

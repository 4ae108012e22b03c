"""Statistics over the data of all ranks."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from recurl.distributed.collectives import all_gather, world_size
from recurl.errors import UnsupportedError

__all__ = ["global_statistics", "is_global", "merge_max", "merge_moments"]


class _Setting(threading.local):
    on = False


_SETTING = _Setting()


@contextmanager
def global_statistics() -> Generator[None]:
    """Let the statistics of recurl's modules and losses be those of the data of all ranks, inside the block.

    These are the means and variances with which advantages and rewards are normalised, those that
    :class:`~recurl.modules.ObservationNorm`, :class:`~recurl.modules.RewardScaler` and
    :class:`~recurl.modules.ImageScale` keep, and the explained variance. All ranks must run the block together. Other
    numbers that losses return are those of a rank's own tokens: average them with
    :func:`~recurl.distributed.average_`.

    Example:
        >>> from recurl.modules import ObservationNorm
        >>> norm = ObservationNorm((1,))
        >>> with global_statistics():
        ...     norm.update(torch.tensor([[0.0], [2.0]]))  # under torchrun: merged with those of the others
        >>> norm(torch.tensor([2.0]))
        tensor([1.])
    """
    before, _SETTING.on = _SETTING.on, True
    try:
        yield
    finally:
        _SETTING.on = before


def is_global() -> bool:
    """Return whether statistics are those of several ranks here: inside :func:`global_statistics`, with more than one.

    Example:
        >>> is_global()
        False
    """
    return _SETTING.on and world_size() > 1


def merge_moments(count: int | Tensor, mean: Tensor, var: Tensor) -> tuple[int | Tensor, Tensor, Tensor]:
    """Return count, mean and biased variance of the data of all ranks; what is given outside ``global_statistics``.

    There is one exchange, in float64, and no wait for the device.

    Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979).

    Args:
        count: number of this rank's samples, a tensor ``[]`` on any device. Where it is 0, the others alone count.
        mean: their means ``[...]``, any finite numbers where there are no samples.
        var: their biased variances ``[...]``, likewise.

    Raises:
        RankError: a rank has gone.
        UnsupportedError: gradients flow into them, which they can't through other ranks.

    Example:
        >>> merge_moments(2, torch.tensor(1.0), torch.tensor(0.5))
        (2, tensor(1.), tensor(0.5000))
    """
    if not is_global():
        return count, mean, var
    if torch.is_grad_enabled() and (mean.requires_grad or var.requires_grad):
        raise UnsupportedError(
            "Statistics over several ranks have no gradients: detach what they are taken of (differentiable=False)."
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
    """Return the largest values over all ranks; what is given outside ``global_statistics``."""
    return all_gather(values.contiguous()).amax(0) if is_global() else values

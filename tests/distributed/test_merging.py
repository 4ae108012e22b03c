"""Means and moments over ranks, with the other rank played by the test: no processes."""

import pytest
import torch
from torch import Tensor

from recurl.distributed import average_, collectives, statistics
from recurl.distributed.statistics import merge_moments


def moments(samples: Tensor) -> tuple[int, Tensor, Tensor]:
    return len(samples), samples.mean(0), samples.var(0, correction=0)


@pytest.mark.parametrize("counts", [(8, 8), (2, 9), (1, 1)])
def test_merged_moments_are_those_of_all_samples(monkeypatch: pytest.MonkeyPatch, counts: tuple[int, int]) -> None:
    mine, others = (torch.randn(count, 3) + 10 * place for place, count in enumerate(counts))
    count, mean, var = moments(others)
    other = torch.cat([torch.tensor([count]), mean, var]).double()
    monkeypatch.setattr(statistics, "is_global", lambda: True)
    monkeypatch.setattr(statistics, "all_gather", lambda own: torch.stack([own, other]))
    found, expected = merge_moments(*moments(mine)), moments(torch.cat([mine, others]))
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(value), torch.as_tensor(wanted))


@pytest.mark.parametrize("ranks", [2, 3])
def test_tensors_are_averaged_not_summed(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    monkeypatch.setattr(collectives, "world_size", lambda: ranks)
    monkeypatch.setattr(collectives.distributed, "all_reduce", lambda tensor: tensor.mul_(ranks))  # all have the same
    tensors = [torch.randn(3), torch.randn(2, 2).T, torch.randn(2, dtype=torch.float64)]
    before = [tensor.clone() for tensor in tensors]
    average_(tensors)
    torch.testing.assert_close(tensors, before)

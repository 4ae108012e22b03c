import warnings

import pytest
import torch
from torch import nn

from recurl.core.errors import ArgumentError, RankError, UnsupportedError
from recurl.distributed import (
    average_,
    average_gradients,
    broadcast,
    broadcast_parameters,
    gather,
    gather_on_first,
    global_statistics,
    merge_max,
    merge_moments,
    on_any_rank,
    rank,
    world_size,
)
from recurl.modules import ImageScale, ObservationNorm, RewardScaler

pytestmark = pytest.mark.slow


def collectives():
    me, all_of_them = rank(), world_size()
    mixed = [torch.full((2, 3), float(me)), torch.tensor(me, dtype=torch.float64), torch.full((2, 2), 10.0 * me).T]
    average_(mixed)
    torch.manual_seed(me)
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    net[0].weight.data = torch.randn(2, 3).T
    broadcast_parameters(net)
    net(torch.full((4, 2), float(me))).sum().backward()
    net[0].weight.grad.fill_(me)
    average_gradients(net.parameters())
    parameter = nn.Parameter(torch.full((2,), float(me)))
    average_([parameter])
    whole = torch.tensor([me])
    unsigned = [torch.tensor([me, 7], dtype=dtype) for dtype in (torch.uint16, torch.uint32, torch.uint64)]
    with pytest.raises(ArgumentError, match=r"got a tensor of torch\.int64"):
        average_([torch.zeros(1), whole])
    assert whole == me
    return {
        "parameter": parameter.tolist(),
        "mixed": [value.mean().item() for value in mixed],
        "weights": net[0].weight.detach().clone(),
        "gradient": net[0].weight.grad.clone(),
        "gathered": (gather(me), gather_on_first(me), broadcast(me)),
        "unsigned": [gather(unsigned)[0], *gather_on_first(unsigned)[:1], broadcast(unsigned)],
        "any": (on_any_rank(me == all_of_them - 1), on_any_rank(False)),
    }


def test_collectives(ranks):
    first, second, third = ranks.run(3, collectives)
    assert first["mixed"] == [1.0, 1.0, 10.0]
    assert first["parameter"] == third["parameter"] == [1.0, 1.0]
    torch.manual_seed(0)
    assert torch.equal(first["weights"], second["weights"])
    assert torch.equal(second["gradient"], torch.ones(3, 2))
    assert first["gathered"] == ([0, 1, 2], [0, 1, 2], 0)
    assert third["gathered"] == ([0, 1, 2], [], 0)
    for result, count in (first, 3), (third, 2):
        assert len(result["unsigned"]) == count
        for found in result["unsigned"]:
            assert [value.dtype for value in found] == [torch.uint16, torch.uint32, torch.uint64]
            assert [value.tolist() for value in found] == [[0, 7]] * 3
    assert [result["any"] for result in (first, second, third)] == [(True, False)] * 3


def statistics():
    torch.manual_seed(rank())
    own = 100 + torch.randn(rank() + 2, 3, dtype=torch.float64)
    outside = merge_moments(len(own), own.mean(0), own.var(0, correction=0))
    assert outside[0] == len(own), "only inside global_statistics"
    with global_statistics(), warnings.catch_warnings(action="error"):
        merged = merge_moments(len(own), own.mean(0), own.var(0, correction=0))
        with pytest.raises(UnsupportedError, match="no gradients"):
            merge_moments(1, own[0].requires_grad_(), own[1])
        return own.detach(), merged, merge_max(own.detach().amax())


def test_moments_are_those_of_all_data(ranks):
    results = ranks.run(3, statistics)
    data = torch.cat([own for own, *_ in results])
    for _, (count, mean, var), largest in results:
        assert count == len(data)
        torch.testing.assert_close(mean, data.mean(0), rtol=1e-13, atol=0)
        torch.testing.assert_close(var, data.var(0, correction=0), rtol=1e-12, atol=0)
        assert largest == data.max()


def samples_on_the_last_rank_alone():
    norm, scaler, scale = ObservationNorm((2,)), RewardScaler(0.9, (1,)), ImageScale()
    with global_statistics():
        for number in (0, 3 if rank() == world_size() - 1 else 0):  # at first on none
            norm.update(torch.arange(2.0 * number).view(number, 2))
            scaler.update(torch.ones(1, number, 1), torch.zeros(1, number, 1, dtype=torch.bool))
            scale.update(torch.full((number,), 9, dtype=torch.uint8))
    return {**norm.state_dict(), "scale": scale.factor, "returns": scaler.moments.state_dict()}


def test_ranks_without_samples(ranks):
    whole = samples_on_the_last_rank_alone()
    for found in ranks.run(2, samples_on_the_last_rank_alone):
        assert found["moments.count"] == found["returns"]["count"] == 3
        torch.testing.assert_close(found, whole, rtol=1e-6, atol=0)


def test_one_process_needs_no_group():
    x = torch.ones(2)
    average_([x])
    assert (rank(), world_size(), gather(1), gather_on_first(1), broadcast(1)) == (0, 1, [1], [1], 1)
    assert on_any_rank(True)
    assert torch.equal(x, torch.ones(2))


def without_the_other():
    if rank() == 0:
        with pytest.raises(RankError, match="Another rank is gone"):
            on_any_rank(True)


def test_a_lost_rank(ranks):
    ranks.run(2, without_the_other)

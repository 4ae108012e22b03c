from __future__ import annotations

import numpy as np
import pytest
import torch

from recurl.core.errors import ArgumentError
from recurl.modules.normalization import ObservationNorm, RewardScaler


def test_statistics_equal_those_of_all_data():
    data = torch.randn(7, 30, 3) * torch.tensor([1.0, 10.0, 0.1]) + torch.tensor([0.0, 5.0, -3.0])
    norm = ObservationNorm((3,), clip=100.0)
    norm.update(data[:2])
    norm.update(data[2:3, :1])
    norm.update(data[2:3, 1:])
    norm.update(data[3:])
    flat = data.reshape(-1, 3)
    torch.testing.assert_close(norm.moments.mean, flat.mean(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norm.moments.var, flat.var(0, correction=0), rtol=1e-5, atol=1e-6)
    assert norm.moments.count.item() == 210
    torch.testing.assert_close(norm(flat), (flat - flat.mean(0)) / flat.std(0, correction=0), rtol=1e-4, atol=1e-4)


def test_forward_leaves_statistics_alone_and_clips():
    norm = ObservationNorm((2,), clip=1.5)
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    assert torch.equal(norm(torch.tensor([100.0, -0.5])), torch.tensor([1.5, -0.5]))
    assert all(torch.equal(before[name], value) for name, value in norm.state_dict().items())


def test_integers_become_floats():
    norm = ObservationNorm((2, 2))
    frames = torch.randint(0, 256, (5, 3, 2, 2), dtype=torch.uint8)
    norm.update(frames)
    assert norm(frames).dtype == torch.float32
    assert norm(frames).shape == frames.shape


def test_scalar_observations():
    norm = ObservationNorm(())
    norm.update(torch.arange(5))
    assert norm.moments.mean.item() == 2.0


def test_state_dict_restores_everything():
    norm = ObservationNorm((3,))
    norm.update(torch.randn(10, 3))
    other = ObservationNorm((3,))
    other.load_state_dict(norm.state_dict())
    data, more = torch.randn(4, 3), torch.randn(5, 3)
    norm.update(more)
    other.update(more)
    assert torch.equal(norm(data), other(data))


def test_statistics_move_after_hundreds_of_millions_of_samples():
    """Also if a batch changes them by less than float32 resolution, and after saving and restoring."""
    norm = ObservationNorm((1,))
    norm.moments.count.fill_(10**9)
    norm.moments.mean.fill_(100.0)
    norm.moments.var.fill_(4.0)
    batch = torch.tensor([99.0, 101.0, 103.0, 105.0]).reshape(-1, 1)  # mean 102, variance 5
    for _ in range(2):
        for _ in range(500):
            norm.update(batch.repeat(32, 1))
        norm, saved = ObservationNorm((1,)), norm.state_dict()
        norm.load_state_dict(saved)
    share = 128_000 / (10**9 + 128_000)
    assert norm.moments.exact[0].item() == pytest.approx(100 + 2 * share, rel=1e-12)
    assert norm.moments.exact[1].item() == pytest.approx(4 + share + 4 * share * (1 - share), rel=1e-12)
    assert norm.moments.mean.item() == torch.tensor(100 + 2 * share).item()


def test_statistics_of_an_earlier_version_or_set_by_hand_count():
    norm, other = ObservationNorm((2,)), ObservationNorm((2,))
    norm.update(torch.randn(50, 2) + 3)
    other.update(torch.randn(9, 2))
    old = {name: value for name, value in norm.state_dict().items() if "exact" not in name}
    other.load_state_dict(old)
    assert len(old) == 4
    more = torch.randn(5, 2)
    norm.update(more)
    other.update(more)
    torch.testing.assert_close(norm.state_dict(), other.state_dict(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", [(5, 4), ()])
def test_wrong_observation_shape(shape):
    with pytest.raises(ArgumentError, match=r"end with the shape \(3,\)"):
        ObservationNorm((3,)).update(torch.zeros(shape))


def test_reward_variance_is_that_of_the_running_returns():
    reward, done = torch.randn(3, 40, 1) * 3 + 1, torch.rand(3, 40, 1) < 0.1
    returns = []
    for row in range(3):
        running = 0.0
        for t in range(40):
            running = 0.9 * running + reward[row, t].item()
            returns.append(running)
            running = 0.0 if done[row, t] else running
    scaler = RewardScaler(0.9, (3,))
    scaler.update(reward, done)
    assert scaler.moments.var.item() == pytest.approx(np.var(returns), rel=1e-5)
    torch.testing.assert_close(scaler(reward), (reward / np.std(returns)).clamp(-10, 10), rtol=1e-5, atol=1e-5)


def test_returns_are_carried_per_environment_and_restored():
    reward, done = torch.rand(3, 12, 1), torch.rand(3, 12, 1) < 0.2
    whole, parts = RewardScaler(0.9, (3,)), RewardScaler(0.9, (3,))
    whole.update(reward, done)
    parts.update(reward[:, :5], done[:, :5])
    resumed = RewardScaler(0.9, (3,))
    resumed.load_state_dict(parts.state_dict())
    resumed.update(reward[:, 5:], done[:, 5:])
    torch.testing.assert_close(resumed.moments.var, whole.moments.var)
    torch.testing.assert_close(resumed.returns, whole.returns)


def test_scaling_keeps_the_sign_and_clips():
    scaler = RewardScaler(0.9, clip=2.0)
    assert torch.equal(scaler(torch.tensor([-1.0, 0.0, 1.0, 9.0])).sign(), torch.tensor([-1.0, 0.0, 1.0, 1.0]))
    assert scaler(torch.tensor([9.0])).item() == 2.0


@pytest.mark.parametrize("gamma", [0.9, 0.0])
def test_a_return_that_is_no_number_reaches_neither_other_rows_nor_the_next_episode(gamma):
    reward, done = torch.rand(3, 12, 1), torch.zeros(3, 12, 1, dtype=torch.bool)
    done[:, 5] = done[2, -1] = True
    sick, clean = RewardScaler(gamma, (3,)), RewardScaler(gamma, (3,))
    clean.update(reward, done)
    reward[0, 3] = torch.inf
    reward[1, 5] = torch.nan
    reward[2, 8] = torch.nan
    sick.update(reward, done)
    assert torch.equal(sick.returns, clean.returns)


def test_empty_batch_changes_nothing():
    norm = ObservationNorm((3,))
    norm.update(torch.zeros(0, 3))
    assert torch.equal(norm(torch.ones(3)), torch.ones(3))
    for shape in ((2, 0, 1), (0, 4, 1)):
        scaler = RewardScaler(0.9, shape[:1])
        scaler.update(torch.zeros(shape), torch.zeros(shape, dtype=torch.bool))
        assert scaler.moments.count.item() == 0


def test_wrong_reward_shape():
    with pytest.raises(ArgumentError, match=r"the shape \(2, 'T', 1\)"):
        RewardScaler(0.9, (2,)).update(torch.zeros(5, 1), torch.zeros(5, 1, dtype=torch.bool))

import math

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from recurl.experiments.popgym import score
from recurl.experiments.popgym.score import MaxMeanReturn
from recurl.trainers.run.running import RunningEpisodes


def batch(rewards, dones):
    shape = rewards.shape
    entries = {"reward": rewards.unsqueeze(-1), "done": dones.unsqueeze(-1)}
    return TensorDict({"next": TensorDict(entries, shape)}, shape)


def by_hand(rewards, dones, window, fewest):
    """Reference implementation of the score, episode by episode, for ``[B, T]`` of a whole run."""
    rows, steps = rewards.shape
    running, means, ended, inside = [0.0] * rows, [], [], []
    for step in range(steps):
        for row in range(rows):
            running[row] += float(rewards[row, step])
            if dones[row, step]:
                ended.append(running[row])
                inside.append(running[row])
                running[row] = 0.0
        if (step + 1) * rows % window == 0:
            if len(ended) >= fewest:
                counted = inside if len(inside) >= fewest else ended[-fewest:]
                means.append(sum(counted) / len(counted))
            inside = []
    return means, ended


@pytest.mark.parametrize("chance", [0.5, 0.02, 0.004])
@pytest.mark.parametrize("layout", [1, 7, 32, 96])
def test_is_the_largest_mean_of_a_window_whatever_the_batches(monkeypatch, chance, layout):
    monkeypatch.setattr(score, "WINDOW", 128)
    monkeypatch.setattr(score, "MIN_EPISODES", 10)
    generator = torch.Generator().manual_seed(1)
    rewards = torch.randn(4, 672, generator=generator)
    dones = torch.rand(4, 672, generator=generator) < chance
    means, ended = by_hand(rewards, dones, 128, 10)
    found = MaxMeanReturn(4)
    for first in range(0, 672, layout):
        found.on_batch(batch(rewards[:, first : first + layout], dones[:, first : first + layout]))
    assert found.episodes == len(ended)
    if means:
        assert found.value == pytest.approx(max(means), abs=1e-6)
        assert found.last == pytest.approx(means[-1], abs=1e-6)
    else:
        assert found.value == pytest.approx(sum(ended) / len(ended), abs=1e-6)


def test_windows_have_65536_steps_and_100_episodes():
    assert (score.WINDOW, score.MIN_EPISODES) == (65_536, 100)
    found = MaxMeanReturn(64)
    assert math.isnan(found.value)
    ends = torch.zeros(64, 1024, dtype=torch.bool)
    found.on_batch(batch(torch.ones(64, 1024), ends))
    assert math.isnan(found.value)
    ends[:, -1] = True
    found.on_batch(batch(torch.ones(64, 1024), ends))  # 64 episodes: no window counts yet
    assert math.isnan(found.last)
    assert found.value == 2048.0
    found.on_batch(batch(torch.zeros(64, 1024), ends))  # the last 100: 36 of 2048, 64 of 0
    assert found.value == found.last == 2048 * 0.36


def test_non_finite_rewards_stay_within_their_episode():
    running = RunningEpisodes(2)
    rewards = np.array([[1.0, np.nan, 2.0, 3.0], [np.inf, 1.0, 1.0, 1.0]])
    dones = np.array([[True, True, False, True], [True, False, True, False]])
    ended = running.add(rewards, dones)
    np.testing.assert_array_equal(ended.returns, [1.0, np.inf, np.nan, 2.0, 5.0])
    np.testing.assert_array_equal(ended.lengths, [1, 1, 1, 2, 2])
    np.testing.assert_array_equal(ended.steps, [0, 0, 1, 2, 3])
    np.testing.assert_array_equal(running.returns, [0.0, 1.0])
    np.testing.assert_array_equal(running.lengths, [0, 1])

import math

import pytest
import torch

from recurl.trainers.run.episodes import EpisodeStats


def test_episodes_continue_over_batches_and_through_a_saved_state():
    rewards = torch.tensor([[1.0, 2.0, 4.0, 8.0], [1.0, 1.0, 1.0, 1.0]])
    dones = torch.tensor([[False, True, False, False], [False, False, False, True]])
    stats = EpisodeStats(2)
    assert math.isnan(stats.mean_return)
    assert math.isnan(stats.mean_length)
    stats.update(rewards, dones)
    assert list(stats.returns) == [3.0, 4.0]
    other = EpisodeStats(2)
    other.load_state_dict(stats.state_dict())
    for each in (stats, other):
        each.update(rewards, dones)
        assert list(each.returns) == [3.0, 4.0, 15.0, 4.0]
        assert list(each.lengths) == [2, 4, 4, 4]
        assert each.episodes == 4


def test_every_episode_of_random_batches_is_summed_in_order_of_its_end():
    generator = torch.Generator().manual_seed(0)
    stats = EpisodeStats(5)
    running, lengths, ended = [0.0] * 5, [0] * 5, []
    for chance in (0.3, 0.0, 1.0, 0.1, 0.5):
        rewards = torch.randn(5, 9, generator=generator)
        dones = torch.rand(5, 9, generator=generator) < chance
        stats.update(rewards, dones)
        for t in range(9):
            for row in range(5):
                running[row] += rewards[row, t].item()
                lengths[row] += 1
                if dones[row, t]:
                    ended.append((running[row], lengths[row]))
                    running[row], lengths[row] = 0.0, 0
        assert stats.episodes == len(ended)
        assert list(stats.returns) == pytest.approx([value for value, _ in ended[-20:]], abs=1e-12)
        assert list(stats.lengths) == [length for _, length in ended[-20:]]


def test_a_target_needs_twenty_episodes():
    stats = EpisodeStats(1)
    stats.update(torch.ones(1, 19), torch.ones(1, 19, dtype=torch.bool))
    assert not stats.reached(1.0)
    stats.update(torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool))
    assert stats.reached(1.0)
    assert not stats.reached(1.1)
    assert not stats.reached(None)


def test_an_episode_that_was_cut_is_not_counted_with_the_next_one():
    stats = EpisodeStats(2)
    never = torch.zeros(2, 3, dtype=torch.bool)
    stats.update(torch.ones(2, 3), never)
    ends = torch.tensor([[False, True], [False, True]])
    stats.update(torch.ones(2, 2), ends, begins=torch.tensor([True, False]))
    assert list(stats.returns) == [2.0, 5.0]
    assert list(stats.lengths) == [2, 5]

"""Each private name of Gymnasium that recurl uses still behaves as recurl expects."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from recurl.core.errors import UnsupportedError
from recurl.envs.gymnasium_compat import LAST_RESULTS, SyncVectorEnv, add_info, set_elapsed_steps


def create(kind=SyncVectorEnv):
    return kind([lambda: gym.make("CartPole-v1")] * 2, autoreset_mode=AutoresetMode.DISABLED)


def test_steps_without_the_buffers_are_those_of_gymnasium(monkeypatch):
    env, other = create(), create(gym.vector.SyncVectorEnv)
    env.reset(seed=0)
    other.reset(seed=0)
    kept = env._terminations
    del env._terminations
    monkeypatch.setattr(gym.vector.SyncVectorEnv, "step", lambda self, actions: (actions, self))
    assert env.step(3) == (3, env)
    monkeypatch.undo()
    env._terminations = kept
    for ours, theirs in zip(env.step(np.ones(2, int))[:4], other.step(np.ones(2, int))[:4], strict=True):
        assert np.array_equal(ours, theirs)


def test_last_results():
    assert all(hasattr(create(), name) for name in LAST_RESULTS)


def test_add_info():
    infos = add_info(create(), {}, {"speed": 3.0}, 1)
    assert infos["speed"].tolist() == [0, 3]
    assert infos["_speed"].tolist() == [False, True]
    with pytest.raises(UnsupportedError, match=r"^gymnasium .* has no gymnasium\.vector\.VectorEnv\._add_info"):
        add_info(object(), {}, {}, 0)


def test_set_elapsed_steps():
    limit = gym.wrappers.TimeLimit(gym.make("CartPole-v1").unwrapped, 5)
    limit.reset(seed=0)
    set_elapsed_steps(limit, 4)
    assert limit.step(0)[3]
    with pytest.raises(UnsupportedError, match="_elapsed_steps"):
        set_elapsed_steps(object(), 1)

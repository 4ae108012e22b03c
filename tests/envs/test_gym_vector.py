"""Environments stepped one after another behave as with Gymnasium's own class."""

from __future__ import annotations

import copy
import os
import signal
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode

from recurl.core.errors import WorkerError
from recurl.envs import GymEnv
from recurl.envs.gym_vector import SyncVectorEnv, make_vector

spaces = gym.spaces


class Random(gym.Env[Any, Any]):
    """Draws observations, and info in some steps; with ``reuses``, all observations share one array."""

    action_space = spaces.Discrete(3)

    def __init__(self, space: gym.Space[Any], reuses: bool = False, dtype: Any = None) -> None:
        self.observation_space, self._reuses, self._dtype = copy.deepcopy(space), reuses, dtype
        self._kept: Any = None

    def _seen(self) -> Any:
        seen = self.observation_space.sample()
        if self._reuses:
            self._kept = seen if self._kept is None else self._kept
            self._kept[...] = seen
            seen = self._kept
        return seen if self._dtype is None else seen.astype(self._dtype)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self._seen(), {"begun": 1}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        draw = self.np_random.random()
        info = {"draw": draw, "nested": {"action": int(action)}} if draw < 0.3 else {}
        return self._seen(), draw + action, draw > 0.9, draw < 0.1, info


BOX = spaces.Box(-1, 1, (3,), np.float32)
CASES: dict[str, tuple[gym.Space[Any], dict[str, Any]]] = {
    "box": (BOX, {}),
    "reused": (BOX, {"reuses": True}),
    "float64 for float32": (BOX, {"dtype": np.float64}),
    "image": (spaces.Box(0, 255, (4, 4, 1), np.uint8), {}),
    "number": (spaces.Box(0, 1, ()), {}),
    "discrete": (spaces.Discrete(5), {}),
    "dict": (spaces.Dict({"a": BOX, "b": spaces.Tuple([spaces.Discrete(2), BOX])}), {}),
}


def outcome(cls: type, space: gym.Space[Any], options: dict[str, Any]) -> list[Any]:
    env = cls([lambda: Random(space, **options)] * 3, autoreset_mode=AutoresetMode.DISABLED, copy=False)
    found = [copy.deepcopy(env.reset(seed=5))]
    random, kept = np.random.default_rng(0), []
    for _ in range(40):
        step = env.step(random.integers(0, 3, 3))
        found.append(copy.deepcopy(step))
        kept.append((step[1:4], found[-1][1:4]))  # unlike observations, these are not overwritten
        done = step[2] | step[3]
        if done.any():
            found.append(copy.deepcopy(env.reset(options={"reset_mask": done})))
    assert all(data_equivalence(now, then, exact=True) for now, then in kept)
    return found


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_gymnasiums_class(case: str) -> None:
    ours, theirs = (outcome(cls, *CASES[case]) for cls in (SyncVectorEnv, gym.vector.SyncVectorEnv))
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert data_equivalence(one, other, exact=True), f"{one} {other}"


@pytest.mark.parametrize("shape", [(1,), (4,), ()])
def test_observations_of_another_shape_are_refused_in_the_same_words(shape: tuple[int, ...]) -> None:
    said = []
    for cls in (SyncVectorEnv, gym.vector.SyncVectorEnv):
        env = cls([lambda: Random(BOX)] * 2, autoreset_mode=AutoresetMode.DISABLED, copy=False)
        env.reset(seed=0)
        env.envs[1].observation_space = spaces.Box(-1, 1, shape)
        with pytest.raises(ValueError, match=r".") as raised:
            env.step(np.zeros(2, np.int64))
        said.append(str(raised.value))
    assert said[0] == said[1]


def test_actions_for_another_number_of_rows_are_refused() -> None:
    env = GymEnv("CartPole-v1", num_envs=2, vectorization_mode="sync").gym_env
    env.reset(seed=0)
    with pytest.raises(ValueError, match="zip"):
        env.step(np.zeros(3, np.int64))


def test_environments_are_made_as_by_gymnasium() -> None:
    env = GymEnv("CartPole-v1", num_envs=2, vectorization_mode="sync").gym_env
    assert type(env) is SyncVectorEnv
    assert repr(env) == repr(gym.make_vec("CartPole-v1", 2, "sync"))
    assert [repr(one) for one in env.envs] == [repr(gym.make("CartPole-v1"))] * 2


@pytest.mark.slow
@pytest.mark.usefixtures("forked_environments")
def test_a_process_that_hangs_is_named_and_all_are_ended(monkeypatch):
    monkeypatch.setattr("recurl.envs.gym_vector._TIMEOUT_SECONDS", 1.0)
    env = make_vector("CartPole-v1", 2, "async")
    env.reset(seed=0)
    pids = [process.pid for process in env.processes]
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(WorkerError, match=rf"^Environment 1 \(process {pids[1]}\) hangs: no answer for 1 s"):
        env.step(np.array([0, 1]))
    assert [process.exitcode for process in env.processes] == [-signal.SIGKILL] * 2
    assert env.closed

"""Third-party environments: a resumed run equals an uninterrupted one."""

from __future__ import annotations

import re
import warnings
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field

import gymnasium as gym
import numpy as np
import pytest

from tests.trainers.resumes import assert_resumes_bit_for_bit, rows, small, train

pytestmark = pytest.mark.usefixtures("no_curves")

ENVS = {
    "CartPole": {"env": "CartPole-v1"},
    "CartPole, native": {"env": "CartPole-v1", "vectorization": "native"},
    "Pendulum": {"env": "Pendulum-v1", "wrapper": ("gymnasium.wrappers:RecordEpisodeStatistics",)},
    "FrozenLake": {"env": "FrozenLake-v1", "wrapper": ("gymnasium.wrappers:TimeLimit(max_episode_steps=7)",)},
    "Blackjack": {"env": "Blackjack-v1"},
    "MiniGrid": {"env": "minigrid:MiniGrid-DoorKey-5x5-v0", "drop_observations": ("mission",)},
    "moving balls": {"env": "minigrid:MiniGrid-Dynamic-Obstacles-5x5-v0", "drop_observations": ("mission",)},
    "POPGym": {"env": "popgym:popgym-HigherLowerEasy-v0"},
}


@dataclass
class Thing:
    """A moving object."""

    place: np.ndarray
    seen: list[int] = field(default_factory=list)


class Fast(Thing):
    pass


class World:
    """State of an environment: objects whose classes and number change, views, aliases, its own generator."""

    __slots__ = ("cells", "first", "latest", "rng", "things")

    def __init__(self):
        self.rng = np.random.default_rng(3)
        self.cells = np.zeros((3, 3))
        self.first = self.cells[0]  # a view
        self.things = {}
        self.latest = deque(maxlen=4)


class OwnEnv(gym.Env):
    observation_space = gym.spaces.Box(-np.inf, np.inf, (5,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        self.world = World()
        self.alias = self.world.cells
        self.episodes = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episodes += 1
        self.world.things.clear()
        self.time = 0
        return self._seen(), {}

    def step(self, action):
        world, self.time = self.world, self.time + 1
        kind = Fast if world.rng.random() < 0.5 else Thing
        world.things[self.time] = kind(world.rng.normal(size=2))
        world.things.pop(self.time - 3, None)
        world.first += world.rng.normal(size=3) * (1 + action)
        self.alias[1:] += world.first
        for thing in world.things.values():
            thing.seen.append(self.time)
            world.latest.append((type(thing).__name__, thing.place[0]))
        return self._seen(), float(self.alias[0].sum()) / 9, self.np_random.random() < 0.1, False, {}

    def _seen(self):
        fast = sum(type(thing) is Fast for thing in self.world.things.values())
        seen = sum(len(thing.seen) for thing in self.world.things.values())
        latest = sum(place for _, place in self.world.latest)
        return np.array([fast, seen, latest, self.alias.sum() / 9, self.episodes], np.float32)


class Forgetful(OwnEnv):
    """Keeps its state in a Python generator, whose position can't be read."""

    def __init__(self):
        super().__init__()
        self.numbers = (number for number in range(10**9))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # packages of these environments
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * ("minigrid" in ENVS[name]["env"])) for name in ENVS]
)
def test_a_resumed_run_is_the_run_that_was_left_alone(name, tmp_path):
    assert_resumes_bit_for_bit(small(**ENVS[name]), tmp_path)


def test_so_it_is_with_an_environment_of_ones_own(tmp_path):
    assert_resumes_bit_for_bit(small(env=OwnEnv), tmp_path)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"env_workers": 2},
        {"num_envs": 4, "env_workers": 2, "env_groups": 2},
        {"vectorization": "async"},
        {"overlap": True},
    ],
    ids=str,
)
@pytest.mark.usefixtures("shared_interpreter")
def test_and_in_other_processes(options, tmp_path):
    assert_resumes_bit_for_bit(small(env="CartPole-v1", **options), tmp_path)


def test_resuming_reports_why_a_state_was_not_saved(tmp_path):
    config = small(env=Forgetful)
    train(config, tmp_path, stop_after=3)
    said = " ".join(train(config, tmp_path, resume=True).split())
    assert "Forgetful() isn't restored: Forgetful.numbers is of type generator, whose state can't be read." in said
    assert "Its episodes start over, and the resumed run differs." in said
    assert len(rows(tmp_path)) == 8


class ForgetfulLater(OwnEnv):
    """Creates such a generator only after more steps than the trial takes."""

    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 40:
            self.numbers = (number for number in range(10**9))
        return super().step(action)


class Fleeing(OwnEnv):
    """Keeps its state in a method, which changes after the trial."""

    steps = 0

    def reset(self, *, seed=None, options=None):
        self.mode = self.chase
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.steps += 1
        if self.steps > 40:
            self.mode = self.flee
        return super().step(self.mode(action))

    def chase(self, action):
        return action

    def flee(self, action):
        return 1 - action


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("env", "saving", "restoring", "why"),
    [
        (ForgetfulLater, r"ForgetfulLater\.numbers is of type generator.* begins new", None, "ForgetfulLater.numbers"),
        (Fleeing, None, r"can't be restored: The state has the method flee", "the checkpoint has no matching state"),
    ],
)
@pytest.mark.usefixtures("shared_interpreter")
def test_a_state_that_is_lost_after_the_trial_costs_no_training(tmp_path, env, saving, restoring, why, workers):
    config = small(env=env, env_workers=workers)
    with pytest.warns(UserWarning, match=saving) if saving else nullcontext():
        train(config, tmp_path, stop_after=3)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        said = " ".join(train(config, tmp_path, resume=True).split())
    assert restoring is None or any(re.search(restoring, str(warning.message)) for warning in warned)
    assert why in said
    assert "Its episodes start over, and the resumed run differs." in said
    assert len(rows(tmp_path)) == 8

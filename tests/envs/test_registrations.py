"""Environments registered in a script are available in its workers."""

import os
import pickle
import sys
import threading
from pathlib import Path

import cloudpickle
import gymnasium as gym
import pytest
from gymnasium.envs.registration import EnvSpec

from recurl.core.errors import ArgumentError
from recurl.envs.registrations import Registration, register_all, registrations
from recurl.envs.tasks import TMazeEnv

SCRIPT = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
from recurl.envs import GymEnv, ParallelEnv

class Mine(CartPoleEnv):
    pass

gymnasium.register("ByClass-v0", Mine, max_episode_steps=5)
gymnasium.register("ByName-v0", "__main__:Mine", max_episode_steps=5)

with ParallelEnv(2, [lambda: GymEnv("ByClass-v0"), lambda: GymEnv("ByName-v0")]) as env:
    assert env.rollout(9, break_when_any_done=False)["next", "done"].any(1).all()
print("good")
"""


@pytest.mark.slow
def test_those_of_the_main_script_reach_workers(tmp_path, programs):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = programs.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert (done.stdout, done.returncode) == ("good\n", 0), done.stderr


@pytest.fixture
def registered():
    """Register an environment for one test."""
    before = dict(gym.registry)
    yield lambda *arguments, **options: gym.register(*arguments, **options)
    gym.registry.clear()
    gym.registry.update(before)


def sent(name):
    return next(found for found in registrations() if found.id == name)


def test_registrations_of_new_interpreters_are_not_sent(registered):
    registered("recurl-test/Sent-v0", TMazeEnv, kwargs={"corridor_length": 3})
    names = {found.id for found in registrations()}
    assert "recurl-test/Sent-v0" in names
    assert not names & {"CartPole-v1", "recurl/TMaze-v0"}
    data = sent("recurl-test/Sent-v0")
    del gym.registry["recurl-test/Sent-v0"]
    register_all([data])
    assert isinstance(gym.make("recurl-test/Sent-v0").unwrapped, TMazeEnv)
    spec = gym.registry["recurl-test/Sent-v0"]
    register_all([data])
    assert gym.registry["recurl-test/Sent-v0"] is spec


def test_an_unsendable_registration_raises_when_made(registered):
    lock = threading.Lock()
    registered("recurl-test/Locked-v0", TMazeEnv, kwargs={"lock": lock})
    registered("recurl-test/Closure-v0", lambda: lock)
    for name in ("recurl-test/Locked-v0", "recurl-test/Closure-v0"):
        data = sent(name)
        del gym.registry[name]
        register_all([data])
        with pytest.raises(ArgumentError, match=r"can't be sent to a worker process .*lock.*'module:id'"):
            gym.make(name)


def test_an_unreadable_registration_raises_when_made(registered):
    register_all([Registration("recurl-test/Damaged-v0", b"no pickle")])
    with pytest.raises(ArgumentError, match="can't be sent to a worker process"):
        gym.make("recurl-test/Damaged-v0")
    spec = EnvSpec("recurl-test/Plain-v0", "recurl.envs.tasks:TMazeEnv")
    register_all([Registration(spec.id, cloudpickle.dumps(spec))])
    assert pickle.loads(cloudpickle.dumps(gym.registry[spec.id])) == spec

from __future__ import annotations

import inspect

import gymnasium
import pytest

from recurl.core.errors import ArgumentError
from recurl.envs.tasks import TASKS, register_tasks


@pytest.mark.parametrize("task", TASKS.values(), ids=list(TASKS))
def test_made_by_gymnasium_single_and_vectorised(task):
    assert isinstance(gymnasium.make(task.id).unwrapped, task.env)
    vector = gymnasium.make_vec(task.id, num_envs=3)
    assert isinstance(vector, task.vector_env)
    assert vector.num_envs == 3
    sync = gymnasium.make_vec(task.id, num_envs=2, vectorization_mode="sync")
    assert sync.observation_space.contains(sync.reset(seed=0)[0])


@pytest.mark.parametrize("task", TASKS.values(), ids=list(TASKS))
def test_the_returns_take_the_environments_own_arguments(task):
    own = inspect.signature(task.env).parameters.keys() - {"render_mode"}
    for function in (task.optimal_return, task.memoryless_return):
        assert inspect.signature(function).parameters.keys() == own
    vector = inspect.signature(task.vector_env).parameters.keys()
    assert vector == own | {"num_envs", "autoreset_mode"}
    assert task.memoryless_return() < task.optimal_return()


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("Bandit-v0", {"pulls": 0}, "pulls must be an integer of at least 1; got 0"),
        ("ColorCubes-v0", {"targets": 0}, "targets must be an integer of at least 1; got 0"),
        ("EndlessTMaze-v0", {"corridors": 0}, "corridors must be an integer of at least 1; got 0"),
        ("MaskedCartPole-v1", {"max_episode_steps": -1}, "max_episode_steps must be"),
        ("RepeatPrevious-v0", {"num_symbols": -1}, "num_symbols must be"),
        ("RockSample-v0", {"size": 2, "rocks": 5}, "rocks must be at most one for each of the 4 cells; got 5"),
        ("TMaze-v0", {"corridor_length": -1}, "corridor_length must be an integer of at least 1; got -1"),
    ],
)
def test_no_returns_of_a_task_that_can_not_be_made(name, arguments, message):
    task = TASKS[f"recurl/{name}"]
    for function in (task.env, task.optimal_return, task.memoryless_return):
        with pytest.raises(ArgumentError, match=message):
            function(**arguments)


def test_arguments_reach_the_environments():
    assert gymnasium.make("recurl/RepeatPrevious-v0", num_symbols=6).action_space.n == 6
    assert (
        gymnasium.make_vec("recurl/TMaze-v0", autoreset_mode="Disabled").metadata["autoreset_mode"].value == "Disabled"
    )


def test_registering_twice_is_harmless():
    before = dict(gymnasium.registry)
    register_tasks()
    assert gymnasium.registry == before

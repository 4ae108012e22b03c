from __future__ import annotations

import inspect

import gymnasium
import pytest

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


def test_arguments_reach_the_environments():
    assert gymnasium.make("recurl/RepeatPrevious-v0", num_symbols=6).action_space.n == 6
    assert (
        gymnasium.make_vec("recurl/TMaze-v0", autoreset_mode="Disabled").metadata["autoreset_mode"].value == "Disabled"
    )


def test_registering_twice_is_harmless():
    before = dict(gymnasium.registry)
    register_tasks()
    assert gymnasium.registry == before

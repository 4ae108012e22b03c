"""Groups of environments in the same workers, and steps that are started before they are awaited."""

import sys

import cloudpickle
import pytest
import torch

from recurl.core.errors import ArgumentError, UsageError
from recurl.core.specs import Unbounded
from recurl.envs import (
    EnvBase,
    GroupedEnv,
    GymEnv,
    InitTracker,
    ParallelEnv,
    StepCounter,
    TensorDictPrimer,
    check_env_specs,
    parallel_groups,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_interpreter")]

# Workers can't import the tests, so definitions of this module are pickled by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def create() -> EnvBase:
    return GymEnv("CartPole-v1", num_envs=2, categorical_action_encoding=True, vectorization_mode="sync")


def remembering() -> EnvBase:
    return create().append_transform(InitTracker()).append_transform(TensorDictPrimer(memory=Unbounded(3)))


def moves(rows: int, steps: int = 40) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return list(torch.randint(2, (steps, rows)))


def walk(env: EnvBase, actions: list[torch.Tensor], *, begun: bool = False) -> list[object]:
    root, seen = env.reset(seed=3), []
    for action in actions:
        root.set("action", action)
        if begun:
            env.begin_step(root)
        after = env.step(root)
        root = env.maybe_reset(env.carry(after))
        seen.append((after.clone(), root.clone()))
    return seen


def same(left: list[object], right: list[object]) -> bool:
    return all((a == b).all() for pair in zip(left, right, strict=True) for a, b in zip(*pair, strict=True))


def test_rows_of_groups_are_those_of_one_process() -> None:
    plain = GymEnv("CartPole-v1", num_envs=8, categorical_action_encoding=True, vectorization_mode="sync")
    with parallel_groups(2, 2, create) as env:
        check_env_specs(env)
        assert env.batch_size == (8,)
        found = walk(env, moves(8))
    assert any(after["next", "done"].any() for after, _ in found)
    assert same(found, walk(plain, moves(8)))


@pytest.mark.parametrize("make", [create, remembering])
def test_a_step_that_was_begun_is_the_same(make: object) -> None:
    """Rows that end because of a transform around the workers are reset too."""
    with ParallelEnv(2, make, concatenate=True) as workers:
        for env in (workers, workers.append_transform(StepCounter(max_steps=5))):
            seen = [walk(env, moves(4), begun=begun) for begun in (False, True)]
            assert sum(int(after["next", "done"].sum()) for after, _ in seen[0]) > 4
            assert same(*seen)


@pytest.mark.parametrize("begun", [False, True])
def test_done_rows_that_were_edited_are_reset(begun: bool) -> None:
    """The done flags reported by the workers are no longer valid then."""
    with ParallelEnv(2, create, concatenate=True) as env:
        for edit in (torch.Tensor.logical_or_, torch.logical_or, torch.logical_and):
            root = env.reset(seed=3)
            for action in moves(4, 4):  # none of the rows ends by itself
                root.set("action", action)
                if begun:
                    env.begin_step(root)
                root = env.carry(env.step(root))
            root.set("done", edit(root["done"], torch.tensor([[False], [True], [False], [False]])))
            ended = root["done"][1].item()
            old, root = root.clone(), env.maybe_reset(root)
            assert not root["done"].any()
            assert torch.equal(root["observation"], old["observation"]) != ended
            assert (root["observation"][1].abs() <= 0.05).all() == ended
            assert ended == (edit is not torch.logical_and)


def test_a_step_that_was_begun_is_finished_or_given_up() -> None:
    with parallel_groups(2, 1, create) as env:
        first, second = env.groups
        root = first.reset(seed=0).set("action", torch.tensor([0, 1]))
        begun = root.clone()
        first.begin_step(root)
        other = second.reset(seed=1)  # replied to after the started step
        with pytest.raises(UsageError, match="must be finished with the same root and action"):
            first.step(begun)
        first.begin_step(root)
        assert (first.reset(seed=0)["observation"] == begun["observation"]).all()
        assert not second.step(other.set("action", torch.tensor([0, 1])))["next", "done"].any()


def test_groups_save_their_state() -> None:
    def task() -> EnvBase:
        return GymEnv("recurl/RepeatPrevious-v0", num_envs=2, categorical_action_encoding=True)

    with parallel_groups(2, 1, task) as env:
        root = env.reset(seed=1)
        state = env.get_state()
        action = torch.tensor([0, 1, 2, 3])
        first = env.step(root.clone().set("action", action))
        env.set_state(state)
        assert (first == env.step(root.set("action", action))).all()


def test_groups_that_do_not_fit() -> None:
    with pytest.raises(ArgumentError, match="num_groups must be at least 1, got 0"):
        parallel_groups(0, 1, create)
    with pytest.raises(ArgumentError, match=r"one batch dimension, \[B\], got \[\[2\], \[\]\]"):
        GroupedEnv([create(), GymEnv("CartPole-v1")])
    with pytest.raises(ArgumentError, match="must have equal specs"):
        GroupedEnv([create(), GymEnv("Pendulum-v1", num_envs=2)])

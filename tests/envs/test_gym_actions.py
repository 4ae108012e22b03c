import numpy as np
import pytest
import torch
from tensordict import TensorDict

from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.core.specs import Composite
from recurl.envs import GymEnv, GymWrapper, ParallelEnv, SerialEnv
from recurl.envs.utils import check_env_specs
from tests.envs.masked import ACTION_SPACES
from tests.envs.small import CountEnv, spaces

# The environment rejects every action that is not in its space.
ANY = "RecurlTest/AnyAction-v0"


@pytest.mark.parametrize("kind", ACTION_SPACES)
def test_every_kind_of_action_is_drawn_and_taken(kind):
    for env in (GymEnv(ANY, kind=kind), GymEnv(ANY, num_envs=2, vectorization_mode="sync", kind=kind)):
        check_env_specs(env)
        assert isinstance(env.action_spec, Composite) == (kind in ("dict", "tuple", "nested"))
        assert env.rollout(8, break_when_any_done=False).shape[-1] == 8


def test_parts_reach_the_environment_by_name():
    space = spaces.Dict(
        {"b": spaces.Discrete(3, start=2), "a": spaces.Tuple([spaces.MultiBinary(2), spaces.Box(-1, 1, (2,))])}
    )
    env = GymWrapper(CountEnv(action_space=space))
    action = {"b": torch.tensor(1), "a": {"0": torch.tensor([1, 0]), "1": torch.tensor([0.5, -0.5])}}
    env.step(env.reset().set("action", TensorDict.from_dict(action)))
    (taken,) = env.gym_env.unwrapped.actions
    assert taken["b"] == 3
    assert taken["a"][0].tolist() == [1, 0]
    assert taken["a"][1].tolist() == [0.5, -0.5]
    assert space.contains(taken)


@pytest.mark.slow
@pytest.mark.usefixtures("shared_interpreter")
def test_batches_of_workers():
    played = []
    for kind in (SerialEnv, ParallelEnv):
        with kind(2, _nested) as env:
            check_env_specs(env)
            env.set_seed(0)
            torch.manual_seed(0)
            played.append(env.rollout(8, break_when_any_done=False).exclude("collector"))
            if kind is SerialEnv:
                continue
            with pytest.raises(ArgumentError, match="must fit"):
                env.step(env.reset().set("action", torch.zeros(2, dtype=torch.int64)))
            with pytest.raises(ArgumentError, match=r"a part \('action', 'other'\)"):
                env.step(env.reset().set(("action", "other"), torch.zeros(2)))
    assert (played[0] == played[1]).all()


def _nested():
    from tests.envs import masked

    assert masked
    return GymEnv(ANY, kind="nested")


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (torch.tensor(1), r"'action' must have the entries \['a', 'b'\], got a tensor"),
        (TensorDict({"b": torch.tensor(1)}), r"must have the entries \['a', 'b'\], got \['b'\]"),
        (TensorDict({"b": torch.tensor(9), "a": torch.zeros(2)}), r"must be an integer in \[0, 3\)"),
        (
            TensorDict({"b": TensorDict({"x": torch.zeros(())}), "a": torch.zeros(2)}),
            r"\('action', 'b'\) must be a tensor",
        ),
    ],
)
def test_wrong_parts_are_refused(action, message):
    env = GymWrapper(CountEnv(action_space=spaces.Dict({"b": spaces.Discrete(3), "a": spaces.Box(-1, 1, (2,))})))
    with pytest.raises(ArgumentError, match=message):
        env.step(env.reset().set("action", action))


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Dict({"say": spaces.Text(3)}), r"for \('action', 'say'\)"),
        (spaces.Tuple([spaces.Graph(spaces.Discrete(2), None)]), r"for \('action', '0'\)"),
        (spaces.Dict({}), "'action' must not be empty"),
    ],
)
def test_spaces_without_tensors_are_refused_by_key(space, message):
    with pytest.raises(UnsupportedError, match=message):
        GymWrapper(CountEnv(action_space=space))


def test_matrices_of_integers_are_checked():
    env = GymWrapper(CountEnv(action_space=spaces.MultiDiscrete(np.array([[2, 3], [4, 4]]))))
    env.step(env.reset().set("action", torch.tensor([[1, 2], [3, 3]])))
    assert env.gym_env.unwrapped.actions[0].tolist() == [[1, 2], [3, 3]]
    with pytest.raises(ArgumentError, match=r"integers in \[0, \[\[2, 3\], \[4, 4\]\]\)"):
        env.step(env.reset().set("action", torch.tensor([[2, 2], [3, 3]])))

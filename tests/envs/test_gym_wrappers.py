import gymnasium as gym
import pytest

from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingDependencyError
from recurl.envs import GymEnv
from recurl.envs.gym_wrappers import FirstActions, NamedWrapper


def limit(env):
    return gym.wrappers.TimeLimit(env, 3)


def test_the_first_wrapper_is_innermost():
    env = GymEnv("CartPole-v1", wrappers=[limit, gym.wrappers.FlattenObservation])
    assert str(env.gym_env).startswith("<FlattenObservation<TimeLimit<TimeLimit")


@pytest.mark.slow
@pytest.mark.usefixtures("forked_environments")
@pytest.mark.parametrize("mode", [None, "sync", "async"])
def test_rows_of_vectors_are_wrapped(mode):
    with GymEnv("CartPole-v1", 2, vectorization_mode=mode, wrappers=[limit]) as env:
        assert env.rollout(9)["next", "truncated"][:, -1].all()
        assert env.rollout(9).shape == (2, 3)


def test_arguments_of_named_wrappers():
    wrap = NamedWrapper("gymnasium.wrappers:TimeLimit(max_episode_steps=2)")
    assert GymEnv("CartPole-v1", wrappers=[wrap]).rollout(9).shape == (2,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("TimeLimit", "--wrapper takes module:Class, got 'TimeLimit'"),
        ("gymnasium.wrappers:TimeLimt", r"has no 'TimeLimt'\. Did you mean TimeLimit\?"),
        ("gymnasium:Env", "--wrapper gymnasium:Env must be a subclass of gymnasium.Wrapper, got <class"),
        ("gymnasium.wrappers.vector:FlattenObservation", "got a wrapper of vector environments"),
        ("gymnasium.wrappers:TimeLimit(5)", r"takes module:Class or module:Class\(name=value\), got"),
        ("gymnasium.wrappers:TimeLimit(x=y)", "takes module:Class or"),
        ("gymnasium.wrappers:TimeLimit(", "takes module:Class or"),
    ],
)
def test_names_that_cannot_be_used(text, message):
    with pytest.raises(ArgumentError, match=message):
        NamedWrapper(text)


def test_invalid_wrappers():
    with pytest.raises(MissingDependencyError, match="there is no module 'no_such': install the package"):
        NamedWrapper("no_such:Thing")
    with pytest.raises(ArgumentError, match=r"TimeLimit can't wrap .*max_episode_steps.*write its arguments"):
        GymEnv("CartPole-v1", wrappers=[NamedWrapper("gymnasium.wrappers:TimeLimit")])
    with pytest.raises(ArgumentTypeError, match=r"A wrapper must return a gymnasium\.Env, got None"):
        GymEnv("CartPole-v1", wrappers=[lambda env: None])  # type: ignore[arg-type, return-value] # rejected
    with pytest.raises(ArgumentError, match="Wrappers need single environments"):
        GymEnv("CartPole-v1", 2, vectorization_mode="vector_entry_point", wrappers=[limit])


def test_first_actions():
    env = FirstActions(gym.make("Taxi-v4"), 4)
    assert env.action_space == gym.spaces.Discrete(4)
    env.reset(seed=0)
    other = gym.make("Taxi-v4")
    other.reset(seed=0)
    assert env.step(3)[0] == other.step(3)[0]
    with pytest.raises(ArgumentError, match=r"needs a Discrete action space, got Box"):
        FirstActions(gym.make("Pendulum-v1"), 2)
    with pytest.raises(ArgumentError, match=r"count must be between 1 and 6, the number of actions, got 7"):
        FirstActions(gym.make("Taxi-v4"), 7)

import pytest

from recurl.errors import ArgumentError
from recurl.trainers import DQNConfig, PPOConfig, make_env


@pytest.mark.parametrize("kind", [PPOConfig, DQNConfig])
def test_rows_device_and_arguments(kind):
    env = make_env(kind(env="recurl/RepeatPrevious-v0", env_kwargs=("num_symbols=3",)), 5)
    assert env.batch_size == (5,)
    assert env.action_spec_unbatched.n == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env": "NoSuchEnv-v0"}, "--env NoSuchEnv-v0 .*can't be used: .*NoSuchEnv"),
        ({"env": "no-such-module:Env-v0"}, "--env no-such-module:Env-v0 .*no-such-module"),
        ({"env_kwargs": ("colour=1",)}, r"does not take --env-kwargs .*colour"),
        ({"env_kwargs": ("k=0",)}, "k must be"),
    ],
)
def test_environments_that_cannot_be_made(options, message):
    with pytest.raises(ArgumentError, match=message):
        make_env(PPOConfig(**{"env": "recurl/RepeatPrevious-v0", **options}), 2)

import pytest

from recurl.core.errors import ArgumentError
from recurl.trainers import DQNConfig, R2D2Config

ENV = "recurl/TMaze-v0"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slices": 0}, "--slices must be positive, got 0"),
        ({"n_steps": 0}, "--n-steps must be positive"),
        ({"burn_in": -1}, "--burn-in must not be negative"),
        ({"eps_init": 1.5}, "--eps-init must lie between 0 and 1"),
        ({"eps_init": 0.1, "eps_end": 0.2}, "--eps-end must not exceed --eps-init, got 0.2 and 0.1"),
        ({"burn_in": 32}, "--burn-in must be less than --slice-length, got 32 and 32"),
        ({"buffer_size": 100}, "--buffer-size must hold one batch of 128 steps, got 100"),
        ({"cell": "rnn"}, "--cell: There is no cell"),
    ],
)
@pytest.mark.parametrize("kind", [DQNConfig, R2D2Config])
def test_options_that_cannot_be_used(kind, options, message):
    with pytest.raises(ArgumentError, match=message):
        kind(env=ENV, **options)


def test_r2d2_is_dqn_with_priorities():
    config = R2D2Config(env=ENV)
    own = {"algorithm": "r2d2", "prioritized": True, "actor_eps": 0.4, "actor_eps_exponent": 7.0}
    assert config.to_dict() == {**DQNConfig(env=ENV).to_dict(), **own}


def test_burn_in_is_a_quarter_of_a_slice_unless_given():
    assert [DQNConfig(env=ENV, slice_length=length).burn_in_steps for length in (1, 4, 84)] == [0, 1, 21]
    assert DQNConfig(env=ENV, slice_length=84, burn_in=3).burn_in_steps == 3

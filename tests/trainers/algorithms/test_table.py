import json

import pytest

from recurl.core.errors import ArgumentError
from recurl.trainers import OPTIONS, PPOConfig, read_options

ENV = "recurl/TMaze-v0"


@pytest.mark.parametrize("name", ["ppo", "a2c", "impala", "dqn", "r2d2", "sac", "td3"])
def test_every_algorithm_is_read_back(name):
    config = OPTIONS[name](env=ENV, gamma=0.5)
    read = read_options(json.loads(json.dumps(config.to_dict())))
    assert read == config
    assert type(read) is OPTIONS[name]


def test_without_a_name_it_is_ppo():
    assert read_options({"env": ENV}) == PPOConfig(env=ENV)


def test_unknown_algorithm():
    with pytest.raises(
        ArgumentError, match=r"There is no algorithm .nothing.\. There are ppo, dqn, r2d2.* and module:name"
    ):
        read_options({"algorithm": "nothing", "env": ENV})

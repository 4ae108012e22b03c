import math

import pytest
import torch

from recurl.trainers import ALGORITHMS, DQN, PPO, DQNConfig, PPOConfig
from tests.trainers.teachers import teacher_for

SMALL = {"env": "recurl/RepeatPrevious-v0", "hidden_size": 8, "num_envs": 4, "rollout_steps": 16, "total_steps": 192}


@pytest.fixture(params=ALGORITHMS)
def learner(request, tmp_path):
    config, kind = ALGORITHMS[request.param]
    continuous = {"env": "recurl/MaskedPendulum-v1"} if request.param == "td3" else {}
    made = kind(config(**{**SMALL, **continuous, **teacher_for(request.param, SMALL["env"], tmp_path / "teacher")}))
    yield made
    made.close()


def test_reports_the_metrics_it_names(learner):
    for _ in range(2):
        assert list(learner.learn(learner.collect())) == list(learner.reported)
    assert learner.live.format(**dict.fromkeys(learner.reported, 0.5))


def test_the_remaining_fraction_falls_from_one(learner):
    remaining = []
    for _ in range(3):
        learner.collect()
        remaining.append(learner.remaining)
    assert remaining == pytest.approx([1, 2 / 3, 1 / 3])


def test_a_checkpoint_holds_the_parts(learner):
    learner.collect()
    state = learner.state_dict()
    assert list(state) == ["env_steps", *learner.parts(), "parameters", "collector"]
    assert set(learner.collected) <= set(state)
    assert state["env_steps"] == 64


def test_parts_that_the_options_leave_out_are_none():
    for scale_rewards in (True, False):
        ppo = PPO(PPOConfig(**SMALL, scale_rewards=scale_rewards))
        assert (ppo.state_dict()["scaler"] is None) != scale_rewards
        ppo.load_state_dict(ppo.state_dict())
        ppo.close()


def test_the_first_number_that_is_not_finite_is_the_fault():
    dqn = DQN(DQNConfig(**SMALL))
    numbers = {"loss": 1.0, "grad_norm": math.inf, "eps": math.nan}
    assert dqn.report(numbers) is numbers
    assert dqn.fault == "grad_norm was inf"
    dqn.report(numbers, ("loss",))
    assert dqn.fault is None
    dqn.close()


def test_requested_rows_restart(learner):
    learner.collect()
    rows = torch.tensor([True, False, False, True])
    assert learner.restart(rows) is False
    assert torch.equal(learner.collect()["is_init"][:, 0, 0], rows)

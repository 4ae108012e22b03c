import math

import pytest
import torch

from recurl.core.errors import ArgumentError
from recurl.trainers import TD3, TD3Config
from tests.trainers.algorithms.test_sac import BOX, SMALL


def config(**options):
    return TD3Config(**{**BOX, **SMALL, **options})


@pytest.mark.parametrize(
    "options",
    [
        {"cell": "lstm", "burn_in": 3},
        {"cell": "gru", "shared_trunk": False, "num_layers": 2, "burn_in": 3, "refresh_states": True},
        {"cell": "none", "prioritized": True},
        {"cell": "gru", "start_state": "zero", "previous_action": True, "n_steps": 1, "scale_rewards": False},
    ],
)
def test_an_update_changes_every_weight(options):
    td3 = TD3(config(**options))
    before = {name: value.clone() for name, value in td3.agent.named_parameters()}
    targets = [value.clone() for network in td3.loss.target_networks() for value in network.parameters()]
    assert math.isnan(td3.learn(td3.collect())["loss_qvalue"])
    row = td3.learn(td3.collect())
    assert all(torch.tensor(list(row.values())).isfinite())
    assert td3.fault is None
    assert [name for name, value in td3.agent.named_parameters() if torch.equal(value, before[name])] == []
    followed = [value for network in td3.loss.target_networks() for value in network.parameters()]
    assert not any(map(torch.equal, followed, targets))
    td3.close()


def test_the_actor_is_trained_at_every_second_step():
    td3 = TD3(config(gradient_steps=3, learning_starts=0))
    rows = [td3.learn(td3.collect()) for _ in range(4)]
    made = [
        {int(state["step"]) for state in optimizer.optimizer.state.values()}
        for optimizer in (td3.actor_optimizer, td3.critic_optimizer)
    ]
    assert made == [{6}, {12}]
    assert all(math.isfinite(row["loss_actor"]) for row in rows)
    td3.close()


def test_the_turn_of_the_actor_is_saved():
    td3, resumed = (TD3(config(gradient_steps=1, learning_starts=0, policy_delay=2)) for _ in range(2))
    td3.learn(td3.collect())  # a step of the actor
    resumed.load_state_dict(td3.state_dict())
    assert [resumed.count() for _ in range(3)] == [False, True, False]
    td3.close()
    resumed.close()


def test_an_update_without_a_step_of_the_actor_is_no_fault():
    td3 = TD3(config(gradient_steps=1, learning_starts=0, policy_delay=2))
    rows = [td3.learn(td3.collect()) for _ in range(4)]
    assert [math.isnan(row["loss_actor"]) for row in rows] == [False, True, False, True]
    assert td3.fault is None
    td3.close()


def test_noise_falls_over_its_part_of_the_run():
    td3 = TD3(config(noise_init=0.9, noise_end=0.1, exploration_fraction=0.4))
    noise = [td3.learn(td3.collect())["noise"] for _ in range(5)]
    assert noise == pytest.approx([0.7, 0.5, 0.3, 0.1, 0.1])
    td3.close()


def test_noise_that_grows_is_refused():
    with pytest.raises(ArgumentError, match=r"--noise-end must not exceed --noise-init, got 0.5 and 0.2"):
        config(noise_init=0.2, noise_end=0.5)

import math

import pytest
import torch

from recurl.core.errors import ArgumentError
from recurl.trainers import SAC, SACConfig
from recurl.trainers.optim.gradient_step import GradientStep

BOX = {"env": "recurl/MaskedPendulum-v1", "env_kwargs": ("max_episode_steps=10",)}
CHOICE = {"env": "recurl/RepeatPrevious-v0", "env_kwargs": ("k=1", "episode_length=10")}
SMALL = {
    "hidden_size": 8,
    "num_envs": 4,
    "rollout_steps": 16,
    "slices": 6,
    "slice_length": 8,
    "learning_starts": 100,
    "total_steps": 640,
}


def config(**options):
    return SACConfig(**{**BOX, **SMALL, **options})


@pytest.mark.parametrize(
    "options",
    [
        {"cell": "lstm"},
        {"cell": "gru", "shared_trunk": False, "num_layers": 2, "burn_in": 3},
        {"cell": "gru", "prioritized": True, "refresh_states": True, "critics": 3},
        {"cell": "none", "shared_trunk": False, "normalize_observations": True},
        {"cell": "gru", "start_state": "zero", "previous_action": True, "previous_reward": True, "head_width": 0},
        {**CHOICE, "cell": "lstm", "burn_in": 2, "prioritized": True},
        {**CHOICE, "cell": "gru", "shared_trunk": False, "n_steps": 1, "scale_rewards": False},
    ],
)
def test_an_update_changes_every_weight(options):
    sac = SAC(config(**options))
    before = {name: value.clone() for name, value in sac.agent.named_parameters()}
    target = [value.clone() for value in sac.loss.target_qvalue_network.parameters()]
    alpha = sac.loss.log_alpha.clone()
    assert math.isnan(sac.learn(sac.collect())["loss_qvalue"])
    assert all(torch.equal(value, before[name]) for name, value in sac.agent.named_parameters())
    row = sac.learn(sac.collect())
    assert all(torch.tensor(list(row.values())).isfinite())
    assert sac.fault is None
    assert [name for name, value in sac.agent.named_parameters() if torch.equal(value, before[name])] == []
    assert not any(map(torch.equal, sac.loss.target_qvalue_network.parameters(), target))
    assert sac.loss.log_alpha != alpha
    sac.close()


def test_a_fixed_temperature_stays():
    sac = SAC(config(fixed_alpha=True, alpha=0.3))
    for _ in range(2):
        row = sac.learn(sac.collect())
    assert row["alpha"] == pytest.approx(0.3)
    assert sac.parts()["alpha_optimizer"] is None
    sac.close()


@pytest.mark.parametrize("shared", [True, False])
def test_every_weight_is_trained_once(shared):
    """Each parameter is in the actor's or the critics' optimizer; a shared trunk is in the critics'."""
    sac = SAC(config(shared_trunk=shared))
    optimizers = [part for part in sac.parts().values() if isinstance(part, GradientStep)]
    trained = [p for part in optimizers for group in part.optimizer.param_groups for p in group["params"]]
    assert len(trained) == len(set(trained))
    assert set(trained) == {*sac.agent.parameters(), sac.loss.log_alpha}
    memory = {p for name, p in sac.agent.actor.named_parameters() if "gru" in name or "lstm" in name}
    assert bool(memory & set(sac.agent.critics.parameters())) == shared
    sac.close()


def test_rewards_are_stored_unscaled_and_scaled_for_learning():
    sac = SAC(config(gamma=0.5))
    batch = sac.collect()
    sac.learn(batch)
    stored = sac.buffer[:]["next", "reward"]
    assert torch.equal(stored.sort(0).values, batch["next", "reward"].reshape(-1, 1).sort(0).values)
    seen = []
    forward = sac.loss.forward
    sac.loss.forward = lambda sample: seen.append(sample["next", "reward"]) or forward(sample)
    sac.learn(sac.collect())
    scale = sac.scaler(torch.ones(1)).item()
    assert 0.0 < scale < 0.5
    assert all(reward.abs().max() <= 17.0 * scale for reward in seen)
    sac.close()


def test_burnt_in_slices_start_from_states_of_all_networks():
    sac = SAC(config(cell="gru", shared_trunk=False, learning_starts=0, burn_in=3))
    for _ in range(3):
        sac.learn(sac.collect())
    sample = sac.buffer.sample()
    trained = sac.burnt_in(sample)
    starts, begins = trained["is_init"].squeeze(-1), trained["collector", "stored", "is_init"].squeeze(-1)
    assert len(trained) < len(sample)
    assert sac.loss.target_states == {"critic_state_h": ("target", "critic_state_h")}
    own, slow = trained["critic_state_h"], trained["target", "critic_state_h"]
    assert (own != slow)[starts & ~begins].any()
    assert not own[starts & begins].any()
    sac.close()


def test_states_are_refreshed():
    sac = SAC(config(cell="gru", learning_starts=0, refresh_states=True, total_steps=64, gradient_steps=30))
    batch = sac.collect()
    before = batch["state_h"].clone()
    sac.learn(batch)
    stored = sac.buffer[:]
    assert (stored["state_h"].flatten(1).sum(0) - before.flatten(0, 1).flatten(1).sum(0)).abs().max() > 1e-3
    sac.close()


def test_refreshed_states_must_be_started_from():
    with pytest.raises(ArgumentError, match=r"--refresh-states .* needs --start-state stored, got zero"):
        config(refresh_states=True, start_state="zero")
    with pytest.raises(ArgumentError, match=r"--refresh-states needs .* use fastest or loop, got pad"):
        config(refresh_states=True, backend="pad")


def test_the_step_size_has_a_schedule():
    sac = SAC(config(learning_rate_schedule="linear", total_steps=192))
    for factor in (1.0, 2 / 3, 1 / 3):
        sac.learn(sac.collect())
        for optimizer in (sac.actor_optimizer, sac.critic_optimizer, sac.alpha_optimizer):
            assert optimizer.optimizer.param_groups[0]["lr"] == pytest.approx(5e-4 * factor)
    sac.close()

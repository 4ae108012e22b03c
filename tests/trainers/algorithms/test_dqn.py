import math
from pathlib import Path

import pytest
import torch

from recurl.core.archive import save_archive
from recurl.core.errors import ArgumentError
from recurl.trainers import DQN, DQNConfig, R2D2Config
from recurl.trainers.files.checkpoints import restoring


def config(kind=DQNConfig, **options):
    return kind(
        **{
            "env": "recurl/RepeatPrevious-v0",
            "env_kwargs": ("k=1", "episode_length=10"),
            "hidden_size": 8,
            "num_envs": 4,
            "rollout_steps": 16,
            "gradient_steps": 4,
            "target_interval": 100,
            "slices": 6,
            "slice_length": 8,
            **({"burn_in": 3} if kind is R2D2Config else {}),
            "learning_starts": 100,
            "total_steps": 640,
            **options,
        }
    )


@pytest.mark.parametrize(
    "options",
    [
        {"cell": "lstm"},
        {"cell": "gru", "num_layers": 2, "double": False},
        {"cell": "none"},
        {"kind": R2D2Config},
        {"kind": R2D2Config, "cell": "none"},
        {"kind": R2D2Config, "cell": "gru", "start_state": "zero", "burn_in": 0},
        {"normalize_observations": True, "n_steps": 3},
    ],
)
def test_an_update_changes_every_weight(options):
    dqn = DQN(config(**options))
    before = {name: value.clone() for name, value in dqn.agent.named_parameters()}
    target = [value.clone() for value in dqn.loss.target_value_network.parameters()]
    assert math.isnan(dqn.learn(dqn.collect())["loss"])
    assert all(torch.equal(value, before[name]) for name, value in dqn.agent.named_parameters())
    row = dqn.learn(dqn.collect())
    assert dqn.env_steps == len(dqn.buffer) == 128
    assert all(torch.tensor(list(row.values())).isfinite())
    unchanged = [name for name, value in dqn.agent.named_parameters() if torch.equal(value, before[name])]
    assert unchanged == []
    assert dqn.targets.steps == 4
    assert all(map(torch.equal, dqn.loss.target_value_network.parameters(), target))
    dqn.close()


def test_target_network_follows():
    dqn = DQN(config(target_interval=4))
    for _ in range(2):
        dqn.learn(dqn.collect())
    for value, target in zip(dqn.agent.actor.parameters(), dqn.loss.target_value_network.parameters(), strict=True):
        assert torch.equal(value, target)


def test_target_network_follows_at_every_step():
    dqn = DQN(config(target_interval=None, target_rate=0.5))
    before = [value.clone() for value in dqn.loss.target_value_network.parameters()]
    for _ in range(2):
        dqn.learn(dqn.collect())
    assert not any(map(torch.equal, dqn.loss.target_value_network.parameters(), before))
    assert dqn.parts()["targets"] is None
    dqn.close()


@pytest.mark.parametrize(
    ("name", "of_old", "now"), [("drawn_by", "trajectory", "step"), ("greedy_returns", False, True)]
)
def test_runs_of_earlier_versions_resume(name, of_old, now):
    values = config().to_dict()
    del values[name]
    assert getattr(DQNConfig.from_dict(values), name) == of_old
    assert getattr(DQNConfig(env="x"), name) == now


def test_exploration_falls_over_its_part_of_the_run():
    dqn = DQN(config(eps_init=0.9, eps_end=0.1, exploration_fraction=0.4))
    eps = [dqn.learn(dqn.collect())["eps"] for _ in range(5)]
    assert eps == pytest.approx([0.7, 0.5, 0.3, 0.1, 0.1])


def test_the_buffer_is_a_ring_of_whole_rows():
    dqn = DQN(config(buffer_size=100, learning_starts=10_000))
    for _ in range(3):
        dqn.learn(dqn.collect())
    assert len(dqn.buffer) == 100
    assert dqn.buffer.storage.lanes == 4


def test_priorities_are_those_of_the_slices_that_were_drawn():
    dqn = DQN(config(R2D2Config, gradient_steps=1, learning_starts=0))
    dqn.learn(dqn.collect())
    priorities = dqn.buffer.drawing.state_dict()["priorities"][: len(dqn.buffer)]
    assert 1 < len(priorities.unique()) <= 7


def test_burnt_in_slices_start_from_states_of_both_networks():
    dqn = DQN(config(R2D2Config, learning_starts=0, target_interval=1000))
    for _ in range(3):
        dqn.learn(dqn.collect())
    sample = dqn.buffer.sample()
    trained = dqn.burnt_in(sample)
    starts = trained["is_init"].squeeze(-1)
    begins = trained["collector", "stored", "is_init"].squeeze(-1)
    assert starts.sum() == 6
    assert len(trained) < len(sample)
    own, slow = trained["state_h"], trained["target", "state_h"]
    assert (own != slow)[starts & ~begins].any()
    assert not own[starts & begins].any()
    assert torch.equal(own[~starts], slow[~starts])


def test_a_checkpoint_holds_the_steps_there_are_not_the_room_for_more(tmp_path):
    sizes = {}
    for room in (2_000, 200_000):
        dqn = DQN(config(buffer_size=room))
        dqn.learn(dqn.collect())
        save_archive(dqn.state_dict(), tmp_path / f"{room}.pt")
        sizes[room] = (tmp_path / f"{room}.pt").stat().st_size
    assert sizes[200_000] < sizes[2_000] + 1_000


def test_a_state_of_other_options_is_refused():
    dqn = DQN(config())
    dqn.learn(dqn.collect())
    state = dqn.state_dict()
    for other in ({"hidden_size": 16}, {"buffer_size": 1000}):
        words = r"1.pt doesn't fit the run's config\.json|saved buffer must have"
        with pytest.raises(ArgumentError, match=words), restoring(Path("1.pt")):
            DQN(config(**other)).load_state_dict(state)

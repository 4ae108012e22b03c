"""Metrics of how much actions change from step to step."""

import csv
import math

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from recurl.core.keys import TRAJ_STEPS
from recurl.core.seeding import seed_everything
from recurl.envs import GymEnv, InitTracker, TransformedEnv
from recurl.trainers import PPOConfig, SACConfig
from recurl.trainers.run.evaluate import evaluate_policy
from recurl.trainers.run.motion import motion_of
from tests.trainers.run.test_callbacks import run

pytestmark = pytest.mark.usefixtures("no_curves")


class Batches:
    def __init__(self):
        self.batches, self.rows = [], []

    def on_batch(self, batch):
        self.batches.append(batch.clone())

    def on_update(self, row):
        self.rows.append(row)


def differences(actions, begins):
    """Mean absolute first and second differences of rows ``[T, n]``, one step at a time."""
    first, second = [], []
    for row, begin in zip(actions, begins, strict=True):
        for t in range(1, len(row)):
            if not begin[t]:
                first.append(np.abs(row[t] - row[t - 1]).mean())
                if t > 1 and not begin[t - 1]:
                    second.append(np.abs(row[t] - 2 * row[t - 1] + row[t - 2]).mean())
    return np.mean(first), np.mean(second)


@pytest.mark.parametrize("kind", [PPOConfig, SACConfig])
def test_rows_have_the_differences_within_episodes(kind, tmp_path):
    more = (
        {"learning_starts": 64, "slices": 4, "slice_length": 8, "burn_in": 0}
        if kind is SACConfig
        else {"minibatches": 3}
    )
    steps = ("max_episode_steps=7",)
    small = {"num_envs": 3, "rollout_steps": 16, "total_steps": 96, "hidden_size": 8, "device": "cpu"}
    config = kind(env="recurl/MaskedArm-v0", env_kwargs=steps, eval_every=96, eval_episodes=2, **small, **more)
    seen = Batches()
    run(config, tmp_path, seen)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    for batch, row, line in zip(seen.batches, seen.rows, written, strict=True):
        wanted = differences(batch["action"].double().numpy(), batch["is_init"][..., 0].numpy())
        assert (row["action_rate"], row["action_acceleration"]) == pytest.approx(wanted, rel=1e-5)
        assert float(line["action_rate"]) == pytest.approx(wanted[0], rel=1e-4)
    with (tmp_path / "evaluations.csv").open(newline="") as file:
        assert float(list(csv.DictReader(file))[-1]["eval_action_rate"]) > 0


def test_choices_have_none(tmp_path):
    seen = Batches()
    run(PPOConfig(env="CartPole-v1", num_envs=8, total_steps=1024, hidden_size=8, device="cpu"), tmp_path, seen)
    assert "action_rate" not in seen.rows[0]


def test_without_steps_to_compare_there_is_no_number():
    batch = TensorDict({"action": torch.ones(2, 1, 3)}, [2, 1])
    batch[TRAJ_STEPS] = torch.zeros(2, 1, dtype=torch.int64)
    assert all(map(math.isnan, motion_of(batch).tolist()))
    env = TransformedEnv(GymEnv("recurl/MaskedArm-v0", 2, max_episode_steps=1), InitTracker())
    found = evaluate_policy(lambda step: step.set("action", torch.zeros(2, 2)), env, episodes=4)
    assert found.motion is None


def test_evaluations_have_the_differences_within_their_episodes():
    written = []

    def policy(tensordict):
        written.append((tensordict["is_init"].clone(), torch.rand(2, 2) * 2 - 1))
        return tensordict.set("action", written[-1][1])

    seed_everything(0)
    env = TransformedEnv(GymEnv("recurl/MaskedArm-v0", 2, max_episode_steps=5), InitTracker())
    found = evaluate_policy(policy, env, episodes=4)
    actions = torch.stack([action for _, action in written], 1).double().numpy()
    begins = torch.stack([flag[:, 0] for flag, _ in written], 1).numpy()
    assert found.motion == pytest.approx(differences(actions, begins), rel=1e-6)
    assert found.to_dict()["action_rate"] == found.motion[0]
    assert f"action rate {found.motion[0]:.4g}" in str(found)

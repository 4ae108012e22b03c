"""Seeds of environments in a batch: those of one environment after another, none of them twice."""

import torch

from recurl.envs import GymEnv, SerialEnv


def test_rows_of_a_batch_of_batches_have_successive_seeds() -> None:
    with SerialEnv(2, lambda: GymEnv("CartPole-v1", num_envs=3)) as env, GymEnv("CartPole-v1", num_envs=6) as flat:
        rows = env.reset(seed=5)["observation"].flatten(0, 1)
        assert torch.equal(rows, flat.reset(seed=5)["observation"])
        assert len(rows.unique(dim=0)) == 6

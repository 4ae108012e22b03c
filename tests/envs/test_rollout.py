from __future__ import annotations

import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict.nn import TensorDictModule

from recurl.core.errors import ArgumentError
from recurl.envs import GymEnv, GymWrapper, interact
from recurl.sequences.mode import recurrent_mode, set_recurrent_mode
from tests.envs.small import CountEnv
from tests.envs.test_utils import policy


def rows(*lengths):
    make = [lambda n=n: CountEnv(length=n) for n in lengths]
    return GymWrapper(SyncVectorEnv(make, autoreset_mode=AutoresetMode.DISABLED))


def test_shapes_and_names():
    batch = rows(9, 9).rollout(4)
    assert batch.shape == (2, 4)
    assert batch.names[-1] == "time"
    assert batch["next", "observation"].is_contiguous()
    assert GymWrapper(CountEnv()).rollout(3).names == ["time"]


def test_breaks():
    assert rows(2, 3).rollout(10).shape == (2, 2)
    batch = rows(2, 3).rollout(10, break_when_any_done=False, break_when_all_done=True)
    assert batch["observation"].squeeze(-1).tolist() == [[0, 1, 0], [0, 1, 2]]
    batch = rows(2, 3).rollout(6, break_when_any_done=False)
    assert batch["next", "observation"].squeeze(-1).tolist() == [[1, 2, 1, 2, 1, 2], [1, 2, 3, 1, 2, 3]]
    assert batch["next", "terminated"].sum() == 5


def test_steps_are_numbered_within_their_trajectories():
    found = rows(2, 3).rollout(6, break_when_any_done=False)["collector"]
    assert found["traj_steps"].tolist() == [[0, 1, 0, 1, 0, 1], [0, 1, 2, 0, 1, 2]]
    ids = found["traj_ids"] - found["traj_ids"].min()
    assert ids.tolist() == [[0, 0, 1, 1, 2, 2], [3, 3, 3, 4, 4, 4]]


def test_set_truncated():
    after = rows(2, 3).rollout(2, set_truncated=True)["next"]
    assert after["done"][:, -1].all()
    assert after["truncated"][:, -1].flatten().tolist() == [False, True]
    assert after["terminated"][:, -1].flatten().tolist() == [True, False]
    assert not after["done"][:, 0].any()


def test_callback_and_start():
    seen = []
    env = GymWrapper(CountEnv(length=9))
    root = env.carry(env.rand_step())
    batch = env.rollout(2, callback=lambda e, td: seen.append((e, td)), auto_reset=False, tensordict=root)
    assert batch["observation"].flatten().tolist() == [1.0, 2.0]
    assert [e for e, _ in seen] == [env, env]
    assert "reward" in seen[0][1]["next"]


def test_policies_run_on_their_device():
    env = GymEnv("Pendulum-v1", num_envs=2)
    net = TensorDictModule(torch.nn.Linear(3, 1), ["observation"], ["action"])
    batch = env.rollout(2, net, auto_cast_to_device=True)
    assert not batch["action"].requires_grad
    assert env.rollout(2, auto_cast_to_device=True).shape == (2, 2)
    assert env.rollout(2, lambda td: td.set("action", torch.zeros(2, 1)), auto_cast_to_device=True).shape == (2, 2)


def test_refusals():
    env = GymWrapper(CountEnv())
    with pytest.raises(ArgumentError, match="max_steps must be at least 1"):
        env.rollout(0)
    with pytest.raises(ArgumentError, match="needs break_when_any_done=False"):
        env.rollout(2, break_when_all_done=True)
    with pytest.raises(ArgumentError, match="and auto_reset=False must be given together"):
        env.rollout(2, auto_reset=False)
    with pytest.raises(ArgumentError, match="and auto_reset=False must be given together"):
        env.rollout(2, tensordict=env.reset())


@pytest.mark.parametrize("num_envs", [None, 3])
@pytest.mark.parametrize("mode", [True, False, None])
def test_recurrent_policies_step_sequentially_whatever_the_mode_outside(num_envs, mode):
    net = policy()
    env = GymEnv("CartPole-v1", num_envs=num_envs, policy=net)
    with set_recurrent_mode(mode):
        batch = env.rollout(40, net, break_when_any_done=False)
        assert recurrent_mode() is mode
    assert batch["next", "done"].any()
    states = [key for key in net[0].out_keys if isinstance(key, tuple)]
    assert len(states) == 2
    for key in states:
        root, after, done = batch[key[1:]], batch[key], batch["next", "done"].squeeze(-1)[..., :-1]
        time = len(env.batch_size)
        follows = root.narrow(time, 1, 39)
        assert torch.equal(follows[~done], after.narrow(time, 0, 39)[~done])
        assert not follows[done].any()
        assert after.any()
    assert torch.equal(batch["is_init"].squeeze(-1)[..., 1:], batch["next", "done"].squeeze(-1)[..., :-1])
    with set_recurrent_mode(True), torch.no_grad():
        embed = net[0](batch.clone())["embed"]
    assert torch.allclose(embed, batch["embed"], atol=1e-6)


def test_interact_returns_the_following_root():
    env = rows(2, 3)
    written = []
    root = interact(env, None, env.reset(), 3, write=lambda t, td: written.append((t, td)))
    assert [t for t, _ in written] == [0, 1, 2]
    assert root["observation"].flatten().tolist() == [1.0, 0.0]
    assert not root["done"].any()
    stopped = interact(env, None, env.reset(), 9, write=lambda t, td: None, stop=lambda td: td["next", "done"].any())
    assert stopped["observation"].flatten().tolist() == [2.0, 2.0]
    assert stopped["done"].flatten().tolist() == [True, False]

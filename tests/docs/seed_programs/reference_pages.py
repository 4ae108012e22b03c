"""Examples on the reference pages of GRUModule and LSTMModule, run for both."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq

from recurl.collectors import Collector
from recurl.envs import GymEnv, InitTracker, TransformedEnv
from recurl.modules import MLP, GRUModule, LSTMModule, set_recurrent_mode

STATES = {GRUModule: ["rs"], LSTMModule: ["rs_h", "rs_c"]}
DONE = {"done", "terminated", "truncated"}


def policy_of(kind: type[GRUModule | LSTMModule], env: TransformedEnv) -> Seq:
    states = STATES[kind]
    module = kind(
        input_size=env.observation_spec["observation"].shape[-1],
        hidden_size=64,
        in_keys=["observation", *states],
        out_keys=["intermediate", *(("next", key) for key in states)],
    )
    assert module.in_keys == ["observation", *states, "is_init"]
    mlp = MLP(num_cells=[64], out_features=1)
    return Seq(module, Mod(mlp, in_keys=["intermediate"], out_keys=["action"]))


def one_step(kind: type[GRUModule | LSTMModule]) -> None:
    """A policy adds its outputs to the entries of the environment, and needs no stored state."""
    env = TransformedEnv(GymEnv("Pendulum-v1"), InitTracker())
    policy = policy_of(kind, env)
    td = policy(env.reset())
    assert set(td.keys()) == {"action", "intermediate", "is_init", "next", "observation", *DONE}
    assert set(td["next"].keys()) == set(STATES[kind])
    assert all(td["next", key].shape == (1, 64) for key in STATES[kind])
    assert (td["action"].shape, td["intermediate"].shape) == ((1,), (64,))
    assert td.batch_size == torch.Size([])


def whole_trajectory(kind: type[GRUModule | LSTMModule]) -> None:
    """The same policy runs over time in recurrent mode."""
    env = TransformedEnv(GymEnv("Pendulum-v1"), InitTracker())
    policy_training = policy_of(kind, env)
    traj_td = env.rollout(3)
    with set_recurrent_mode(True):
        traj_td = policy_training(traj_td)
    assert traj_td.batch_size == (3,)
    assert set(traj_td.keys()) == {"action", "collector", "intermediate", "is_init", "next", "observation", *DONE}
    assert set(traj_td["next"].keys()) == {"is_init", "observation", "reward", *STATES[kind], *DONE}
    assert all(traj_td["next", key].shape == (3, 1, 64) for key in STATES[kind])
    assert traj_td["intermediate"].shape == (3, 64)


def canonical(kind: type[GRUModule | LSTMModule]) -> None:
    """Only entries that the module reads or writes are made contiguous."""
    module = kind(input_size=3, hidden_size=4, in_key="obs", out_key="out")
    td = TensorDict(
        {"obs": torch.zeros(5, 2, 3).transpose(0, 1), "reward": torch.zeros(5, 2, 1).transpose(0, 1)},
        batch_size=[2, 5],
    )
    td_canon = module.canonicalize(td)
    assert td_canon["obs"].is_contiguous()
    assert not td_canon["reward"].is_contiguous()
    assert not td["obs"].is_contiguous()
    assert module.canonical_keys == [*module.in_keys, *module.out_keys]
    assert module.canonicalize(td, inplace=True) is td
    assert td["obs"].is_contiguous()


def primer(kind: type[GRUModule | LSTMModule]) -> None:
    """With the primer in the environment, states are fed back, also by a collector."""
    env = TransformedEnv(GymEnv("Pendulum-v1"), InitTracker())
    policy = policy_of(kind, env)
    policy(env.reset())
    env = env.append_transform(policy[0].make_tensordict_primer())
    data_collector = Collector(env, policy, frames_per_batch=10)
    for data in data_collector:
        assert data.shape == (10,)
        for key in STATES[kind]:
            assert torch.equal(data[key][1:], data["next", key][:-1])
            assert data[key][1:].any()
        break
    data_collector.shutdown()


def main() -> None:
    for kind in STATES:
        one_step(kind)
        whole_trajectory(kind)
        canonical(kind)
        primer(kind)


if __name__ == "__main__":
    main()

"""Groups of agents under nested keys, as rows and back; and what to write where nested keys are refused."""

from __future__ import annotations

import re

import pytest
import torch
from tensordict import TensorDict

from recurl.collectors import Collector
from recurl.core.errors import ArgumentError, MissingKeyError
from recurl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer, agents_as_rows, rows_as_agents
from recurl.modules import LSTMModule, set_recurrent_mode
from recurl.objectives.value import GAE
from recurl.transforms import InitTracker
from tests.envs.agents import Walkers

B, T, A = 2, 5, 3


def nested():
    """Return a batch as TorchRL's environments of several agents write it."""
    torch.manual_seed(0)
    flags = {key: torch.zeros(B, T, 1, dtype=torch.bool) for key in ("done", "terminated", "truncated")}
    root = {"agents": {"observation": torch.randn(B, T, A, 2), "action": torch.randn(B, T, A, 1)}}
    after = {"agents": {"observation": torch.randn(B, T, A, 2), "reward": torch.randn(B, T, A, 1)}, **flags}
    batch = TensorDict({**root, "next": after, "is_init": torch.zeros(B, T, 1, dtype=torch.bool)}, [B, T])
    batch["next", "done"][0, 2] = batch["next", "terminated"][0, 2] = batch["is_init"][0, 3] = True
    batch["collector", "traj_ids"] = torch.tensor([[0, 0, 0, 1, 1], [2, 2, 2, 2, 2]])
    batch.refine_names(..., "time")
    return batch


def test_rows_of_a_batch():
    batch = nested()
    rows = agents_as_rows(batch)
    assert rows.batch_size == (B * A, T)
    assert rows.names[-1] == "time"
    for env in range(B):
        for agent in range(A):
            row = rows[env * A + agent]
            assert torch.equal(row["observation"], batch["agents", "observation"][env, :, agent])
            assert torch.equal(row["next", "reward"], batch["next", "agents", "reward"][env, :, agent])
            assert torch.equal(row["next", "done"], batch["next", "done"][env])
            assert torch.equal(row["is_init"], batch["is_init"][env])
    ids = rows["collector", "traj_ids"]
    assert len(ids.unique()) == 3 * A
    assert all(
        torch.equal(ids[row].diff() != 0, batch["collector", "traj_ids"][row // A].diff() != 0) for row in range(6)
    )
    back = rows_as_agents(rows, A)
    assert torch.equal(back["agents", "observation"], batch["agents", "observation"])
    assert torch.equal(back["next", "agents", "reward"], batch["next", "agents", "reward"])
    assert back["agents", "is_init"].shape == (B, T, A, 1)


def test_flags_of_agents_replace_those_of_environments():
    batch = nested()
    died = torch.zeros(B, T, A, 1, dtype=torch.bool)
    died[1, 1, 2] = True
    for name in ("done", "terminated"):
        batch["next", "agents", name] = died
    batch["agents", "mask"] = mask = torch.rand(B, T, A) < 0.5
    rows = agents_as_rows(batch)
    assert rows["next", "done"].nonzero().tolist() == [[5, 1, 0]]
    assert torch.equal(rows["collector", "mask"], mask.transpose(1, 2).reshape(6, T))
    assert not rows["next", "truncated"].any()


def test_modules_and_advantages_of_rows():
    rows = agents_as_rows(nested())
    lstm = LSTMModule(2, 4, in_key="observation", out_key="features")
    with set_recurrent_mode(True):
        features = lstm(rows.clone())["features"]
        alone = lstm(rows[4].clone())["features"]
    assert torch.allclose(features[4], alone, atol=1e-6)
    rows["state_value"], rows["next", "state_value"] = torch.zeros(6, T, 1), torch.zeros(6, T, 1)
    assert GAE(gamma=0.9, lmbda=0.9, value_network=None)(rows)["advantage"].shape == (6, T, 1)


def test_absent_agents_stay_masked_in_samples_of_a_buffer():
    batch = next(iter(Collector(Walkers(), None, frames_per_batch=6 * 20)))
    sampler = SliceSampler(slice_len=7, strict_length=False, pad_output=True)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(120, ndim=2), sampler=sampler, batch_size=140)
    buffer.extend(batch)
    torch.manual_seed(0)
    sample = buffer.sample()
    absent = ~sample["agent_mask"].squeeze(-1)
    assert absent.any()
    assert not sample["collector", "mask"][absent].any()
    assert sample["collector", "mask"].any()
    assert not sample["collector", "mask"][~absent].all()  # padding


def test_single_steps():
    root = nested()[:, 0]
    rows = agents_as_rows(root, time=False)
    assert rows.batch_size == (6,)
    assert torch.equal(rows["observation"].reshape(B, A, 2), root["agents", "observation"])
    assert torch.equal(rows_as_agents(rows, A)["agents", "observation"], root["agents", "observation"])
    single = agents_as_rows(root[0])
    assert torch.equal(single["observation"], root["agents", "observation"][0])


LSTM = {"hidden_size": 4, "input_size": 2}


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: agents_as_rows(nested(), "robots"), MissingKeyError, "There is no group of agents 'robots'"),
        (lambda: agents_as_rows(nested()[:, 0]), ArgumentError, "Say time=True for a batch of sequences"),
        (
            lambda: rows_as_agents(agents_as_rows(nested()), 4),
            ArgumentError,
            "must have batch size [n * 4, T], got [6, 5]",
        ),
        (
            lambda: agents_as_rows(nested().set(("agents", "x"), torch.zeros(B, T))),
            ArgumentError,
            "must have a dimension of agents after the batch size [2, 5]",
        ),
        (
            lambda: InitTracker(("agents", "is_init")),
            ArgumentError,
            "with every agent as a row (recurl.envs.MultiAgentEnv)",
        ),
        (
            lambda: LSTMModule(
                **LSTM,
                in_keys=["x", "h", "c", ("agents", "is_init")],
                out_keys=["y", ("next", "h"), ("next", "c")],
            ),
            ArgumentError,
            "For a flag for each agent, make every agent a row: MultiAgentEnv, agents_as_rows.",
        ),
        (
            lambda: LSTMModule(
                **LSTM,
                in_keys=[("agents", "observation"), ("agents", "h"), ("agents", "c")],
                out_keys=[("agents", "features"), ("next", "agents", "h"), ("next", "agents", "c")],
            )(nested()),
            ArgumentError,
            "wrap the module, recurl.modules.AgentsAsRows(module, n_agents=3)",
        ),
    ],
)
def test_what_to_write_instead(call, error, said):
    with pytest.raises(error, match=re.escape(said)):
        call()

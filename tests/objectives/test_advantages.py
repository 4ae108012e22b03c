from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential

from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingKeyError
from recurl.core.keys import TRAJ_IDS
from recurl.modules.networks import MLP
from recurl.objectives.value import GAE
from recurl.sequences.mode import recurrent_mode, set_recurrent_mode
from tests.objectives.simulate import HIDDEN, OBS, collect, make_agent

GAMMA, LMBDA = 0.97, 0.9
WRITTEN = ["advantage", "value_target", "state_value", ("next", "state_value")]


def torch_values(agent, cell, observations):
    """V of consecutive observations from a zero state, in plain torch.nn: ``[n, OBS] -> [n]``."""
    if cell == "none":
        features = agent.critic.module[0](TensorDict({"observation": observations}, [len(observations)]))["features"]
    else:
        net = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[cell](OBS, HIDDEN, 2, batch_first=True, dtype=torch.float64)
        net.load_state_dict(getattr(agent.critic.module[0], cell).state_dict())
        features = net(observations.unsqueeze(0))[0].squeeze(0)
    return agent.critic.module[1].module(features).squeeze(-1)


def by_hand(agent, cell, batches):
    """Return advantages, targets, values and bootstrap values of every batch, trajectory by trajectory."""
    rows, steps = batches[0].batch_size
    whole = torch.cat(batches, 1)
    out = {key: torch.full((rows, whole.shape[1]), torch.nan, dtype=torch.float64) for key in WRITTEN}
    for row in range(rows):
        ids = whole[TRAJ_IDS][row]
        for traj in ids.unique():
            where = (ids == traj).nonzero().squeeze(-1)
            part = whole[row, where]
            observations = torch.cat([part["observation"], part["next", "observation"][-1:]])
            values = torch_values(agent, cell, observations)
            running = 0.0
            for i in reversed(range(len(where))):
                t = int(where[i])
                last_of_batch = (t + 1) % steps == 0
                bootstrap = 0.0 if part["next", "terminated"][i].item() else values[i + 1].item()
                delta = part["next", "reward"][i].item() + GAMMA * bootstrap - values[i].item()
                cut = part["next", "done"][i].item() or last_of_batch
                running = delta + (0.0 if cut else GAMMA * LMBDA * running)
                for key, number in zip(WRITTEN, (running, running + values[i], values[i], bootstrap), strict=True):
                    out[key][row, t] = number
    return [{key: value[:, i : i + steps] for key, value in out.items()} for i in range(0, whole.shape[1], steps)]


def assert_equals_hand(result, expected):
    for key in WRITTEN:
        torch.testing.assert_close(result[key].squeeze(-1), expected[key], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("backend", ["pad", "loop"])
@pytest.mark.parametrize("cell", ["lstm", "gru", "none"])
@torch.no_grad()
def test_equals_hand_computation_over_two_batches(cell, backend, shared):
    agent = make_agent(cell, shared, backend)
    agent.step.double()
    batches = collect(agent, rows=4, steps=13, batches=2)
    assert all(batch["next", key].any() for batch in batches for key in ("terminated", "truncated"))
    gae = GAE(gamma=GAMMA, lmbda=LMBDA, value_network=agent.critic)
    for batch, expected in zip(batches, by_hand(agent, cell, batches), strict=True):
        assert_equals_hand(gae(batch), expected)


@pytest.mark.parametrize("backend", ["pad", "loop"])
@torch.no_grad()
def test_layouts_agree(backend):
    """[B, T], one row [T], all rows flat, and permuted rows give the same numbers."""
    agent = make_agent("lstm", True, backend)
    agent.step.double()
    batch = collect(agent, rows=5, steps=11, batches=2)[1]
    gae = GAE(gamma=GAMMA, lmbda=LMBDA, value_network=agent.critic)
    expected = gae(batch.clone())
    flat, order = gae(batch.reshape(-1)), torch.randperm(5)
    permuted, deep = gae(batch[order]), gae(batch.reshape(1, 5, 11))
    for key in WRITTEN:
        torch.testing.assert_close(flat[key], expected[key].reshape(-1, 1), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(permuted[key], expected[key][order], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(deep[key][0], expected[key], rtol=1e-10, atol=1e-10)
        for row in range(5):
            torch.testing.assert_close(gae(batch[row].clone())[key], expected[key][row], rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_ragged_slices_bootstrap_at_their_ends():
    """Slices of one long trajectory in any order, each as a separate row."""
    agent = make_agent("gru", False)
    agent.step.double()
    batch = collect(agent, rows=1, steps=12, batches=1, end=0.0)[0][0]
    pieces = [batch[7:12], batch[0:3], batch[3:7]]
    gae = GAE(gamma=GAMMA, lmbda=LMBDA, value_network=agent.critic)
    for piece in pieces:
        piece["is_init"] = torch.zeros_like(piece["is_init"])
        piece["is_init"][0] = True
    expected = torch.cat([gae(piece.clone())["advantage"] for piece in pieces])
    torch.testing.assert_close(gae(torch.cat(pieces))["advantage"], expected, rtol=1e-10, atol=1e-10)
    values = torch_values(agent, "gru", torch.cat([batch["observation"], batch["next", "observation"][-1:]]))
    torch.testing.assert_close(gae(batch)["state_value"].squeeze(-1), values[:-1], rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_stepping_from_every_token_equals_gathering(monkeypatch):
    """The path taken if the number of ends is unknown to the host."""
    agent = make_agent("lstm", True)
    agent.step.double()
    batch = collect(agent, rows=3, steps=9, batches=1)[0]
    gae = GAE(gamma=GAMMA, lmbda=LMBDA, value_network=agent.critic)
    expected = gae(batch.clone())
    monkeypatch.setattr("recurl.objectives.sequences._GATHERED_ON", ())
    everywhere = gae(batch.clone())
    for key in WRITTEN:
        torch.testing.assert_close(everywhere[key], expected[key], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("keys", [["is_init", "collector"], ["is_init"], ["collector"]])
@torch.no_grad()
def test_feed_forward_critic_needs_no_marks(keys):
    agent = make_agent("none", True)
    agent.step.double()
    batch = collect(agent, rows=4, steps=10, batches=1)[0]
    gae = GAE(gamma=GAMMA, lmbda=LMBDA, value_network=agent.critic)
    expected = gae(batch.clone())["advantage"]
    torch.testing.assert_close(gae(batch.exclude(*keys))["advantage"], expected, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_trajectory_ids_cut_without_done():
    agent = make_agent("none", True)
    batch = collect(agent, rows=1, steps=6, batches=1, end=0.0, dtype=torch.float32)[0].exclude("is_init")
    batch[TRAJ_IDS] = torch.tensor([[0, 0, 0, 1, 1, 1]])
    gae = GAE(gamma=GAMMA, lmbda=LMBDA, value_network=agent.critic)
    expected = torch.cat([gae(batch[:, :3].clone())["advantage"], gae(batch[:, 3:].clone())["advantage"]], 1)
    torch.testing.assert_close(gae(batch)["advantage"], expected)


@pytest.mark.parametrize("mode", [True, False, None])
def test_leaves_mode_states_and_gradients_alone(mode):
    agent = make_agent("lstm", True)
    batch = collect(agent, rows=2, steps=5, batches=1, dtype=torch.float32)[0]
    before = batch.clone()
    with set_recurrent_mode(mode):
        result = GAE(gamma=GAMMA, lmbda=LMBDA, value_network=agent.critic)(batch)
        assert recurrent_mode() is mode
    assert result is batch
    new = set(batch.keys(True, True)) - set(before.keys(True, True))
    assert new <= set(WRITTEN)
    for key in set(before.keys(True, True)) - set(WRITTEN):
        assert torch.equal(before[key], batch[key]), key
    assert not any(batch[key].requires_grad for key in WRITTEN)
    assert all(batch[key].shape == (2, 5, 1) for key in WRITTEN)


@pytest.mark.parametrize("cell", ["lstm", "none"])
def test_differentiable(cell):
    agent = make_agent(cell, True)
    batch = collect(agent, rows=2, steps=5, batches=1, dtype=torch.float32)[0]
    result = GAE(gamma=GAMMA, lmbda=LMBDA, value_network=agent.critic, differentiable=True)(batch)
    result["value_target"].sum().backward()
    assert all(parameter.grad is not None for parameter in agent.critic.parameters())


@torch.no_grad()
def test_average_gae_and_mask():
    """Junk in the padding of a trajectory changes nothing and is not counted."""
    agent = make_agent("gru", False)
    batch = collect(agent, rows=1, steps=8, batches=1, end=0.0, dtype=torch.float32)[0]
    gae = GAE(gamma=GAMMA, lmbda=LMBDA, value_network=agent.critic, average_gae=True)
    expected = gae(batch[:, :5].clone())
    batch["collector", "mask"] = torch.tensor([[True] * 5 + [False] * 3])
    batch["observation"][:, 5:] = 1e4
    batch["next", "reward"][:, 5:] = 1e4
    result = gae(batch)
    torch.testing.assert_close(result["advantage"][:, :5], expected["advantage"])
    torch.testing.assert_close(result["value_target"][:, :5], expected["value_target"])
    assert (result["advantage"][:, 5:] == 0).all()
    assert result["advantage"][:, :5].mean().item() == pytest.approx(0.0, abs=1e-6)
    assert result["advantage"][:, :5].std(correction=0).item() == pytest.approx(1.0, abs=1e-5)


@torch.no_grad()
def test_recurrent_critic_without_stored_states_starts_from_zeros():
    agent = make_agent("gru", False)
    batch = collect(agent, rows=2, steps=5, batches=1, dtype=torch.float32)[0]
    gae = GAE(gamma=GAMMA, lmbda=LMBDA, value_network=agent.critic)
    expected = gae(batch.clone())["advantage"]
    without = batch.exclude("v_h", ("next", "v_h"))
    torch.testing.assert_close(gae(without)["advantage"], expected)


def critic():
    return TensorDictModule(MLP(OBS, 1), in_keys=["observation"], out_keys=["state_value"])


def small_batch():
    return collect(make_agent("none", True), rows=2, steps=3, batches=1, dtype=torch.float32)[0]


def test_critic_of_features_is_refused():
    head = TensorDictModule(MLP(HIDDEN, 1), in_keys=["features"], out_keys=["state_value"])
    with pytest.raises(MissingKeyError, match="Pass a value_network that includes the trunk"):
        GAE(gamma=GAMMA, lmbda=LMBDA, value_network=head)(small_batch())


@pytest.mark.parametrize("key", ["reward", "done", "terminated"])
def test_missing_entries(key):
    with pytest.raises(MissingKeyError, match=f"needs an entry .*{key}"):
        GAE(gamma=GAMMA, lmbda=LMBDA, value_network=critic())(small_batch().exclude(("next", key)))


@pytest.mark.parametrize("name", ["gamma", "lmbda"])
@pytest.mark.parametrize("number", [-0.1, 1.1])
def test_discounts_out_of_range(name, number):
    with pytest.raises(ArgumentError, match=rf"{name} must be in \[0, 1\]"):
        GAE(**{"gamma": 0.9, "lmbda": 0.9, name: number}, value_network=critic())


def test_critic_must_write_a_state_value():
    other = TensorDictModule(MLP(OBS, 1), in_keys=["observation"], out_keys=["v"])
    with pytest.raises(ArgumentError, match="must write 'state_value'"):
        GAE(gamma=GAMMA, lmbda=LMBDA, value_network=other)(small_batch())
    with pytest.raises(ArgumentTypeError, match="The value network must read and write a TensorDict, got Linear"):
        GAE(gamma=GAMMA, lmbda=LMBDA, value_network=torch.nn.Linear(OBS, 1))
    wide = TensorDictModule(MLP(OBS, 2), in_keys=["observation"], out_keys=["state_value"])
    with pytest.raises(ArgumentError, match="one number per token"):
        GAE(gamma=GAMMA, lmbda=LMBDA, value_network=wide)(small_batch())


def test_time_must_be_the_last_dimension():
    gae = GAE(gamma=GAMMA, lmbda=LMBDA, value_network=critic())
    with pytest.raises(ArgumentError, match=r"got one of shape \[\]"):
        gae(small_batch()[0, 0])
    batch = small_batch()
    batch.names = ["time", None]
    with pytest.raises(ArgumentError, match="Time must be the last"):
        gae(batch)
    batch.names = [None, "time"]
    assert "advantage" in gae(batch)


def test_nested_observations():
    net = TensorDictSequential(
        TensorDictModule(MLP(OBS, 4), in_keys=[("agent", "obs")], out_keys=["features"]),
        TensorDictModule(MLP(4, 1), in_keys=["features"], out_keys=["state_value"]),
    )
    batch = small_batch()
    batch["agent", "obs"], batch["next", "agent", "obs"] = batch["observation"], batch["next", "observation"]
    assert GAE(gamma=GAMMA, lmbda=LMBDA, value_network=net)(batch)["advantage"].isfinite().all()


def test_nothing_is_read_back_from_the_device():
    """A meta tensor has no data to read: anything that would synchronize with a device fails on it."""
    batch = small_batch().to("meta")
    batch["collector", "mask"] = torch.ones(2, 3, dtype=torch.bool, device="meta")
    result = GAE(gamma=GAMMA, lmbda=LMBDA, value_network=critic().to("meta"), average_gae=True)(batch)
    assert result["advantage"].device.type == "meta"


def test_values_that_are_already_there_can_be_used() -> None:
    critic = TensorDictModule(torch.nn.Linear(2, 1), in_keys=["observation"], out_keys=["state_value"])
    ends = torch.tensor([[False], [True], [False], [False]])
    after = {"observation": torch.randn(4, 2), "reward": torch.randn(4, 1), "done": ends, "terminated": ends}
    batch = TensorDict({"observation": torch.randn(4, 2), "next": TensorDict(after, [4])}, [4])
    batch["observation"][1:2], batch["observation"][3:] = after["observation"][:1], after["observation"][2:3]
    expected = GAE(gamma=0.9, lmbda=0.8, value_network=critic)(batch.clone())
    batch["state_value"] = critic(batch.clone())["state_value"].detach()
    batch["next", "state_value"] = critic(batch["next"].clone())["state_value"].detach()
    found = GAE(gamma=0.9, lmbda=0.8, value_network=None)(batch)
    torch.testing.assert_close(found["advantage"], expected["advantage"])
    torch.testing.assert_close(found["value_target"], expected["value_target"])
    with pytest.raises(KeyError, match=r"needs an entry 'state_value'.*pass a value_network"):
        GAE(gamma=0.9, lmbda=0.8, value_network=None)(batch.exclude("state_value"))

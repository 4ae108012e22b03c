from __future__ import annotations

import copy
import math

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential

from recurl.core.errors import ArgumentError, MissingKeyError
from recurl.core.keys import TRAJ_IDS
from recurl.data import BurnIn, LazyTensorStorage, PrioritizedSliceSampler, SliceSampler, TensorDictReplayBuffer
from recurl.modules import MLP, QValueActor
from recurl.objectives import DQNLoss
from recurl.sequences.mode import recurrent_mode, set_recurrent_mode
from tests.objectives.simulate import ACTIONS, HIDDEN, OBS, Agent, collect, recurrent

GAMMA = 0.9
STATES = {"lstm": {"s_h": (2, HIDDEN), "s_c": (2, HIDDEN)}, "gru": {"s_h": (2, HIDDEN)}, "none": {}}


def make_actor(cell, space="categorical", backend="pad"):
    if cell == "none":
        trunk = TensorDictModule(MLP(OBS, HIDDEN, num_cells=[4]), in_keys=["observation"], out_keys=["features"])
    else:
        trunk = recurrent(cell, "s", "features", backend)
    head = TensorDictModule(MLP(HIDDEN, ACTIONS), in_keys=["features"], out_keys=["action_value"])
    return QValueActor(TensorDictSequential(trunk, head), action_space=space).double()


def make_loss(cell, space="categorical", backend="pad", **options):
    """Return a loss whose target network differs from the network, and batches collected by the network."""
    actor = make_actor(cell, space, backend)
    loss = DQNLoss(actor, gamma=GAMMA, **options)
    if hasattr(loss, "target_value_network"):
        loss.target_value_network.load_state_dict(make_actor(cell, space, backend).state_dict())
    return loss, Agent(actor, actor, actor, STATES[cell])


def torch_values(actor, cell, observations):
    """Action values of consecutive observations from a zero state, in plain torch.nn: ``[n, OBS] -> [n, A]``."""
    trunk, head = actor.module[0].module
    if cell == "none":
        features = trunk.module(observations)
    else:
        net = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[cell](OBS, HIDDEN, 2, batch_first=True, dtype=torch.float64)
        net = copy.deepcopy(net)
        weights = dict(getattr(trunk, cell).named_parameters())
        features = torch.func.functional_call(net, weights, observations.unsqueeze(0))[0].squeeze(0)
    return head.module(features)


def h(x, eps=1e-3):
    return math.copysign(math.sqrt(abs(x) + 1) - 1, x) + eps * x


def h_inverse(x, eps=1e-3):
    root = (math.sqrt(1 + 4 * eps * (abs(x) + 1 + eps)) - 1) / (2 * eps)
    return math.copysign(root**2 - 1, x)


def by_hand(loss, cell, trajectory, observations, ends):
    """Return chosen values and targets of one trajectory ``[n]``, run from the start, in slices that end at ``ends``.

    ``observations`` holds those of the steps and the one after the last.
    """
    online = torch_values(loss.value_network, cell, observations)
    slow = torch_values(getattr(loss, "target_value_network", loss.value_network), cell, observations).detach()
    action = trajectory["action"]
    action = action.argmax(-1) if action.ndim == 2 else action
    chosen = online[range(len(action)), action]
    targets = []
    for start in range(len(action)):
        total, step = 0.0, start
        while True:
            total += GAMMA ** (step - start) * trajectory["next", "reward"][step].item()
            terminated = trajectory["next", "terminated"][step].item()
            if terminated or step in ends or step - start + 1 == loss.n_steps:
                break
            if loss.greedy_returns and action[step + 1] != online[step + 1].argmax():
                break
            step += 1
        pick = (online if loss.double_dqn else slow)[step + 1].argmax()
        value = slow[step + 1, pick].item()
        value = h_inverse(value) if loss.value_rescaling else value
        total += 0.0 if terminated else GAMMA ** (step - start + 1) * value
        targets.append(h(total) if loss.value_rescaling else total)
    return chosen, torch.tensor(targets, dtype=torch.float64)


def hand_batch(loss, cell, batches, which):
    """Return chosen values and targets of batch number ``which``, ``[B, T]``, by trajectories across all batches."""
    rows, steps = batches[0].batch_size
    whole = torch.cat(batches, 1)
    chosen, target = (torch.full(whole.shape, torch.nan, dtype=torch.float64) for _ in range(2))
    chosen = chosen.clone()
    for row in range(rows):
        ids = whole[TRAJ_IDS][row]
        for traj in ids.unique():
            where = (ids == traj).nonzero().squeeze(-1)
            part = whole[row, where]
            observations = torch.cat([part["observation"], part["next", "observation"][-1:]])
            ends = {i for i, t in enumerate(where.tolist()) if (t + 1) % steps == 0} | {len(where) - 1}
            chosen[row, where], target[row, where] = by_hand(loss, cell, part, observations, ends)
    window = slice(which * steps, (which + 1) * steps)
    return chosen[:, window], target[:, window]


def gradients(loss):
    return {name: parameter.grad.clone() for name, parameter in loss.value_network.named_parameters()}


def assert_equals_hand(loss, result, chosen, target, cell):
    """Compare loss, errors and every gradient; chosen and target are flat."""
    expected = (chosen - target).square().mean()
    torch.testing.assert_close(result["loss"], expected, rtol=1e-10, atol=1e-12)
    error = result["td_error"].reshape(-1)
    torch.testing.assert_close(error, (chosen - target).abs().detach(), rtol=1e-9, atol=1e-11)
    assert result["q_value"].item() == pytest.approx(chosen.mean().item())
    assert result["q_target"].item() == pytest.approx(target.mean().item())
    grads = []
    for value in (result["loss"], expected):
        loss.zero_grad()
        value.backward(retain_graph=True)
        grads.append(gradients(loss))
    for name, gradient in grads[1].items():
        torch.testing.assert_close(grads[0][name], gradient, rtol=1e-9, atol=1e-12, msg=name)


VARIANTS = [
    {},
    {"double_dqn": True},
    {"n_steps": 3},
    {"n_steps": 4, "double_dqn": True, "value_rescaling": True},
    {"delay_value": False, "n_steps": 2},
    {"delay_value": False, "value_rescaling": True, "double_dqn": True},
]


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("cell", ["lstm", "gru", "none"])
def test_equals_hand_computation(cell, options):
    loss, agent = make_loss(cell, **options)
    with torch.no_grad():
        batch = collect(agent, rows=4, steps=13, batches=1)[0]
    assert all(batch["next", key].any() for key in ("terminated", "truncated"))
    chosen, target = hand_batch(loss, cell, [batch], 0)
    assert_equals_hand(loss, loss(batch), chosen.flatten(), target.flatten(), cell)


@pytest.mark.parametrize("options", [{"n_steps": 5}, {"n_steps": 3, "double_dqn": True, "value_rescaling": True}])
def test_returns_along_greedy_actions_equal_hand_computation(options):
    """Watkins's Q(lambda), with a fixed number of steps: a sum of rewards ends before a non-greedy action."""
    loss, agent = make_loss("gru", greedy_returns=True, **options)
    with torch.no_grad():
        batch = collect(agent, rows=4, steps=13, batches=1)[0]
    others = torch.rand(batch.shape) < 0.4
    batch["action"] = torch.where(others, (batch["action"] + 1) % ACTIONS, batch["action"])
    chosen, target = hand_batch(loss, "gru", [batch], 0)
    assert_equals_hand(loss, loss(batch), chosen.flatten(), target.flatten(), "gru")
    loss.greedy_returns = False
    assert not torch.allclose(loss(batch)["td_error"].squeeze(-1), (chosen - target).abs())


@pytest.mark.parametrize("backend", ["pad", "loop"])
@pytest.mark.parametrize("space", ["categorical", "one-hot"])
def test_second_batch_starts_from_stored_states(space, backend):
    """Values of the collecting network; the target network here starts from that network's states."""
    loss, agent = make_loss("lstm", space, backend, delay_value=False, n_steps=3)
    with torch.no_grad():
        batches = collect(agent, rows=4, steps=9, batches=2)
        chosen, target = hand_batch(loss, "lstm", batches, 1)
        result = loss(batches[1])
    torch.testing.assert_close(result["td_error"].squeeze(-1), (chosen - target).abs(), rtol=1e-9, atol=1e-11)


@torch.no_grad()
def test_layouts_agree():
    loss, agent = make_loss("gru", n_steps=3, double_dqn=True, value_rescaling=True)
    batch = collect(agent, rows=5, steps=11, batches=2)[1]
    expected = loss(batch)
    for other in (batch.reshape(-1), batch.reshape(1, 5, 11)):
        found = loss(other)
        torch.testing.assert_close(found["loss"], expected["loss"])
        torch.testing.assert_close(found["td_error"].flatten(), expected["td_error"].flatten())


def buffer_of(batch, sampler, size):
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(1000, ndim=2), sampler=sampler, batch_size=size, generator=torch.Generator()
    )
    buffer.extend(batch)
    return buffer


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("cell", ["lstm", "gru", "none"])
@torch.no_grad()
def test_replayed_slices_equal_hand_computation(cell, strict):
    """The network is unchanged since collection, so the stored state of a slice summarizes all earlier steps."""
    options = {"n_steps": 3, "delay_value": False, "value_rescaling": True}
    loss, agent = make_loss(cell, **options)
    batch = collect(agent, rows=4, steps=40, batches=1, end=0.15)[0]
    batch["token"] = torch.arange(160).reshape(4, 40)
    sample = buffer_of(batch, SliceSampler(slice_len=5, strict_length=strict), 60).sample()
    result = loss(sample)
    starts = sample["is_init"].squeeze(-1)
    assert starts.sum() == 12
    found = iter(result["td_error"].squeeze(-1).tolist())
    for piece in sample["token"].tensor_split(starts.nonzero().squeeze(-1)[1:]):
        row, first, last = int(piece[0] // 40), int(piece[0] % 40), int(piece[-1] % 40)
        ids = batch[TRAJ_IDS][row]
        where = (ids == ids[first]).nonzero().squeeze(-1)
        part = batch[row, where]
        offset = int(where[0])
        observations = torch.cat([part["observation"], part["next", "observation"][-1:]])
        chosen, target = by_hand(loss, cell, part, observations, {last - offset, len(where) - 1})
        for token in range(first - offset, last - offset + 1):
            assert next(found) == pytest.approx((chosen[token] - target[token]).abs().item(), rel=1e-9, abs=1e-11)


def test_weights_and_mask():
    loss, agent = make_loss("gru", n_steps=2)
    with torch.no_grad():
        batch = collect(agent, rows=1, steps=8, batches=1, end=0.0)[0]
        expected = loss(batch[:, :5])
    batch["collector", "mask"] = torch.tensor([[True] * 5 + [False] * 3])
    batch["priority_weight"] = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 9.0, 9.0, 9.0]])
    batch["observation"][:, 5:] = 1e4
    batch["next", "reward"][:, 5:] = 1e4
    result = loss(batch)
    error = expected["td_error"]
    torch.testing.assert_close(result["td_error"][:, :5], error)
    assert (result["td_error"][:, 5:] == 0).all()
    weights = batch["priority_weight"][0, :5].double()
    torch.testing.assert_close(result["loss"].detach(), (weights * error.square().flatten()).mean())
    for key in ("q_value", "q_target"):
        torch.testing.assert_close(result[key], expected[key])


@pytest.mark.parametrize("name", ["l1", "smooth_l1"])
@torch.no_grad()
def test_distances(name):
    loss, agent = make_loss("none", loss_function=name)
    batch = collect(agent, rows=2, steps=6, batches=1)[0]
    result = loss(batch)
    error = result["td_error"]
    expected = error if name == "l1" else torch.where(error < 1, 0.5 * error.square(), error - 0.5)
    torch.testing.assert_close(result["loss"], expected.mean())


@torch.no_grad()
def test_target_network_starts_from_its_own_states():
    """Burning in each network separately equals running each network over the whole trajectory."""
    loss, agent = make_loss("lstm", n_steps=2, double_dqn=True)
    batch = collect(agent, rows=1, steps=12, batches=1, end=0.0)[0].reshape(-1)
    rest = BurnIn(loss.value_network, 4)(batch)
    for key in STATES["lstm"]:
        rest["target", key] = BurnIn(loss.target_value_network, 4)(batch)[key]
    torch.testing.assert_close(loss(rest)["td_error"], loss(batch)["td_error"][4:], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("mode", [True, False, None])
def test_leaves_batch_mode_and_target_alone(mode):
    loss, agent = make_loss("lstm", n_steps=2)
    with torch.no_grad():
        batch = collect(agent, rows=2, steps=5, batches=1)[0]
    before = batch.clone()
    with set_recurrent_mode(mode):
        result = loss(batch)
        assert recurrent_mode() is mode
    result["loss"].backward()
    assert set(batch.keys(True, True)) == set(before.keys(True, True))
    assert all(torch.equal(batch[key], before[key]) for key in before.keys(True, True))
    assert all(parameter.grad is not None for parameter in loss.value_network.parameters())
    assert all(parameter.grad is None for parameter in loss.target_value_network.parameters())
    assert not any(result[key].requires_grad for key in ("td_error", "q_value", "q_target"))


@torch.no_grad()
def test_in_keys_are_all_that_is_read():
    loss, agent = make_loss("gru", n_steps=2, double_dqn=True)
    batch = collect(agent, rows=2, steps=7, batches=1)[0]
    kept = batch.select(*loss.in_keys, strict=False)
    assert ("next", "s_h") not in kept.keys(True)
    torch.testing.assert_close(loss(kept)["loss"], loss(batch)["loss"])


def test_learns_from_prioritized_slices():
    loss, agent = make_loss("gru", n_steps=2, double_dqn=True)
    with torch.no_grad():
        batch = collect(agent, rows=2, steps=30, batches=1)[0]
    buffer = buffer_of(batch, PrioritizedSliceSampler(1000, 0.9, 0.6, slice_len=4, strict_length=False), 16)
    sample = buffer.sample()
    result = loss(sample)
    sample["td_error"] = result["td_error"]
    buffer.update_tensordict_priority(sample)
    result["loss"].backward()
    assert all(parameter.grad.isfinite().all() for parameter in loss.value_network.parameters())


def test_nothing_is_read_back_from_the_device():
    """A meta tensor has no data to read: anything that would synchronize with a device fails on it."""
    loss, agent = make_loss("none", n_steps=3, double_dqn=True, value_rescaling=True)
    with torch.no_grad():
        batch = collect(agent, rows=2, steps=3, batches=1)[0].to("meta")
    batch["collector", "mask"] = torch.ones(2, 3, dtype=torch.bool, device="meta")
    assert loss.to("meta")(batch)["loss"].device.type == "meta"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gamma": 1.1}, r"gamma must be in \[0, 1\]"),
        ({"n_steps": 0}, "n_steps must be at least 1"),
        ({"loss_function": "l3"}, "loss_function must be one of"),
    ],
)
def test_options_out_of_range(options, words):
    with pytest.raises(ArgumentError, match=words):
        DQNLoss(make_actor("none"), **options)


def test_the_network_must_write_action_values():
    net = TensorDictModule(MLP(OBS, 2), in_keys=["observation"], out_keys=["values"])
    with pytest.raises(ArgumentError, match="must write 'action_value'"):
        DQNLoss(net)(TensorDict.from_dict(small(), batch_size=[3]))
    actor = QValueActor(net, action_space="categorical", action_value_key="values").double()
    assert DQNLoss(actor)(TensorDict.from_dict(small(), batch_size=[3]))["loss"].isfinite()


def small(**entries):
    flag = torch.tensor([[False], [False], [True]])
    after = {"observation": torch.zeros(3, OBS).double(), "reward": torch.zeros(3, 1), "done": flag, "terminated": flag}
    return {
        "observation": torch.zeros(3, OBS).double(),
        "action": torch.zeros(3, dtype=torch.int64),
        "next": after,
        **entries,
    }


@pytest.mark.parametrize("action", [torch.zeros(3, 1, dtype=torch.int64), torch.zeros(3), torch.zeros(3, 5)])
def test_actions_of_another_shape(action):
    batch = TensorDict(small(action=action), [3])
    with pytest.raises(ArgumentError, match=r"must be integers \[3\] or one-hot \[3, 2\]"):
        DQNLoss(make_actor("none"))(batch)


@pytest.mark.parametrize("key", ["action", ("next", "reward"), ("next", "terminated")])
def test_missing_entries(key):
    with pytest.raises(MissingKeyError, match="needs an entry"):
        DQNLoss(make_actor("none"))(TensorDict(small(), [3]).exclude(key))

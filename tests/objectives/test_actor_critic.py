"""Properties common to SAC, discrete SAC and TD3: memory, targets, boundaries, errors."""

from __future__ import annotations

import math
from copy import deepcopy
from functools import partial

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingKeyError
from recurl.data import BurnIn, LazyTensorStorage, MidEpisodeBurnIn, PrioritizedSliceSampler, TensorDictReplayBuffer
from recurl.modules import MLP, Categorical, GRUModule, NormalParamExtractor, ProbabilisticActor, TanhNormal
from recurl.objectives import SACLoss, SoftUpdate, sequences
from recurl.sequences.mode import recurrent_mode, set_recurrent_mode
from tests.objectives.replay_losses import CRITIC_MEMORY, KINDS, make_replay_loss
from tests.objectives.simulate import ACTIONS, HIDDEN, OBS, collect, recurrent

CASES = [(kind, memory) for kind in KINDS for memory in CRITIC_MEMORY]


def total(losses):
    return sum(value for key, value in losses.items() if key.startswith("loss"))


def prepared(kind, cell="gru", memory="both", **options):
    """Return a loss in double precision whose targets differ from its networks, and its agent."""
    loss, agent = make_replay_loss(kind, cell, memory, **options)
    loss.double()
    with torch.no_grad():
        for network in loss.target_networks():
            for value in network.parameters():
                value.add_(0.3 * torch.randn_like(value))
    return loss, agent


def batch_of(agent, **options):
    with torch.no_grad():
        return collect(agent, **{"rows": 3, "steps": 8, "batches": 1, **options})[0]


def gradients(loss, batch):
    loss.zero_grad()
    losses = loss(batch)
    total(losses).backward()
    return losses, {name: p.grad.clone() for name, p in loss.named_parameters() if p.grad is not None}


def assert_close(first, second):
    for a, b in zip(first, second, strict=True):
        assert a.keys() == b.keys()
        for key in a.keys():  # noqa: SIM118 - a TensorDict yields rows
            if key != "td_error":
                torch.testing.assert_close(a[key], b[key], rtol=1e-9, atol=1e-11, msg=str(key))


@pytest.mark.parametrize(("kind", "memory"), CASES)
def test_layouts_agree(kind, memory):
    loss, agent = prepared(kind, "lstm", memory, n_steps=2)
    batch = batch_of(agent, batches=2)
    expected = gradients(loss, batch)
    for other in (batch.reshape(-1), batch.reshape(1, 3, 8)):
        assert_close(gradients(loss, other), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_stepping_from_every_token_equals_gathering(kind, monkeypatch):
    loss, agent = prepared(kind, n_steps=2)
    batch = batch_of(agent)
    expected = gradients(loss, batch)
    monkeypatch.setattr(sequences, "_GATHERED_ON", ())
    assert_close(gradients(loss, batch), expected)


@pytest.mark.parametrize(("kind", "memory"), CASES)
@torch.no_grad()
def test_targets_start_from_states_of_their_own(kind, memory):
    """Burning in each network separately equals running each network over the whole trajectory."""
    loss, agent = prepared(kind, "lstm", memory)
    batch = batch_of(agent, rows=1, steps=12, end=0.0).reshape(-1)
    rest = BurnIn(TensorDictSequential(*loss.networks()), 4)(batch)
    burnt = BurnIn(TensorDictSequential(*loss.target_networks()), 4)(batch)
    for key, at in loss.target_states.items():
        rest[at] = burnt[key]
    torch.testing.assert_close(loss(rest)["td_error"], loss(batch)["td_error"][4:], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("kind", "memory"), CASES)
def test_gradients_reach_the_right_parameters(kind, memory):
    loss, agent = prepared(kind, "gru", memory)
    batch = batch_of(agent)
    losses = loss(batch)
    actor, critics = set(loss.actor_network.parameters()), set(loss.qvalue_network.parameters())

    def reached(name):
        trained = [p for p in loss.parameters() if p.requires_grad]
        found = torch.autograd.grad(losses[name], trained, allow_unused=True, retain_graph=True)
        return {p for p, grad in zip(trained, found, strict=True) if grad is not None}

    assert reached("loss_actor") == actor - critics != set()
    assert reached("loss_qvalue") == critics
    assert bool(actor & critics) == (memory == "shared")
    assert not any(p.requires_grad for network in loss.target_networks() for p in network.parameters())


@pytest.mark.parametrize("mode", [True, False, None])
@pytest.mark.parametrize("kind", KINDS)
def test_leaves_batch_and_mode_alone(kind, mode):
    loss, agent = prepared(kind)
    batch = batch_of(agent)
    before = batch.clone()
    with set_recurrent_mode(mode):
        losses = loss(batch)
        assert recurrent_mode() is mode
    assert set(batch.keys(True, True)) == set(before.keys(True, True))
    assert all(torch.equal(batch[key], before[key]) for key in before.keys(True, True))
    differentiable = [key for key, value in losses.items() if value.requires_grad]
    assert differentiable == [key for key in loss.out_keys if "loss" in key]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_in_keys_are_all_that_is_read(kind):
    loss, agent = prepared(kind, memory="own")
    batch = batch_of(agent)
    kept = batch.select(*loss.in_keys, strict=False)
    assert ("next", "q_h") not in kept.keys(True)
    assert_close([loss(kept)], [loss(batch)])


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_mask(kind):
    loss, agent = prepared(kind, n_steps=2)
    batch = batch_of(agent, rows=1, end=0.0)
    with torch.no_grad():
        expected = loss(batch[:, :5])
    batch["collector", "mask"] = torch.tensor([[True] * 5 + [False] * 3])
    for key in ("observation", ("next", "reward"), ("next", "observation")):
        batch[key][:, 5:] = torch.nan
    result, grads = gradients(loss, batch)
    assert all(value.isfinite().all() for value in grads.values())
    for name in ("loss_actor", "loss_qvalue", "q_value", "q_target"):
        torch.testing.assert_close(result[name], expected[name])
    torch.testing.assert_close(result["td_error"][:, :5], expected["td_error"])
    assert (result["td_error"][:, 5:] == 0).all()
    batch["priority_weight"] = torch.full((1, 8), 3.0)
    weighted = loss(batch)
    torch.testing.assert_close(weighted["loss_qvalue"], 3.0 * result["loss_qvalue"])
    torch.testing.assert_close(weighted["loss_actor"], result["loss_actor"])


@pytest.mark.parametrize(("kind", "memory"), CASES)
def test_a_cue_is_reached_a_hundred_steps_back_but_not_in_the_burn_in(kind, memory):
    """Checked by the gradient of the losses of the last step, whose memory began before the cue."""
    loss, agent = make_replay_loss(kind, "gru", memory)
    for module in loss.modules():
        if isinstance(module, GRUModule):
            for name, value in module.named_parameters():
                if "bias_hh" in name or "bias_ih" in name:
                    value.data[HIDDEN : 2 * HIDDEN] = 4.0  # remembers
    batch = collect(agent, rows=1, steps=120, batches=1, end=0.0, dtype=torch.float32)[0].reshape(-1)
    batch["priority_weight"] = (torch.arange(120) == 119).float()
    for key in ("reward",):
        batch["next", key][:-1] = 0.0

    def reached(steps):
        data = batch.clone()
        seen = data["observation"].requires_grad_()
        stored = (torch.arange(120) == -1).unsqueeze(-1)
        data["collector", "stored", "is_init"] = stored
        burnt = MidEpisodeBurnIn(TensorDictSequential(*loss.networks()), steps)(data)
        last = loss(burnt)["loss_qvalue"]
        return torch.autograd.grad(last, seen)[0].abs().sum(-1)

    through = reached(10)
    assert (through[:10] == 0).all()
    assert (through[10:20] > 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_slice_no_longer_than_the_burn_in_keeps_its_last_step(kind):
    loss, agent = prepared(kind)
    batch = batch_of(agent, rows=1, steps=3, end=0.0).reshape(-1)
    rest = BurnIn(TensorDictSequential(*loss.networks()), 5)(batch)
    assert len(rest) == 1
    assert all(value.isfinite().all() for value in gradients(loss, rest)[0].values())


@pytest.mark.parametrize("kind", KINDS)
def test_learns_from_prioritized_slices(kind):
    loss, agent = prepared(kind, n_steps=2)
    sampler = PrioritizedSliceSampler(1000, 0.9, 0.6, slice_len=4, strict_length=False)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1000, ndim=2), sampler=sampler, batch_size=16)
    buffer.extend(batch_of(agent, rows=2, steps=30))
    sample = buffer.sample()
    losses, grads = gradients(loss, sample)
    sample["td_error"] = losses["td_error"]
    buffer.update_tensordict_priority(sample)
    assert all(value.isfinite().all() for value in grads.values())


@pytest.mark.parametrize("kind", KINDS)
def test_one_critic_becomes_two_with_one_memory(kind):
    loss, agent = make_replay_loss(kind, "gru")
    options = {"bounds": (-1.0, 1.0)} if kind == "td3" else {}
    made = type(loss)(loss.actor_network, loss.qvalue_network[0], num_qvalue_nets=3, **options).double()
    assert len(made.qvalue_network) == 3
    first, second = (list(made.qvalue_network[i].modules()) for i in (0, 1))
    recurrent_parts = [part for part in first if hasattr(part, "state_keys")]
    assert recurrent_parts == [part for part in second if hasattr(part, "state_keys")] != []
    heads = [list(network.parameters())[-2] for network in made.qvalue_network]
    assert not any(torch.equal(heads[0], other) for other in heads[1:])
    assert len(gradients(made, batch_of(agent))[1]) > 0
    SoftUpdate(made, tau=0.5).step()


class Scaled(nn.Module):
    """Head with a parameter next to a layer, without ``reset_parameters()``."""

    def __init__(self, value=None):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(OBS + ACTIONS) if value is None else value)
        self.layer = MLP(OBS + ACTIONS, 1)

    def forward(self, *inputs):
        return self.layer(self.scale * torch.cat(inputs, -1))


class OwnAlone(Scaled):
    """Head with direct parameters, only some of which are redrawn."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Flatten(-1, -1)

    def reset_parameters(self):
        nn.init.uniform_(self.scale)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(OBS + ACTIONS, 1, batch_first=True, kdim=3, vdim=3)

    def forward(self, *inputs):
        x = torch.cat(inputs, -1).unsqueeze(-2)
        return self.attention(x, x[..., :3], x[..., :3])[0].squeeze(-2).sum(-1, keepdim=True)


def as_critic(net, kind):
    if kind == "discrete sac":
        return TensorDictModule(net, ["observation", "action"], ["action_value"])
    return TensorDictModule(net, ["observation", "action"], ["state_action_value"])


def with_critics(kind, critics, **options):
    """Return a loss of the kind with the given critics."""
    loss, _ = make_replay_loss(kind, "gru")
    bounds = {"bounds": (-1.0, 1.0)} if kind == "td3" else {}
    return type(loss)(loss.actor_network, critics, **bounds, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_critics_that_would_stay_one_are_refused(kind):
    torch.manual_seed(0)
    unlike = Scaled(torch.ones(OBS + ACTIONS))
    made = with_critics(kind, as_critic(unlike, kind))
    first, second = made.qvalue_network
    assert torch.equal(first.module.scale, second[-1].module.scale)
    assert not torch.equal(first.module.layer[0].weight, second[-1].module.layer[0].weight)
    message = r"drawn by reset_parameters\(\), but that of {} doesn't exist or leaves '{}' unchanged: give a list"
    refused = [
        (Scaled(), "Scaled", "module.scale"),
        (nn.Sequential(OwnAlone(), Scaled()), "Scaled", "module.1.scale"),
        (weight_norm(nn.Linear(OBS + ACTIONS, 1)), "ParametrizationList", "module.parametrizations.weight.original1"),
        (spectral_norm(nn.Linear(OBS + ACTIONS, 1)), "ParametrizationList", "module.parametrizations.weight.original"),
    ]
    for net, part, name in refused:
        with pytest.raises(ArgumentError, match=message.format(part, name)):
            with_critics(kind, as_critic(net, kind))
        assert len(with_critics(kind, as_critic(net, kind), num_qvalue_nets=1).qvalue_network) == 1
    constant = Scaled(torch.ones(OBS + ACTIONS))
    constant.layer = nn.Flatten(-1, -1)
    copied = as_critic(Scaled(), kind)
    for critics in (as_critic(constant, kind), [copied, deepcopy(copied)], [copied, as_critic(copied.module, kind)]):
        with pytest.raises(ArgumentError, match="begin with different parameters, but two have the same values"):
            with_critics(kind, critics)


@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_that_draws_its_parameters_is_drawn_again(kind):
    for net in (OwnAlone(), Attending()):
        first, second = with_critics(kind, as_critic(net, kind)).qvalue_network
        for one, other in zip(first.parameters(), second.parameters(), strict=True):
            assert not torch.equal(one, other) or one.count_nonzero() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_lazy_critic_is_refused_before_its_target_draws_other_parameters(kind):
    lazy = as_critic(MLP(None, 1), kind)
    with pytest.raises(ArgumentError, match=r"'.*weight' is lazy and has no values yet: run the network once on an ex"):
        with_critics(kind, lazy)


def critic(reads=("observation", "action"), writes="state_action_value"):
    return TensorDictModule(MLP(OBS + ACTIONS * ("action" in reads), 1), list(reads), [writes])


def actor(distribution=TanhNormal, keys=("loc", "scale")):
    net = nn.Sequential(MLP(OBS, 2 * ACTIONS), NormalParamExtractor()) if len(keys) == 2 else MLP(OBS, ACTIONS)
    module = TensorDictModule(net, in_keys=["observation"], out_keys=list(keys))
    return ProbabilisticActor(module, in_keys=list(keys), distribution_class=distribution)


def small():
    after = TensorDict({"observation": torch.zeros(4, OBS), "reward": torch.ones(4, 1)}, [4])
    after["done"] = after["terminated"] = torch.zeros(4, 1, dtype=torch.bool)
    return TensorDict({"observation": torch.zeros(4, OBS), "next": after, "action": torch.zeros(4, ACTIONS)}, [4])


def test_a_critic_must_read_the_action():
    with pytest.raises(ArgumentError, match=r"A critic must read the action, 'action', after its memory.*in_keys are"):
        SACLoss(actor(), critic(reads=("observation",)))


def test_a_memory_that_reads_the_action_is_refused():
    join = TensorDictModule(MLP(OBS + ACTIONS, OBS), ["observation", "action"], ["seen"])
    gru = GRUModule(OBS, HIDDEN, in_key="seen", out_key="features")
    q = TensorDictModule(MLP(HIDDEN, 1), ["features"], ["state_action_value"])
    with pytest.raises(ArgumentError, match=r"of a critic must not read the action 'action', but the one with the"):
        SACLoss(actor(), TensorDictSequential(join, gru, q))


def test_a_critic_that_cannot_be_split_is_refused():
    gru = recurrent("gru", "q", "features", "loop")
    q = TensorDictModule(MLP(HIDDEN + ACTIONS, 1), ["features", "action"], ["state_action_value"])
    network = TensorDictSequential(gru, q, selected_out_keys=["state_action_value", ("next", "q_h")])
    with pytest.raises(ArgumentError, match=r"can be split.*but TensorDictSequential selects its outputs"):
        SACLoss(actor(), [network])


def test_networks_with_the_same_state_keys_are_refused():
    def with_memory():
        q = TensorDictModule(MLP(HIDDEN + ACTIONS, 1), ["features", "action"], ["state_action_value"])
        return TensorDictSequential(recurrent("gru", "q", "features", "loop"), q)

    with pytest.raises(ArgumentError, match=r"must not share state keys, but each has .* 'q_h'"):
        SACLoss(actor(), [with_memory(), with_memory()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 1.1}, r"gamma must be in \[0, 1\], got 1.1"),
        ({"n_steps": 0}, "n_steps must be at least 1, got 0"),
        ({"loss_function": "l3"}, r"loss_function must be one of \['l1', 'l2', 'smooth_l1'\], got 'l3'"),
        ({"num_qvalue_nets": 0}, "num_qvalue_nets must be at least 1, got 0"),
        ({"alpha_init": 0.0}, r"must be positive and between min_alpha \(at least 0\) and max_alpha, got alpha"),
        ({"min_alpha": -1.0}, "between min_alpha .* got alpha_init=1.0, min_alpha=-1.0"),
        ({"alpha_init": 2.0, "max_alpha": 1.0}, "alpha_init=2.0, min_alpha=None, max_alpha=1.0"),
        ({"target_entropy": "most"}, "target_entropy must be 'auto' or a number, got 'most'"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ArgumentError, match=message):
        SACLoss(actor(), critic(), **options)


def test_networks_that_do_not_fit():
    for plain in ([MLP(3, 1)], MLP(3, 1)):
        with pytest.raises(ArgumentTypeError, match="An actor or critic must read and write a TensorDict, got MLP"):
            SACLoss(actor(), plain)
    with pytest.raises(ArgumentError, match="a critic, or a list of one or more, got an empty list"):
        SACLoss(actor(), [])
    with pytest.raises(ArgumentError, match=r"contains the same critic twice: build each one, or give one critic"):
        SACLoss(actor(), [critic()] * 2)
    with pytest.raises(ArgumentError, match=r"A critic must write 'state_action_value', but its out_keys are \['q'\]"):
        SACLoss(actor(), critic(writes="q"))(small())
    with pytest.raises(ArgumentError, match=r"must be a sequence that ends with a sampler.*is a TensorDictModule"):
        SACLoss(TensorDictModule(MLP(OBS, ACTIONS), ["observation"], ["action"]), critic())
    with pytest.raises(ArgumentError, match="SACLoss needs differentiable actions, which a Categorical doesn't draw"):
        SACLoss(actor(Categorical, ("logits",)), critic())(small())


@pytest.mark.parametrize("key", ["action", ("next", "reward"), ("next", "terminated")])
def test_missing_entries(key):
    with pytest.raises(MissingKeyError, match="needs an entry"):
        SACLoss(actor(), critic())(small().exclude(key))


def test_the_entries_after_the_last_step_are_required():
    with pytest.raises(MissingKeyError, match=r"reads 'observation', but the batch has no \('next', 'observation'\)"):
        SACLoss(actor(), critic())(small().exclude(("next", "observation")))


def test_a_fixed_temperature_has_no_loss():
    loss = SACLoss(actor(), critic(), fixed_alpha=True, alpha_init=0.2)
    result = loss(small())
    assert "loss_alpha" not in result
    assert loss.out_keys == list(result.keys())
    assert result["alpha"].item() == pytest.approx(0.2)
    assert "log_alpha" not in dict(loss.named_parameters())


def test_the_temperature_stays_within_its_bounds():
    loss = SACLoss(actor(), critic(), min_alpha=0.5, max_alpha=2.0)
    for value, expected in ((-5.0, 0.5), (5.0, 2.0), (0.0, 1.0)):
        with torch.no_grad():
            loss.log_alpha.fill_(value)
        assert loss(small())["alpha"].item() == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["sac", "discrete sac"])
@pytest.mark.parametrize("make", [torch.optim.Adam, partial(torch.optim.SGD, momentum=0.9), torch.optim.AdamW])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_temperature_leaves_a_bound_as_soon_as_the_gradient_turns(kind, make, sign):
    """``log_alpha`` itself stays at the bound, however long gradients push against it."""
    loss, agent = make_replay_loss(kind, "none", min_alpha=0.15, max_alpha=0.6, target_entropy=sign * 50.0)
    loss.double()
    batch = batch_of(agent, rows=1, steps=3)
    optimizer = make([loss.log_alpha], lr=0.1)

    def step():
        optimizer.zero_grad()
        result = loss(batch)
        assert math.log(0.15) - 1e-6 <= loss.log_alpha.item() <= math.log(0.6) + 1e-6
        result["loss_alpha"].backward()
        optimizer.step()
        return result["alpha"].item()

    driven = [step() for _ in range(60)]
    assert driven[-20:] == pytest.approx([0.3 * 2.0**sign] * 20)
    loss.target_entropy = -sign * 50.0
    turned = [step() for _ in range(30)]
    assert turned[-1] == pytest.approx(0.3 * 2.0**-sign), "only an optimizer's momentum delays it"
    assert turned[15] != pytest.approx(0.3 * 2.0**sign)


RENAMED = ("action", "reward", "done", "terminated", "priority", "priority_weight")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RENAMED)
def test_every_key_is_renameable(kind, name):
    loss, agent = prepared(kind)
    batch = batch_of(agent)
    batch["priority_weight"] = torch.rand(3, 8, dtype=torch.float64)
    expected = loss(batch)
    old = getattr(loss.tensor_keys, name)
    loss.set_keys(**{name: "fresh"})
    if name == "action":  # networks read and write it too; a sampler's output is not read
        for network in [*loss.networks(), *loss.target_networks()]:
            for module in (part for part in network.modules() if not hasattr(part, "dist_sample_keys")):
                for keys in ("in_keys", "out_keys"):
                    if "action" in getattr(module, keys, []):
                        setattr(module, keys, ["fresh" if key == "action" else key for key in getattr(module, keys)])
    if name in ("reward", "done", "terminated"):
        batch["next"].rename_key_(old, "fresh")
    elif name != "priority":
        batch.rename_key_(old, "fresh")
    found = loss(batch.select(*loss.in_keys, strict=False))
    assert set(loss.out_keys) == set(found.keys())
    for ours, theirs in zip(loss.out_keys, type(loss).out_keys.fget(prepared(kind)[0]), strict=True):
        torch.testing.assert_close(found[ours], expected[theirs], rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_returns_are_chosen(kind):
    loss, agent = prepared(kind, n_steps=2)
    batch = batch_of(agent)
    targets = {}
    for name, options in {"td1": {}, "tdlambda": {"lmbda": 1.0}, "td0": {}}.items():
        assert loss.make_value_estimator(name, **options) is loss
        targets[name] = loss(batch)["q_target"]
    torch.testing.assert_close(targets["td1"], targets["tdlambda"])
    assert loss.n_steps == 1
    assert not torch.equal(targets["td0"], targets["td1"])

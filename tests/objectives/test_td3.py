from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential

from recurl.core.errors import ArgumentError, ArgumentTypeError
from recurl.core.specs import Bounded, Categorical
from recurl.modules import MLP
from recurl.objectives import SoftUpdate, TD3Loss
from tests.objectives.numpy_nets import check_gradients, minimum, mlp, n_step, segments_of, unrolled, weights_of
from tests.objectives.simulate import ACTIONS, HIDDEN, OBS, Agent, collect
from tests.objectives.test_sac import HIGH, LOW, body_of, q_head, states, trunk

GAMMA, NOISE, CLIP = 0.9, 0.4, 0.3


def make(cell, memory, **options):
    """Return a loss whose targets differ from the networks, and its collecting agent; see ``test_sac.make``."""
    names = {"own": ["a", "q", "r"], "both": ["a", "q", "q"], "shared": ["a", "a", "a"]}[memory]
    bodies = {name: trunk(cell, name) for name in dict.fromkeys(names)}
    head = TensorDictModule(MLP(HIDDEN, ACTIONS), in_keys=["a_features"], out_keys=["action"])
    actor = TensorDictSequential(bodies["a"], head).double()
    critics = [TensorDictSequential(bodies[name], q_head(name)).double() for name in names[1:]]
    noise = {"policy_noise": NOISE, "noise_clip": CLIP}
    loss = TD3Loss(actor, critics, bounds=(LOW, HIGH), gamma=GAMMA, loss_function="l2", **noise, **options).double()
    with torch.no_grad():
        for value in [*loss.target_qvalue_network.parameters(), *loss.target_actor_network.parameters()]:
            value.add_(0.3 * torch.randn_like(value))
    agent = Agent(TensorDictSequential(*bodies.values(), head), actor, actor, {})
    agent.states = {key: (2, HIDDEN) for name in bodies for key in states(cell, name)}
    return loss, agent


class Reference:
    """Losses of one batch in NumPy, by the formulas of the paper, sequence by sequence."""

    def __init__(self, loss, cell, memory, batch, noise):
        self.names = {"own": ["q", "r"], "both": ["q", "q"], "shared": ["a", "a"]}[memory]
        self.loss, self.cell, self.batch, self.segments = loss, cell, batch, segments_of(batch)
        self.trunk, self.head = self._parts(loss.actor_network)
        found = {id(net.module[0]): weights_of(body_of(net.module[0], cell)) for net in loss.qvalue_network}
        self.bodies = [found[id(net.module[0])] for net in loss.qvalue_network]
        self.heads = [weights_of(net.module[1].module) for net in loss.qvalue_network]
        self.target = self._target(noise)

    def _parts(self, network):
        return weights_of(body_of(network.module[0], self.cell)), weights_of(network.module[1].module)

    def _along(self, weights, name):
        return unrolled(self.cell, weights, self.batch, states(self.cell, name), self.segments)

    def _values(self, heads, features, action):
        pairs = zip(heads, features, strict=True)
        return [mlp(head, np.concatenate([f, action + 0 * f[..., :1]], -1))[..., 0] for head, f in pairs]

    def _target(self, noise):
        trunk, head = self._parts(self.loss.target_actor_network)
        flat = self.batch.reshape(-1)
        count = len(flat)
        ends = np.zeros(count, bool)
        ends[[segment[-1] for segment in self.segments]] = True
        ends &= ~flat["next", "terminated"].squeeze(-1).numpy()
        drawn = noise[np.minimum(np.arange(count) + 1, count - 1)]
        drawn[ends] = noise[count:]
        low, high = LOW.numpy(), HIGH.numpy()
        smoothed = np.clip(NOISE * drawn, -CLIP, CLIP) * (high - low) / 2
        action = np.clip(mlp(head, self._along(trunk, "a")[1]) + smoothed, low, high)
        slow = [self._parts(net) for net in self.loss.target_qvalue_network]
        features = [self._along(body, name)[1] for (body, _), name in zip(slow, self.names, strict=True)]
        value = minimum(*self._values([head for _, head in slow], features, action))
        return n_step(GAMMA, self.loss.n_steps, value, self.batch, self.segments)

    def loss_qvalue(self):
        features = [self._along(body, name)[0] for body, name in zip(self.bodies, self.names, strict=True)]
        taken = self.batch["action"].reshape(-1, ACTIONS).numpy()
        return sum(((q - self.target) ** 2).mean() for q in self._values(self.heads, features, taken))

    def loss_actor(self):
        action = mlp(self.head, self._along(self.trunk, "a")[0])
        features = self._along(weights_of(body_of(self.loss.qvalue_network[0].module[0], self.cell)), self.names[0])[0]
        return -self._values(self.heads[:1], [features], action)[0].mean()


def draws(loss, batch):
    """Return the losses of a batch and the noise they draw: for the tokens in order, then for the bootstrap steps."""
    terminated = batch["next", "terminated"].reshape(-1)
    past = sum(not terminated[segment[-1]] for segment in segments_of(batch))
    torch.manual_seed(5)
    noise = torch.randn(batch.numel() + past, ACTIONS, dtype=torch.float64).numpy()
    torch.manual_seed(5)
    return loss(batch), noise


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize(("cell", "memory"), [("lstm", "both"), ("gru", "own"), ("lstm", "shared"), ("none", "both")])
def test_equals_the_formulas(cell, memory, n_steps):
    loss, agent = make(cell, memory, n_steps=n_steps)
    with torch.no_grad():
        batch = collect(agent, rows=4, steps=11, batches=2, end=0.3)[1]
    assert all(batch["next", key].any() for key in ("terminated", "truncated"))
    result, noise = draws(loss, batch)
    reference = Reference(loss, cell, memory, batch, noise)
    for name in ("loss_qvalue", "loss_actor"):
        assert result[name].item() == pytest.approx(np.real(getattr(reference, name)()), rel=1e-10, abs=1e-10), name

    (result["loss_actor"] + result["loss_qvalue"]).backward()
    actor = [(reference.head, loss.actor_network.module[1].module)]
    if memory != "shared":
        actor.append((reference.trunk, body_of(loss.actor_network.module[0], cell)))
    check_gradients(reference.loss_actor, actor)
    bodies = [body_of(net.module[0], cell) for net in loss.qvalue_network]
    heads = [net.module[1].module for net in loss.qvalue_network]
    groups = [*zip(reference.bodies, bodies, strict=True), *zip(reference.heads, heads, strict=True)]
    check_gradients(reference.loss_qvalue, groups)


def small(**options):
    actor = TensorDictModule(MLP(OBS, ACTIONS), in_keys=["observation"], out_keys=["action"])
    critic = TensorDictModule(MLP(OBS + ACTIONS, 1), ["observation", "action"], ["state_action_value"])
    after = TensorDict({"observation": torch.zeros(4, OBS), "reward": torch.ones(4, 1)}, [4])
    after["done"] = after["terminated"] = torch.zeros(4, 1, dtype=torch.bool)
    batch = TensorDict({"observation": torch.zeros(4, OBS), "next": after, "action": torch.zeros(4, ACTIONS)}, [4])
    return TD3Loss(actor, critic, **{"action_spec": Bounded(-1.0, 1.0, (ACTIONS,)), **options}), batch


def test_the_actor_can_be_left_out():
    loss, batch = small()
    loss.updates_actor = False
    result = loss(batch)
    assert list(result.keys()) == loss.out_keys == ["loss_qvalue", "td_error", "q_value", "q_target"]


def test_targets_follow_actor_and_critics():
    loss, _ = small()
    with torch.no_grad():
        for value in loss.parameters():
            value.add_(1.0)
    SoftUpdate(loss, tau=1.0).step()
    for online, target in (("actor_network", "target_actor_network"), ("qvalue_network", "target_qvalue_network")):
        pairs = zip(getattr(loss, online).parameters(), getattr(loss, target).parameters(), strict=True)
        assert all(torch.equal(value, copied) for value, copied in pairs)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bounds": (-1.0, 1.0)}, ArgumentTypeError, "Give exactly one of action_spec and bounds"),
        ({"action_spec": None}, ArgumentTypeError, "Give exactly one of action_spec and bounds, got None and None"),
        ({"action_spec": Categorical(3)}, ArgumentError, "TD3Loss needs actions with bounds, a Bounded spec, got Cat"),
        ({"action_spec": None, "bounds": (1.0, 1.0)}, ArgumentError, "TD3Loss needs two finite bounds, low < high"),
        ({"action_spec": Bounded(-2e38, 2e38, (1,))}, ArgumentError, "high - low finite, got"),
        ({"policy_noise": -1.0}, ArgumentError, "policy_noise must not be negative, got -1.0"),
        ({"noise_clip": float("nan")}, ArgumentError, "noise_clip must not be negative, got nan"),
    ],
)
def test_invalid_arguments(options, error, message):
    with pytest.raises(error, match=message):
        small(**options)


def test_refuses_an_actor_without_action():
    loss, batch = small()
    net = MLP(OBS, ACTIONS)
    loss.actor_network = TensorDictModule(net, in_keys=["observation"], out_keys=["move"])
    with pytest.raises(ArgumentError, match=r"A critic must read the action, 'move', after its memory"):
        loss(batch)
    loss.actor_network = TensorDictModule(lambda x: net(x).split(1, -1), in_keys=["observation"], out_keys=["a", "b"])
    with pytest.raises(ArgumentError, match=r"The actor must write 'action', but its out_keys are \['a', 'b'\]"):
        loss(batch)


def test_refuses_bounds_of_a_batch_of_environments():
    loss, batch = small(action_spec=Bounded(-1.0, 1.0, (5, ACTIONS)))
    with pytest.raises(ArgumentError, match=r"bounds of one action, .* got \[5, .*\]: .*action_spec_unbatched"):
        loss(batch)

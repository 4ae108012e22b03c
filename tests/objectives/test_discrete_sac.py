from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential

from recurl.core.errors import ArgumentError
from recurl.execution.lowering import modules_in_order
from recurl.modules import (
    MLP,
    Categorical,
    IndependentCategorical,
    MaskedCategorical,
    NormalParamExtractor,
    OneHotCategorical,
    ProbabilisticActor,
    TanhNormal,
)
from recurl.objectives import DiscreteSACLoss
from tests.objectives.numpy_nets import check_gradients, minimum, mlp, n_step, segments_of, unrolled, weights_of
from tests.objectives.simulate import HIDDEN, OBS, Agent, collect
from tests.objectives.test_sac import body_of, states, trunk

GAMMA, ALPHA, WEIGHT = 0.9, 0.3, 0.6
COUNTS = {"integer": (3,), "one-hot": (3,), "masked": (3,), "several": (2, 3)}
DISTRIBUTIONS = {"integer": Categorical, "one-hot": OneHotCategorical, "masked": MaskedCategorical}


def several(logits):
    return IndependentCategorical(logits, COUNTS["several"])


def make_actor(kind, body):
    head = TensorDictModule(MLP(HIDDEN, sum(COUNTS[kind])), in_keys=["a_features"], out_keys=["logits"])
    keys = {"logits": "logits", "mask": "action_mask"} if kind == "masked" else ["logits"]
    return ProbabilisticActor(
        TensorDictSequential(body, head),
        in_keys=keys,
        distribution_class=DISTRIBUTIONS.get(kind, several),
        default_interaction_type="random",
    )


def make(cell, kind, shared, **options):
    """Return a loss whose targets differ from the critics, and its collecting agent."""
    name = "a" if shared else "q"
    bodies = {"a": trunk(cell, "a"), **({} if shared else {"q": trunk(cell, "q")})}
    actor = make_actor(kind, bodies["a"]).double()
    head = TensorDictModule(MLP(HIDDEN, sum(COUNTS[kind])), in_keys=[f"{name}_features"], out_keys=["action_value"])
    critic = TensorDictSequential(bodies[name], head).double()
    loss = DiscreteSACLoss(actor, critic, gamma=GAMMA, target_entropy_weight=WEIGHT, loss_function="l2", **options)
    loss = loss.double()
    with torch.no_grad():
        loss.log_alpha.fill_(math.log(ALPHA))
        for value in loss.target_qvalue_network.parameters():
            value.add_(0.3 * torch.randn_like(value))
    agent = Agent(TensorDictSequential(*bodies.values(), *modules_in_order(actor)[1:]), actor, actor, {})
    agent.states = {key: (2, HIDDEN) for prefix in bodies for key in states(cell, prefix)}
    return loss, agent


def collected(agent, kind, **options):
    batches = collect(masked(agent) if kind == "masked" else agent, **options)
    if kind == "masked":  # the mask is a function of the observation
        for batch in batches:
            batch["action_mask"] = allowed_in(batch["observation"])
            batch["next", "action_mask"] = allowed_in(batch["next", "observation"])
    return batches


def allowed_in(observation):
    mask = observation > 0
    mask[..., 0] |= ~mask.any(-1)
    return mask


def masked(agent):
    def see(td):
        return td.set("action_mask", allowed_in(td["observation"]))

    step = agent.step
    agent.step = lambda td: step(see(td))
    return agent


class Reference:
    """Losses of one batch in NumPy, by the formulas of the paper, sequence by sequence."""

    def __init__(self, loss, cell, kind, shared, batch):
        self.loss, self.cell, self.kind, self.name = loss, cell, kind, "a" if shared else "q"
        self.batch, self.segments = batch, segments_of(batch)
        self.actor_trunk = weights_of(body_of(modules_in_order(loss.actor_network)[0], cell))
        self.actor_head = weights_of(modules_in_order(loss.actor_network)[1].module)
        trunks = {id(body): weights_of(body) for body in self._bodies(loss.qvalue_network)}
        self.critic_trunks = [
            trunks[id(body)] for body in self._bodies(loss.qvalue_network)
        ]  # a single one if they share it
        self.heads = [weights_of(net.module[1].module) for net in loss.qvalue_network]
        self.cuts = np.cumsum(COUNTS[kind])[:-1]
        self.target = self._target()

    def _bodies(self, networks):
        return [body_of(net.module[0], self.cell) for net in networks]

    def _along(self, weights, name):
        return unrolled(self.cell, weights, self.batch, states(self.cell, name), self.segments)

    def policy(self, features, observation):
        """Return probabilities and log-probabilities of the choices of each integer of the action."""
        found = []
        for logits in np.split(mlp(self.actor_head, features), self.cuts, -1):
            allowed = (
                allowed_in(torch.as_tensor(observation)).numpy()
                if self.kind == "masked"
                else logits.real == logits.real
            )
            weight = np.exp(logits) * allowed
            prob = weight / weight.sum(-1, keepdims=True)
            found.append((prob, np.where(allowed, np.log(np.where(allowed, prob, 1.0)), 0.0)))
        return found

    def soft(self, policy, values):
        """``sum_a pi (alpha log pi - Q)`` over the choices of all integers."""
        parts = zip(policy, np.split(values, self.cuts, -1), strict=True)
        return sum((p * (ALPHA * lp - q)).sum(-1) for (p, lp), q in parts)

    def _target(self):
        flat = self.batch.reshape(-1)
        _, features = self._along(self.actor_trunk, "a")
        policy = self.policy(features, flat["next", "observation"].numpy())
        slow = []
        for net, body in zip(
            self.loss.target_qvalue_network, self._bodies(self.loss.target_qvalue_network), strict=True
        ):
            _, seen = self._along(weights_of(body), self.name)
            slow.append(mlp(weights_of(net.module[1].module), seen))
        return n_step(GAMMA, self.loss.n_steps, -self.soft(policy, minimum(*slow)), self.batch, self.segments)

    def loss_qvalue(self):
        features = [self._along(body, self.name)[0] for body in self.critic_trunks]
        action = self.batch["action"].flatten(0, 1).numpy()
        if self.kind == "one-hot":
            action = action.argmax(-1)
        first = np.concatenate([[0], self.cuts])
        index = first + action.reshape(len(self.target), -1)
        pairs = zip(self.heads, features, strict=True)
        values = [np.take_along_axis(mlp(head, seen), index, -1).sum(-1) for head, seen in pairs]
        return sum(((value - self.target) ** 2).mean() for value in values)

    def loss_actor(self):
        features, _ = self._along(self.actor_trunk, "a")
        policy = self.policy(features, self.batch["observation"].flatten(0, 1).numpy())
        seen = [self._along(weights_of(body), self.name)[0] for body in self._bodies(self.loss.qvalue_network)]
        return self.soft(policy, minimum(*map(mlp, self.heads, seen))).mean()

    def entropy(self):
        features, _ = self._along(self.actor_trunk, "a")
        policy = self.policy(features, self.batch["observation"].flatten(0, 1).numpy())
        entropy = -sum((p * lp).sum(-1) for p, lp in policy).real
        wanted = WEIGHT * sum(np.log((p > 0).sum(-1)) for p, _ in policy)
        return entropy.mean(), (entropy - wanted).mean()


CASES = [("lstm", "integer", False), ("gru", "one-hot", True), ("gru", "masked", False), ("none", "several", False)]


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize(("cell", "kind", "shared"), CASES)
def test_equals_the_formulas(cell, kind, shared, n_steps):
    loss, agent = make(cell, kind, shared, n_steps=n_steps)
    with torch.no_grad():
        batch = collected(agent, kind, rows=4, steps=11, batches=2, end=0.3)[1]
    assert all(batch["next", key].any() for key in ("terminated", "truncated"))
    result = loss(batch)
    reference = Reference(loss, cell, kind, shared, batch)
    for name in ("loss_qvalue", "loss_actor"):
        assert result[name].item() == pytest.approx(np.real(getattr(reference, name)()), rel=1e-10, abs=1e-10), name
    entropy, excess = reference.entropy()
    assert result["entropy"].item() == pytest.approx(entropy, rel=1e-10)
    assert result["loss_alpha"].item() == pytest.approx(math.log(ALPHA) * excess, rel=1e-10)

    (result["loss_actor"] + result["loss_qvalue"] + result["loss_alpha"]).backward()
    assert loss.log_alpha.grad.item() == pytest.approx(excess, rel=1e-10)
    actor = [(reference.actor_head, modules_in_order(loss.actor_network)[1].module)]
    if not shared:
        actor.append((reference.actor_trunk, body_of(modules_in_order(loss.actor_network)[0], cell)))
    check_gradients(reference.loss_actor, actor)
    critics = list(zip(reference.critic_trunks, reference._bodies(loss.qvalue_network), strict=True))
    heads = [net.module[1].module for net in loss.qvalue_network]
    check_gradients(reference.loss_qvalue, [*critics, *zip(reference.heads, heads, strict=True)])


def small(values=3, distribution=Categorical, **options):
    net = TensorDictModule(MLP(OBS, 3), in_keys=["observation"], out_keys=["logits"])
    actor = ProbabilisticActor(net, in_keys=["logits"], distribution_class=distribution)
    critic = TensorDictModule(MLP(OBS, values), in_keys=["observation"], out_keys=["action_value"])
    after = TensorDict({"observation": torch.zeros(4, OBS), "reward": torch.ones(4, 1)}, [4])
    after["done"] = after["terminated"] = torch.zeros(4, 1, dtype=torch.bool)
    batch = TensorDict({"observation": torch.zeros(4, OBS), "next": after}, [4])
    batch["action"] = torch.zeros(4, dtype=torch.int64)
    return DiscreteSACLoss(actor, critic, **options), batch


def test_invalid_arguments():
    loss, batch = small(values=2)
    with pytest.raises(ArgumentError, match=r"one value for each of the 3 choices .* got 2 values"):
        loss(batch)
    loss, batch = small()
    batch["action"] = torch.zeros(4, 2)
    with pytest.raises(ArgumentError, match=r"The action must be integers \[\*B, T\] or one-hot .*float32 with \[2\]"):
        loss(batch)
    with pytest.raises(ArgumentError, match=r"target_entropy_weight must be in \[0, 1\], got 2"):
        small(target_entropy_weight=2.0)
    loss, batch = small()
    net = torch.nn.Sequential(MLP(OBS, 2), NormalParamExtractor())
    params = TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"])
    loss.actor_network = ProbabilisticActor(params, in_keys=["loc", "scale"], distribution_class=TanhNormal)
    with pytest.raises(ArgumentError, match=r"the probabilities of all choices, which a TanhNormal doesn't provide"):
        loss(batch)


def test_a_number_is_the_entropy_to_be_given():
    loss, batch = small(target_entropy=0.5)
    result = loss(batch)
    result["loss_alpha"].backward()
    assert loss.log_alpha.grad.item() == pytest.approx(result["entropy"].item() - 0.5)

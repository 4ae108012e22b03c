from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential

from recurl.execution.lowering import modules_in_order
from recurl.modules import MLP, NormalParamExtractor, ProbabilisticActor, TanhNormal
from recurl.objectives import SACLoss
from tests.objectives.numpy_nets import check_gradients, minimum, mlp, n_step, segments_of, unrolled, weights_of
from tests.objectives.simulate import ACTIONS, HIDDEN, OBS, Agent, collect, recurrent

GAMMA, ALPHA = 0.9, 0.3
LOW, HIGH = torch.tensor([-2.0, -0.5], dtype=torch.float64), torch.tensor([2.0, 1.5], dtype=torch.float64)
STATE_NAMES = {"lstm": ("h", "c"), "gru": ("h",), "none": ()}


def states(cell, prefix):
    return [f"{prefix}_{name}" for name in STATE_NAMES[cell]]


def trunk(cell, prefix, backend="pad"):
    out = f"{prefix}_features"
    if cell == "none":
        return TensorDictModule(MLP(OBS, HIDDEN, num_cells=[4]), in_keys=["observation"], out_keys=[out])
    return recurrent(cell, prefix, out, backend)


def q_head(prefix):
    net = MLP(HIDDEN + ACTIONS, 1, num_cells=[4])
    return TensorDictModule(net, in_keys=[f"{prefix}_features", "action"], out_keys=["state_action_value"])


def make_actor(body, prefix):
    net = torch.nn.Sequential(MLP(HIDDEN, 2 * ACTIONS), NormalParamExtractor())
    head = TensorDictModule(net, in_keys=[f"{prefix}_features"], out_keys=["loc", "scale"])
    return ProbabilisticActor(
        TensorDictSequential(body, head),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": LOW, "high": HIGH},
        default_interaction_type="random",
    )


def make(cell, memory, backend="pad", **options):
    """Return a loss whose targets differ from the critics, and its collecting agent.

    ``memory`` of the critics: a separate one each (``"own"``), one for ``"both"``, or the actor's (``"shared"``).
    """
    names = {"own": ["a", "q", "r"], "both": ["a", "q", "q"], "shared": ["a", "a", "a"]}[memory]
    bodies = {name: trunk(cell, name, backend) for name in dict.fromkeys(names)}
    actor = make_actor(bodies["a"], "a").double()
    critics = [TensorDictSequential(bodies[name], q_head(name)).double() for name in names[1:]]
    loss = SACLoss(actor, critics, gamma=GAMMA, alpha_init=ALPHA, **options).double()
    with torch.no_grad():
        loss.log_alpha.fill_(math.log(ALPHA))  # in double precision
        for value in loss.target_qvalue_network.parameters():
            value.add_(0.3 * torch.randn_like(value))
    agent = Agent(TensorDictSequential(*bodies.values(), *modules_in_order(actor)[1:]), actor, actor, {})
    agent.states = {key: (2, HIDDEN) for name in bodies for key in states(cell, name)}
    return loss, agent


class Reference:
    """Losses of one batch in NumPy, by the formulas of the paper, sequence by sequence."""

    def __init__(self, loss, cell, memory, batch, noise):
        names = {"own": ["q", "r"], "both": ["q", "q"], "shared": ["a", "a"]}[memory]
        self.loss, self.cell, self.batch, self.names = loss, cell, batch, names
        self.segments = segments_of(batch)
        self.actor_trunk = weights_of(body_of(modules_in_order(loss.actor_network)[0], cell))
        self.actor_head = weights_of(modules_in_order(loss.actor_network)[1].module[0])
        self.critics = [self._critic(net) for net in loss.qvalue_network]
        self.slow = [self._critic(net) for net in loss.target_qvalue_network]
        self.noise = noise
        self.half, self.middle = ((HIGH - LOW) / 2).numpy(), ((HIGH + LOW) / 2).numpy()
        self.taken = batch["action"].reshape(-1, ACTIONS).numpy()
        self.target = self._target()

    def _critic(self, net):
        return weights_of(body_of(net.module[0], self.cell)), weights_of(net.module[1].module)

    def _along(self, weights, name):
        return unrolled(self.cell, weights, self.batch, states(self.cell, name), self.segments)

    def policy(self, features, noise):
        """Return actions and their log-probabilities, scaled to [-1, 1]."""
        loc, raw = np.split(mlp(self.actor_head, features), 2, -1)
        shift = torch.tensor(0.99).expm1().log().item()  # as in NormalParamExtractor
        scale = np.log1p(np.exp(raw + shift)) + 0.01
        u = loc + scale * noise
        squashed = np.tanh(u)
        log_prob = -0.5 * noise**2 - np.log(scale) - 0.5 * math.log(2 * math.pi) - np.log(1 - squashed**2)
        return self.middle + self.half * squashed, log_prob.sum(-1)

    def values(self, heads, features, action):
        return [
            mlp(head, np.concatenate([f, action + 0 * f[..., :1]], -1))[..., 0]
            for head, f in zip(heads, features, strict=True)
        ]

    def _target(self):
        now, after = self._along(self.actor_trunk, "a")
        slow = [self._along(body, name) for (body, _), name in zip(self.slow, self.names, strict=True)]
        heads = [head for _, head in self.slow]
        count = len(now)
        flat = self.batch.reshape(-1)
        ends = np.zeros(count, bool)
        ends[[segment[-1] for segment in self.segments]] = True
        ends &= ~flat["next", "terminated"].squeeze(-1).numpy()
        following = np.minimum(np.arange(count) + 1, count - 1)
        noise = self.noise[following]  # of the next token, or past an end a separate one
        noise[ends] = self.noise[count:]
        action, log_prob = self.policy(after, noise)
        value = minimum(*self.values(heads, [f for _, f in slow], action)) - ALPHA * log_prob
        return n_step(GAMMA, self.loss.n_steps, value, self.batch, self.segments)

    def loss_qvalue(self):
        heads = [head for _, head in self.critics]
        features = [self._along(body, name)[0] for (body, _), name in zip(self.critics, self.names, strict=True)]
        return sum(((q - self.target) ** 2).mean() for q in self.values(heads, features, self.taken))

    def loss_actor(self):
        now, _ = self._along(self.actor_trunk, "a")
        action, log_prob = self.policy(now, self.noise[: len(now)])
        features = [
            self._along(weights_of(body_of(net.module[0], self.cell)), name)[0]
            for net, name in zip(self.loss.qvalue_network, self.names, strict=True)
        ]
        best = minimum(*self.values([head for _, head in self.critics], features, action))
        return (ALPHA * log_prob - best).mean()

    def entropy(self):
        now, _ = self._along(self.actor_trunk, "a")
        return -self.policy(now, self.noise[: len(now)])[1].mean()


def body_of(module, cell):
    return module.module if cell == "none" else getattr(module, cell)


def draws(loss, batch):
    """Return the losses of a batch and the noise they draw: for the tokens in order, then for the bootstrap steps."""
    count = batch.numel()
    segments = segments_of(batch)
    terminated = batch["next", "terminated"].reshape(-1)
    past = sum(not terminated[segment[-1]] for segment in segments)
    torch.manual_seed(5)
    noise = torch.randn(count + past, ACTIONS, dtype=torch.float64).numpy()
    torch.manual_seed(5)
    return loss(batch), noise


CASES = [("lstm", "own"), ("gru", "both"), ("gru", "shared"), ("none", "both")]


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize(("cell", "memory"), CASES)
def test_equals_the_formulas(cell, memory, n_steps):
    loss, agent = make(cell, memory, n_steps=n_steps, loss_function="l2")
    with torch.no_grad():
        batch = collect(agent, rows=4, steps=11, batches=2, end=0.3)[1]
    assert all(batch["next", key].any() for key in ("terminated", "truncated"))
    result, noise = draws(loss, batch)
    reference = Reference(loss, cell, memory, batch, noise)
    for name in ("loss_qvalue", "loss_actor", "entropy"):
        assert result[name].item() == pytest.approx(np.real(getattr(reference, name)()), rel=1e-10, abs=1e-10), name
    expected = math.log(ALPHA) * (reference.entropy().real + ACTIONS)
    assert result["loss_alpha"].item() == pytest.approx(expected, rel=1e-9)
    assert result["alpha"].item() == pytest.approx(ALPHA)

    (result["loss_actor"] + result["loss_qvalue"] + result["loss_alpha"]).backward()
    assert loss.log_alpha.grad.item() == pytest.approx(reference.entropy().real + ACTIONS, rel=1e-10)
    actor = [(reference.actor_head, modules_in_order(loss.actor_network)[1].module[0])]
    if memory != "shared":
        actor.append((reference.actor_trunk, body_of(modules_in_order(loss.actor_network)[0], cell)))
    check_gradients(reference.loss_actor, actor)
    bodies = {id(net.module[0]): net.module[0] for net in loss.qvalue_network}
    for (body, head), net in zip(reference.critics, loss.qvalue_network, strict=True):
        check_gradients(reference.loss_qvalue, [(head, net.module[1].module)])
        if len(bodies) == 2:
            check_gradients(reference.loss_qvalue, [(body, body_of(net.module[0], cell))])
    if len(bodies) == 1:  # one memory: both critics see the same weights
        first = reference.critics[0][0]
        reference.critics[1] = (first, reference.critics[1][1])
        check_gradients(reference.loss_qvalue, [(first, body_of(loss.qvalue_network[0].module[0], cell))])

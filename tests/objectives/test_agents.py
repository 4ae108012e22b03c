"""Agents that don't interact, trained as rows of one batch, equal independent runs of each agent, in float64.

The reference runs every episode of every agent alone, with ``torch.nn.LSTM`` from zero states, and sums by hand over
the steps in which the agent took part.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

from recurl.collectors import Collector
from recurl.data import SequenceMinibatches
from recurl.modules import LSTMModule, NormalParamExtractor, ProbabilisticActor, ValueOperator
from recurl.objectives import ClipPPOLoss
from recurl.objectives.value import GAE
from tests.envs.agents import Walkers

GAMMA, LAMBDA, HIDDEN, STEPS = 0.9, 0.8, 4, 12
LOSSES = ("loss_objective", "loss_critic", "loss_entropy")


def networks(critic_reads="observation", size=2):
    """Return an actor with a memory, and a critic with its own, in float64."""
    torch.manual_seed(0)

    def trunk(prefix, key, size):
        double = TensorDictModule(lambda x: x.double(), [key], [f"{prefix}_in"])
        states = [f"{prefix}_h", f"{prefix}_c"]
        reads, writes = [f"{prefix}_in", *states], [f"{prefix}_features", *(("next", state) for state in states)]
        return double, LSTMModule(size, HIDDEN, in_keys=reads, out_keys=writes)

    head = TensorDictModule(
        nn.Sequential(nn.Linear(HIDDEN, 4), NormalParamExtractor()), ["actor_features"], ["loc", "scale"]
    )
    actor = ProbabilisticActor(
        TensorDictSequential(*trunk("actor", "observation", 2), head),
        in_keys=["loc", "scale"],
        distribution_class=torch.distributions.Normal,
        return_log_prob=True,
    )
    value = ValueOperator(nn.Linear(HIDDEN, 1), in_keys=["critic_features"])
    critic = TensorDictSequential(*trunk("critic", critic_reads, size), value)
    return actor.double(), critic.double()


def collected(env, actor, critic, batches=2):
    """Return ``batches`` successive batches, whose rows go on, as one."""
    acting = TensorDictSequential(*critic, actor)
    collector = Collector(env, acting, frames_per_batch=env.batch_size.numel() * STEPS)
    torch.manual_seed(1)
    return [batch for batch, _ in zip(collector, range(batches), strict=False)]


def lstm(module: Any, x: Tensor) -> Tensor:
    net = nn.LSTM(x.shape[-1], HIDDEN, batch_first=True, dtype=torch.float64)
    return torch.func.functional_call(net, dict(module.lstm.named_parameters()), (x[None],))[0][0]


def stretches(batch):
    """Yield row, first and end (exclusive) of every episode in which the agent of the row takes part."""
    for row in range(batch.shape[0]):
        first = 0
        for t in range(batch.shape[1]):
            if batch["next", "done"][row, t, 0] or t == batch.shape[1] - 1:
                if batch["collector", "mask"][row, first]:
                    yield row, first, t + 1
                first = t + 1


def alone(batch, actor, critic, key="observation"):
    """Return per-token tensors ``[N]`` of all episodes, each run alone: log-probs, entropies, values, and GAE."""
    out: dict[str, list[Tensor]] = {name: [] for name in ("log_prob", "entropy", "value", "advantage", "where")}
    for row, a, b in stretches(batch):
        own, after = batch[row, a:b], batch["next"][row, a:b]
        loc, scale = actor.module[0][2].module(lstm(actor.module[0][1], own["observation"].double()))
        dist = torch.distributions.Normal(loc, scale)
        out["log_prob"].append(dist.log_prob(own["action"]).sum(-1))
        out["entropy"].append(dist.entropy().sum(-1))
        seen = torch.cat([own[key], after[key][-1:]]).double()
        values = critic[2].module(lstm(critic[1], seen))[:, 0]
        out["value"].append(values[:-1])
        with torch.no_grad():
            following = values[1:].clone()
            following[-1] *= ~after["terminated"][-1, 0]  # truncated, or cut by the end of the batch: bootstrapped
            delta = after["reward"][:, 0].double() + GAMMA * following - values[:-1]
            advantage, sums = torch.zeros((), dtype=torch.float64), []
            for step in reversed(delta):
                advantage = step + GAMMA * LAMBDA * advantage
                sums.insert(0, advantage)
        out["advantage"].append(torch.stack(sums))
        out["where"].append(torch.arange(row * batch.shape[1] + a, row * batch.shape[1] + b))
    return {name: torch.cat(found) for name, found in out.items()}


def grads(*modules):
    return torch.cat([p.grad.flatten() for module in modules for p in module.parameters()])


def close(found: Tensor, wanted: Tensor) -> None:
    assert (found - wanted).norm() <= 1e-12 * wanted.norm().clamp_min(1e-3)


@pytest.mark.parametrize("central", [False, True], ids=["IPPO", "MAPPO"])
def test_a_group_equals_its_agents_alone(central):
    options = {"return_state": True} if central else {}
    actor, critic = networks(*(("state", 6) if central else ()))
    env = Walkers(limits=[11, 7], **options)
    whole = torch.cat(collected(env, actor, critic), -1)  # 24 steps, in two batches
    first = whole[:, :STEPS]
    assert not whole["collector", "mask"].all()
    assert whole["next", "truncated"].any()

    key = "state" if central else "observation"
    run = alone(whole, actor, critic, key)  # every episode from zero states, across batches
    flat = whole.reshape(-1)
    close(flat["action_log_prob"].sum(-1)[run["where"]], run["log_prob"].detach())
    for name in ("actor", "critic"):
        module, observed = (actor.module[0][1], "observation") if name == "actor" else (critic[1], key)
        for row, a, b in stretches(whole):
            states = whole["next", f"{name}_h"][row, a:b, 0]
            close(states, lstm(module, whole[observed][row, a:b].double()).detach())

    loss = ClipPPOLoss(actor, critic, normalize_advantage=True)
    first = GAE(gamma=GAMMA, lmbda=LAMBDA, value_network=critic)(first.clone())
    now = alone(first, actor, critic, key)
    flat, where = first.reshape(-1), now["where"]
    close(flat["advantage"][where, 0], now["advantage"])
    close(flat["state_value"][where, 0], now["value"].detach())
    absent = ~first["collector", "mask"]
    assert not first["advantage"][absent].any()

    with torch.no_grad():  # so that ratios differ from 1, and some are clipped
        for parameter in (*actor.parameters(), *critic.parameters()):
            parameter += 0.1 * torch.randn_like(parameter)
    later = {**alone(first, actor, critic, key), "advantage": now["advantage"]}
    advantage = now["advantage"]
    ratio = (later["log_prob"] - now["log_prob"].detach()).exp()
    assert ((ratio - 1).abs() > 0.2).any()
    scaled = (advantage - advantage.mean()) / advantage.std(correction=0)
    gain = torch.minimum(ratio * scaled, ratio.clamp(0.8, 1.2) * scaled)
    target = advantage + now["value"].detach()
    by_hand = -gain.mean() + nn.functional.smooth_l1_loss(later["value"], target) - 0.01 * later["entropy"].mean()
    by_hand.backward()
    wanted = grads(actor, critic)

    poisoned = first.clone()  # what absent agents see doesn't matter
    for name in ("observation", "advantage", "action_log_prob", *(["state"] if central else [])):
        poisoned[name][absent] = float("nan")
    for data in (first, poisoned, *SequenceMinibatches(first, 1), *SequenceMinibatches(poisoned, 1)):
        for module in (actor, critic):
            module.zero_grad()
        found = loss(data)
        total = sum(found[name] for name in LOSSES)
        total.backward()
        close(total.detach(), by_hand.detach())
        close(grads(actor, critic), wanted)

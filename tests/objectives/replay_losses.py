"""Deterministic replay losses, for tests of properties common to all of them."""

from __future__ import annotations

import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential

from recurl.modules import MLP, Categorical, NormalParamExtractor, ProbabilisticActor, TanhNormal
from recurl.objectives import DiscreteSACLoss, SACLoss, TD3Loss
from recurl.objectives.actor_critic import ActorCriticLoss
from tests.objectives.simulate import ACTIONS, HIDDEN, OBS, Agent, recurrent

CRITIC_MEMORY = ("own", "both", "shared")
"""Each critic has a separate memory, the critics share one, or they share the actor's."""


class Drawn(TanhNormal):
    """``TanhNormal`` whose noise is a function of its location."""

    def rsample_with_log_prob(self) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.sin(50.0 * self.loc.detach())
        u = self.loc + self.scale * noise
        return self._squash(u), self._sum_event(self._density(u, noise))


def trunk(cell: str, prefix: str, backend: str) -> TensorDictModuleBase:
    if cell == "none":
        return TensorDictModule(MLP(OBS, HIDDEN), in_keys=["observation"], out_keys=[f"{prefix}_features"])
    return recurrent(cell, prefix, f"{prefix}_features", backend)


def head(net: torch.nn.Module, reads: list[str], writes: list[str]) -> TensorDictModule:
    return TensorDictModule(net, in_keys=reads, out_keys=writes)


def make_replay_loss(
    kind: str, cell: str, memory: str = "both", backend: str = "loop", **options: object
) -> tuple[ActorCriticLoss, Agent]:
    """Return a loss, ``"sac"``, ``"discrete sac"`` or ``"td3"``, and its collecting agent."""
    names = {"own": ["a", "q", "r"], "both": ["a", "q", "q"], "shared": ["a", "a", "a"]}[memory]
    bodies = {name: trunk(cell, name, backend) for name in dict.fromkeys(names)}
    if kind == "sac":
        net = torch.nn.Sequential(MLP(HIDDEN, 2 * ACTIONS), NormalParamExtractor())
        top, keys, distribution = head(net, ["a_features"], ["loc", "scale"]), ["loc", "scale"], Drawn
    else:
        out = "action" if kind == "td3" else "logits"
        top, keys, distribution = head(MLP(HIDDEN, ACTIONS), ["a_features"], [out]), ["logits"], Categorical
    actor = TensorDictSequential(bodies["a"], top)
    if kind != "td3":
        actor = ProbabilisticActor(
            actor, in_keys=keys, distribution_class=distribution, default_interaction_type="random"
        )
    critics = []
    for name in names[1:]:
        if kind == "discrete sac":
            q = head(MLP(HIDDEN, ACTIONS), [f"{name}_features"], ["action_value"])
        else:
            q = head(MLP(HIDDEN + ACTIONS, 1), [f"{name}_features", "action"], ["state_action_value"])
        critics.append(TensorDictSequential(bodies[name], q))
    if kind == "td3":
        loss = TD3Loss(actor, critics, bounds=(-1.0, 1.0), policy_noise=0.0, **options)
    else:
        kinds = {"sac": SACLoss, "discrete sac": DiscreteSACLoss}
        loss = kinds[kind](actor, critics, alpha_init=0.3, **options)
    policy = TensorDictSequential(*(bodies[name] for name in bodies if name != "a"), actor)
    states = {"lstm": ("h", "c"), "gru": ("h",), "none": ()}[cell]
    agent = Agent(policy, actor, actor, {f"{name}_{part}": (2, HIDDEN) for name in bodies for part in states})
    return loss, agent


KINDS = ("sac", "discrete sac", "td3")

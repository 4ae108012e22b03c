"""Policies inside losses: modules before the sampler, log-probabilities and entropies of the actions taken."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase
from torch import Tensor
from torch import distributions as d

from recurl.core.errors import ArgumentError
from recurl.core.keys import TRAJ_IDS, TRAJ_STEPS, NestedKey, next_key, normalize_key
from recurl.execution.lowering import Network, distribution_of, inputs_of, modules_in_order, shared_state
from recurl.objectives.common import common_prefix, entry, per_token, states_of
from recurl.sequences.entries import Entries, Step

__all__ = ["ActorCritic", "PolicySampler", "log_prob_and_entropy", "sum_events"]


class PolicySampler(NamedTuple):
    """Sampler of a policy, its last module.

    Attributes:
        module: module that builds the distribution of actions.
        before: the modules before it, in order.
        action_keys: keys of the action, or of each of its parts.
        log_prob_key: key of the log-probability.
    """

    module: TensorDictModuleBase
    before: list[TensorDictModuleBase]
    action_keys: list[NestedKey]
    log_prob_key: NestedKey

    @classmethod
    def of(cls, actor: TensorDictModuleBase, reader: object) -> PolicySampler:
        """Return the sampler of ``actor``, or the actor itself if it overrides ``get_dist``.

        Raises:
            ArgumentError: the actor has no sampler, or one with several log-probabilities. The message names
                ``reader``, the loss.
        """
        overridden = isinstance(actor, ProbabilisticTensorDictSequential) and (
            "get_dist" in vars(actor) or type(actor).get_dist is not ProbabilisticTensorDictSequential.get_dist
        )
        *before, sampler = [actor] if overridden else modules_in_order(actor)
        actions = getattr(sampler, "dist_sample_keys", None)
        log_probs = getattr(sampler, "log_prob_keys", ())
        if actions is None or len(log_probs) != 1:
            given = f"is a {type(sampler).__name__}" if actions is None else f"samples {actions}"
            raise ArgumentError(
                f"{type(reader).__name__} needs action probabilities, so the actor must end with a sampler of one "
                "action, such as ProbabilisticActor(module, ..., distribution_class=..., return_log_prob=True), but "
                f"its last module {given}."
            )
        return cls(sampler, before, [normalize_key(key) for key in actions], normalize_key(log_probs[0]))

    @property
    def keys(self) -> dict[str, NestedKey]:
        """Keys by their names in :class:`TensorKeys`; the action is omitted if it has several parts."""
        action = {"action": self.action_keys[0]} if len(self.action_keys) == 1 else {}
        return {**action, "sample_log_prob": self.log_prob_key}

    def actions(self, batch: Step, renamed: NestedKey) -> list[Tensor]:
        """Return the action of ``batch``, stored at ``renamed``, or its parts."""
        return [entry(batch, key, "The actor writes it during collection.") for key in self.keys_of_action(renamed)]

    def keys_of_action(self, renamed: NestedKey) -> list[NestedKey]:
        """Return the keys of the action: ``renamed`` if it has a single part."""
        return [renamed] if len(self.action_keys) == 1 else self.action_keys


class ActorCritic(NamedTuple):
    """An actor and a critic, split into a shared trunk and the rest of each.

    Attributes:
        trunk: leading modules of both, run once.
        actor: the rest of the actor, without the sampler.
        critic: the rest of the critic.
        sampler: the actor's sampler.
        keys: entries that the networks read.
        states: keys of their recurrent states.
    """

    trunk: Network
    actor: Network
    critic: Network
    sampler: PolicySampler
    keys: list[NestedKey]
    states: list[NestedKey]

    @classmethod
    def of(cls, actor: TensorDictModuleBase, critic: TensorDictModuleBase | None, reader: object) -> ActorCritic:
        """Split the current networks; only the actor if the critic is None.

        Raises:
            ArgumentError: see :meth:`PolicySampler.of`; or two recurrent modules share state keys.
        """
        sampler, networks = PolicySampler.of(actor, reader), [actor, *([] if critic is None else [critic])]
        critics = [module for network in networks[1:] for module in modules_in_order(network)]
        shared = common_prefix(sampler.before, critics)
        if set(states_of(*sampler.before[shared:], sampler.module)) & set(states_of(*critics[shared:])):
            check_states(*networks)
        read = [normalize_key(key) for network in networks for key in network.in_keys]
        return cls(
            Network(sampler.before[:shared]),
            Network(sampler.before[shared:]),
            Network(critics[shared:]),
            sampler,
            list(dict.fromkeys([*read, TRAJ_IDS, TRAJ_STEPS])),
            list(dict.fromkeys(key for network in networks for key in states_of(network))),
        )

    @property
    def networks(self) -> tuple[Network, Network, Network]:
        """All networks in execution order."""
        return self.trunk, self.actor, self.critic

    def __call__(self, batch: Step, value_key: NestedKey) -> tuple[d.Distribution, Tensor]:
        """Return the distribution of actions and the values ``[*B, T]`` of a batch of sequences."""
        dist, run = self.run(self.inputs(batch))
        value = per_token(value_key, entry(run, value_key, "The critic must write it."), batch.batch_size)
        return dist, value

    def inputs(self, batch: Step) -> Step:
        """Return the inputs of the networks; the states after the steps of ``batch`` need not be computed."""
        return self.without(self.states, inputs_of(batch, self.keys, self.networks))

    def without(self, states: Iterable[NestedKey], inputs: Step) -> Step:
        """Mark some recurrent states as not needed after the steps of ``inputs``, and return these."""
        if isinstance(inputs, Entries):
            read = {normalize_key(key) for network in self.networks for m in network.modules for key in m.in_keys}
            inputs.unread = frozenset(map(next_key, states)) - read
        return inputs

    def run(self, inputs: Step) -> tuple[d.Distribution, Step]:
        """Return the distribution of actions and the critic's outputs."""
        run = self.trunk(inputs)
        branch = self.critic(run.copy() if self.critic.modules else run)
        return distribution_of(self.sampler.module, self.actor(run)), branch


def check_states(*networks: TensorDictModuleBase) -> None:
    """Raise ArgumentError if two recurrent modules of an actor and its critic share state keys."""
    shared = shared_state([module for network in networks for module in network.modules()])
    if shared is not None:
        raise ArgumentError(
            f"Actor and critic must not share state keys, but each has a recurrent module with the state {shared!r}, "
            "so one would start from the states of the other. Share the module (ActorValueOperator), or give one of "
            "them other keys, in_keys=[value, 'its_state', ...] and out_keys=[features, ('next', 'its_state'), ...]."
        )


def log_prob_and_entropy(dist: d.Distribution, actions: list[Tensor], *, entropy_grad: bool) -> tuple[Tensor, Tensor]:
    """Return the log-probability of an action, and the entropy with gradients if ``entropy_grad``."""
    fused = getattr(dist, "log_prob_and_entropy", None)
    if fused is not None:
        log_prob, entropy = fused(*actions)
        return log_prob, entropy if entropy_grad else entropy.detach()
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = dist.entropy()
    return cast(Any, dist).log_prob(*actions), entropy


def sum_events(values: Tensor, batch_shape: torch.Size) -> Tensor:
    """Sum ``values``, ``[*B, T, ...]``, over the components of an action to ``[*B, T]``."""
    extra = values.ndim - len(batch_shape)
    return values.sum(tuple(range(-extra, 0))) if extra > 0 else values

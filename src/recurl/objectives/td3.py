"""Twin delayed deep deterministic policy gradient (TD3) over sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from recurl.core.errors import ArgumentError, ArgumentTypeError
from recurl.core.keys import ACTION, NestedKey, normalize_key
from recurl.core.specs import Bounded, TensorSpec
from recurl.execution.lowering import modules_in_order
from recurl.objectives.actor_critic import ActorCriticLoss, without_torchrl_arguments
from recurl.objectives.common import masked_mean
from recurl.objectives.sequences import Sequences
from recurl.objectives.targets import target_of
from recurl.objectives.trunks import BootstrapSteps, SequenceTrunk
from recurl.sequences.entries import Step

__all__ = ["TD3Loss"]


@without_torchrl_arguments
class TD3Loss(ActorCriticLoss):
    """Losses of actor and critics of TD3, for continuous actions, over sequences.

    With the deterministic policy ``pi``, ``K`` critics ``Q_k``, their target networks ``pi'`` and ``Q'_k``, and the
    true next observation ``o'``, the losses to be summed and minimized are::

        noise       = clip(normal * policy_noise, -noise_clip, noise_clip) * half the range of the action
        target      = n-step return of the rewards and min_k Q'_k(o', clip(pi'(o') + noise, low, high))
        loss_qvalue = sum_k mean(weight * distance(Q_k(o, action), target))
        loss_actor  = -mean(Q_1(o, pi(o)))

    Source: Fujimoto et al., "Addressing function approximation error in actor-critic methods" (2018), algorithm 1.
    Update actor and targets every second step or so ("delayed policy updates"): while the attribute ``updates_actor``
    is False, ``loss_actor`` is neither computed nor returned.

    Sequences, states, ends and shared memories are treated as in :class:`SACLoss`. The target actor has its own states.

    Args:
        actor_network: policy, from observations to the action.
        qvalue_network: critics, see :class:`SACLoss`.
        action_spec: spec of the action of one environment, with two bounds. Give exactly one of ``action_spec`` and
            ``bounds``.
        bounds: lowest and highest action, numbers or tensors that broadcast to an action.
        num_qvalue_nets: number of critics to create from a single one.
        policy_noise: standard deviation of the noise on the target action, in units of half the range.
        noise_clip: largest such noise, in the same units.
        gamma: discount factor per step, in [0, 1].
        n_steps: number of rewards summed before the bootstrap value, at least 1.
        loss_function: distance between values and targets: ``"smooth_l1"``, ``"l1"`` or ``"l2"``.

    Update the target networks ``target_actor_network`` and ``target_qvalue_network`` with a :class:`SoftUpdate`.

    Reads the same entries as :class:`SACLoss`, and under ``"target"`` also states of the actor. Returns a TensorDict
    with the scalar losses and, without gradients, ``td_error``, ``[*B, T, 1]``, the largest ``|target - Q_k|`` of every
    token (0 at padding), and the means ``q_value`` and ``q_target``.

    Raises:
        ArgumentTypeError: not exactly one of ``action_spec`` and ``bounds`` is given.
        ArgumentError: an option is out of range; a bound is missing; the actor doesn't write the action; a critic lacks
            the action, or reads it in its memory; two critics begin with the same parameters and would stay identical;
            or two recurrent modules share state keys.
        MissingKeyError: an entry is missing, or the state of a sequence that begins inside an episode.

    Example:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> from recurl.modules import MLP
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Tanh())
        >>> actor = TensorDictModule(net, ["observation"], ["action"])
        >>> critic = TensorDictModule(MLP(4, 1, depth=1), ["observation", "action"], ["state_action_value"])
        >>> loss = TD3Loss(actor, critic, bounds=(-1.0, 1.0))
        >>> after = TensorDict({"observation": torch.zeros(3, 3), "reward": torch.ones(3, 1)}, [3])
        >>> after["done"] = after["terminated"] = torch.tensor([[False], [False], [True]])
        >>> batch = TensorDict({"observation": torch.zeros(3, 3), "action": torch.zeros(3, 1), "next": after}, [3])
        >>> sorted(key for key, value in loss(batch).items() if value.requires_grad)
        ['loss_actor', 'loss_qvalue']
    """

    target_actor_network: TensorDictModuleBase
    low: Tensor
    high: Tensor

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        qvalue_network: TensorDictModuleBase | Sequence[TensorDictModuleBase],
        *,
        action_spec: TensorSpec | None = None,
        bounds: tuple[float | Tensor, float | Tensor] | None = None,
        num_qvalue_nets: int = 2,
        policy_noise: float = 0.2,
        noise_clip: float = 0.5,
        gamma: float = 0.99,
        n_steps: int = 1,
        loss_function: str = "smooth_l1",
    ) -> None:
        super().__init__(
            actor_network,
            qvalue_network,
            num_qvalue_nets=num_qvalue_nets,
            gamma=gamma,
            n_steps=n_steps,
            loss_function=loss_function,
        )
        for name, value in (("policy_noise", policy_noise), ("noise_clip", noise_clip)):
            if not value >= 0.0:
                raise ArgumentError(f"{name} must not be negative, got {value}.")
        self.policy_noise = policy_noise
        self.noise_clip = noise_clip
        self.updates_actor = True
        for name, value in zip(("low", "high"), _bounds(action_spec, bounds), strict=True):
            self.register_buffer(name, value)
        # Copied together, so that targets share the modules that actor and critics share.
        critics, actor = target_of(nn.ModuleList([self.qvalue_network, actor_network]))
        self.target_qvalue_network = cast(nn.ModuleList, critics)
        self.target_actor_network = cast(TensorDictModuleBase, actor)
        self.actor_trunk()

    @property
    def out_keys(self) -> list[NestedKey]:  # type: ignore[override] # follows the options
        """Names of the losses and metrics."""
        actor = ["loss_actor"] if self.updates_actor else []
        return [*actor, "loss_qvalue", self.tensor_keys.priority, "q_value", "q_target"]

    def network_keys(self) -> dict[str, NestedKey]:
        """Return the key of the action, if the actor's last module writes a single entry under another name."""
        *_, last = modules_in_order(self.actor_network, ignore_global_hooks=True)
        only = len(last.out_keys) == 1 and ACTION not in self.actor_network.out_keys
        return {"action": normalize_key(last.out_keys[0])} if only else {}

    def target_networks(self) -> list[TensorDictModuleBase]:
        """Return the target networks: critics and actor."""
        return [*super().target_networks(), self.target_actor_network]

    def actor_trunk(self) -> SequenceTrunk:
        """Return the actor, all of which runs along sequences."""
        return self._trunk_of(self.actor_network)

    def _trunk_of(self, network: TensorDictModuleBase) -> SequenceTrunk:
        if self.action_key not in set(map(normalize_key, network.out_keys)):
            raise ArgumentError(f"The actor must write {self.action_key!r}, but its out_keys are {network.out_keys}.")
        return SequenceTrunk(modules_in_order(network, ignore_global_hooks=True))

    def losses(self, batch: Step) -> dict[NestedKey, Tensor]:
        """Compute the losses; called in recurrent mode."""
        sequences = Sequences.read(batch, self.tensor_keys)
        trunks, critics = self.unroll_critics(batch, sequences)
        target = self._targets(batch, sequences)
        out = self.critic_losses(batch, sequences, self.values_of(critics, self.actions_taken(batch)), target)
        if self.updates_actor:
            run = self.actor_trunk().unroll(batch, sequences, trunks, detached=True)
            action = run.entries([self.action_key])[self.action_key]
            value = self.values_of(critics[:1], action, frozen=True)[0]
            out["loss_actor"] = -masked_mean(value, sequences.flat_mask)
        return {key: out[key] for key in self.out_keys}

    @torch.no_grad()
    def _targets(self, batch: Step, sequences: Sequences) -> Tensor:
        """Return the targets of the actions taken, ``[N]``."""
        bootstrap, target_batch = BootstrapSteps.of(sequences), self.target_batch(batch)
        trunks, critics = self.unroll_target_critics(batch, sequences, bootstrap)
        run = self._trunk_of(self.target_actor_network).unroll(target_batch, sequences, trunks)
        action = run.entries([self.action_key], bootstrap)[self.action_key]
        noise = (torch.randn_like(action) * self.policy_noise).clamp(-self.noise_clip, self.noise_clip)
        low, high = self.low.to(action.dtype), self.high.to(action.dtype)
        if max(low.ndim, high.ndim) >= action.ndim:
            raise ArgumentError(
                f"TD3Loss needs the bounds of one action, which has shape {list(action.shape[1:])}, got "
                f"{list(torch.broadcast_shapes(low.shape, high.shape))}: action_spec=env.action_spec_unbatched."
            )
        action = (action + noise * (0.5 * (high - low))).clamp(low, high)
        value = self.values_of(critics, action).amin(0)
        return self.targets(sequences, bootstrap, value)


def _bounds(spec: TensorSpec | None, bounds: tuple[float | Tensor, float | Tensor] | None) -> tuple[Tensor, Tensor]:
    """Return the lowest and the highest action."""
    if (spec is None) == (bounds is None):
        raise ArgumentTypeError(f"Give exactly one of action_spec and bounds, got {spec} and {bounds}.")
    if spec is not None and not isinstance(spec, Bounded):
        raise ArgumentError(f"TD3Loss needs actions with bounds, a Bounded spec, got {spec}.")
    given: Any = (spec.low, spec.high) if isinstance(spec, Bounded) else bounds
    low, high = (torch.as_tensor(value) for value in given)
    if not bool((low < high).all() & (high - low).isfinite().all()):
        raise ArgumentError(f"TD3Loss needs two finite bounds, low < high, high - low finite, got {low} and {high}.")
    return low, high

"""Soft actor-critic (SAC) over sequences, for continuous actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from recurl.core.errors import ArgumentError
from recurl.core.keys import NestedKey
from recurl.core.messages import without_arguments
from recurl.objectives.actor_critic import without_torchrl_arguments
from recurl.objectives.common import masked_mean
from recurl.objectives.discrete_sac import DiscreteSACLoss
from recurl.objectives.sequences import Sequences
from recurl.objectives.soft_loss import SoftLoss, Temperature
from recurl.objectives.trunks import BootstrapSteps
from recurl.sequences.entries import Step

__all__ = ["DiscreteSACLoss", "SACLoss"]  # both are here in TorchRL


@without_torchrl_arguments
@without_arguments(
    value_network="leave it out, state values follow from actor and critics",
    delay_value="leave it out, there is no state-value network",
    action_spec="leave it out, the actor's distribution has the bounds",
)
class SACLoss(SoftLoss):
    """Losses of actor, critics and temperature of SAC, for continuous actions, over sequences.

    With the policy ``pi``, ``K`` critics ``Q_k`` and their target networks ``Q'_k``, a new action ``a'`` drawn from
    ``pi`` for every observation, and the true next observation ``o'``, the losses to be summed and minimized are::

        V(o)        = min_k Q'_k(o, a') - alpha log pi(a' | o)
        target      = n-step return of the rewards and V(o') (0 where terminated)
        loss_qvalue = sum_k mean(weight * distance(Q_k(o, action), target))
        loss_actor  = mean(alpha log pi(a' | o) - min_k Q_k(o, a'))
        loss_alpha  = log_alpha * mean(-log pi(a' | o) - target_entropy)

    Source: Haarnoja et al., "Soft actor-critic algorithms and applications" (2018), equations 5, 7 and 17, with
    ``log_alpha`` in place of ``alpha`` in the last, as usual.

    Log-probabilities are those of the action scaled to [-1, 1] (for a :class:`~recurl.modules.TanhNormal`, from its own
    bounds), so the same temperature and target entropy fit any bounds.

    The batch is a set of sequences, ``[T]``, ``[*B, T]`` or flat slices of a replay buffer. All networks run over them
    in recurrent mode, whatever the mode outside, each with its own states. Where a trajectory, slice or row ends, actor
    and target critics take one step with the true next observation from the states that they have just computed. A
    critic's memory reads observations, and the action enters after it. A memory (or any leading modules) shared by the
    actor and a critic is trained by ``loss_qvalue``. ``loss_actor`` detaches its outputs, and sends no gradient to the
    critics.

    Args:
        actor_network: policy that ends with a differentiable sampler, such as
            ``ProbabilisticActor(..., distribution_class=TanhNormal)``.
        qvalue_network: critics, TensorDict modules from observations and action to ``"state_action_value"``,
            ``[*B, T, 1]``. Either a list, each with a separate memory (other state keys) or a shared one; or one critic
            to create ``num_qvalue_nets`` from: they share its memory and have new layers after it, drawn by their
            ``reset_parameters()``.
        num_qvalue_nets: number of critics to create from a single one.
        alpha_init: initial temperature.
        min_alpha: smallest temperature; None for no bound.
        max_alpha: largest temperature; None for no bound.
        fixed_alpha: keep the temperature fixed, without ``loss_alpha``.
        target_entropy: target of the entropy in nats, with the action scaled to [-1, 1]; ``"auto"`` for minus the
            number of components of an action.
        gamma: discount factor per step, in [0, 1].
        n_steps: number of rewards summed before the bootstrap value, at least 1.
        loss_function: distance between values and targets: ``"smooth_l1"``, ``"l1"`` or ``"l2"``.

    Update the target networks ``target_qvalue_network`` with a :class:`SoftUpdate`.

    Reads the inputs of the networks, at the root and (except states and ``"is_init"``) under ``"next"``; the action;
    ``("next", "reward")``, ``("next", "done")``, ``("next", "terminated")``, ``[*B, T, 1]``; and if present
    ``"is_init"``, ``("collector", "traj_ids")``, ``("collector", "traj_steps")``, ``("collector", "mask")`` (False at
    padding) and ``"priority_weight"`` ``[*B, T]``. All are listed in ``in_keys``. If the batch has ``("target", key)``
    for a state ``key`` of a critic, sequences of its target start from this entry. Never writes into the batch.

    Returns a TensorDict with the scalar losses and, without gradients, ``alpha``, ``entropy`` (the mean of
    ``-log pi(a' | o)``), ``td_error``, ``[*B, T, 1]``, the largest ``|target - Q_k|`` of every token (0 at padding),
    and the means ``q_value`` and ``q_target``.

    Raises:
        ArgumentError: an option is out of range; the actor doesn't end with a differentiable sampler of one action; a
            critic lacks the action, or reads it in its memory; two critics begin with the same parameters and would
            stay identical; or two recurrent modules share state keys.
        MissingKeyError: an entry is missing, or the state of a sequence that begins inside an episode.

    Example:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> from torch import nn
        >>> from recurl.modules import MLP, NormalParamExtractor, ProbabilisticActor, TanhNormal
        >>> net = nn.Sequential(nn.Linear(3, 2), NormalParamExtractor())
        >>> actor = ProbabilisticActor(
        ...     TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
        ...     in_keys=["loc", "scale"],
        ...     distribution_class=TanhNormal,
        ... )
        >>> critic = TensorDictModule(MLP(4, 1, depth=1), ["observation", "action"], ["state_action_value"])
        >>> loss = SACLoss(actor, critic)
        >>> ends = torch.tensor([[False], [False], [True]])
        >>> after = TensorDict({"observation": torch.zeros(3, 3), "reward": torch.ones(3, 1)}, [3])
        >>> after["done"] = after["terminated"] = ends
        >>> batch = TensorDict({"observation": torch.zeros(3, 3), "action": torch.zeros(3, 1), "next": after}, [3])
        >>> losses = loss(batch)
        >>> len(loss.qvalue_network), losses["loss_actor"].requires_grad, losses["td_error"].shape
        (2, True, torch.Size([3, 1]))
    """

    def __init__(  # noqa: PLR0913 - the signature is TorchRL's
        self,
        actor_network: TensorDictModuleBase,
        qvalue_network: TensorDictModuleBase | Sequence[TensorDictModuleBase],
        *,
        num_qvalue_nets: int = 2,
        alpha_init: float = 1.0,
        min_alpha: float | None = None,
        max_alpha: float | None = None,
        fixed_alpha: bool = False,
        target_entropy: float | str = "auto",
        gamma: float = 0.99,
        n_steps: int = 1,
        loss_function: str = "smooth_l1",
    ) -> None:
        super().__init__(
            actor_network,
            qvalue_network,
            temperature=Temperature(alpha_init, min_alpha, max_alpha, fixed=fixed_alpha),
            target_entropy=target_entropy,
            num_qvalue_nets=num_qvalue_nets,
            gamma=gamma,
            n_steps=n_steps,
            loss_function=loss_function,
        )

    def losses(self, batch: Step) -> dict[NestedKey, Tensor]:
        """Compute the losses; called in recurrent mode."""
        sequences = Sequences.read(batch, self.tensor_keys)
        bootstrap, count = BootstrapSteps.of(sequences), batch.batch_size.numel()
        alpha, actor = self.temperature(), self.actor()
        trunks, critics = self.unroll_critics(batch, sequences)
        run = actor.trunk.unroll(batch, sequences, trunks, detached=True)
        action, log_prob = _rsample(actor.distribution(run, bootstrap))
        with torch.no_grad():
            value = self.values_of(self.unroll_target_critics(batch, sequences, bootstrap)[1], action.detach()).amin(0)
            target = self.targets(sequences, bootstrap, value - alpha * log_prob.detach())
        out = self.critic_losses(batch, sequences, self.values_of(critics, self.actions_taken(batch)), target)
        action, log_prob, mask = action[:count], log_prob[:count], sequences.flat_mask
        best = self.values_of(critics, action, frozen=True).amin(0)
        out["loss_actor"] = masked_mean(alpha * log_prob - best, mask)
        given = self.target_entropy
        target_entropy = -float(action[0].numel()) if isinstance(given, str) else given
        return self.with_temperature(out, -log_prob.detach(), torch.full_like(alpha, target_entropy), mask)


def _rsample(dist: Any) -> tuple[Tensor, Tensor]:
    """Return actions ``[M, ...]`` with gradients, and their log-probabilities ``[M]`` on the scale [-1, 1]."""
    fused = getattr(dist, "rsample_with_log_prob", None)
    if fused is None and not getattr(dist, "has_rsample", False):
        raise ArgumentError(
            "SACLoss needs differentiable actions, which a "
            f"{type(dist).__name__} doesn't draw: use a TanhNormal, or DiscreteSACLoss for discrete actions."
        )
    if fused is None:
        action = dist.rsample()
        log_prob = dist.log_prob(action)
        return action, log_prob.flatten(1).sum(-1) if log_prob.ndim > 1 else log_prob
    action, log_prob = fused()
    return action, log_prob + getattr(dist, "log_half_range", 0.0)

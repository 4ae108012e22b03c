"""Soft actor-critic (SAC) over sequences, for discrete actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from recurl.core.errors import ArgumentError
from recurl.core.keys import NestedKey
from recurl.core.messages import without_arguments
from recurl.core.specs import split_choices
from recurl.objectives.action_values import ActionValueLoss
from recurl.objectives.actor_critic import UnrolledCritic, without_torchrl_arguments
from recurl.objectives.common import masked_mean
from recurl.objectives.sequences import Sequences
from recurl.objectives.soft_loss import SoftLoss, Temperature
from recurl.objectives.trunks import BootstrapSteps
from recurl.sequences.entries import Step

__all__ = ["DiscreteSACLoss"]


@without_torchrl_arguments
@without_arguments(
    action_space="leave it out, the choices follow from the actor's distribution",
    num_actions="leave it out, the number of choices follows from the actor's distribution",
    delay_value="leave it out, there is no state-value network",
)
class DiscreteSACLoss(SoftLoss):
    """Losses of actor, critics and temperature of SAC, for discrete actions, over sequences.

    The policy ``pi`` gives a probability to every choice ``a``, and a critic ``Q_k`` a value, so expectations need no
    samples. With the target critics ``Q'_k`` and the true next observation ``o'``, the losses to be summed and
    minimized are::

        V(o)        = sum_a pi(a | o) (min_k Q'_k(o, a) - alpha log pi(a | o))
        target      = n-step return of the rewards and V(o') (0 where terminated)
        loss_qvalue = sum_k mean(weight * distance(Q_k(o, action), target))
        loss_actor  = mean(sum_a pi(a | o) (alpha log pi(a | o) - min_k Q_k(o, a)))
        loss_alpha  = log_alpha * mean(entropy of pi - target_entropy)

    Source: Christodoulou, "Soft actor-critic for discrete action settings" (2019), equations 10 to 12.

    An action of several integers has one policy per integer, and values that add up: ``Q(o, a) = sum_i Q_i(o, a_i)``.
    The sums over ``a`` are then sums over the choices of all integers. Choices forbidden by the policy's mask are
    excluded from all sums.

    Sequences, states, ends and shared memories are treated as in :class:`SACLoss`.

    Args:
        actor_network: policy that ends with a sampler of a ``Categorical``, ``OneHotCategorical`` (masked or not), or
            ``IndependentCategorical`` of recurl.
        qvalue_network: critics, TensorDict modules from observations to ``"action_value"``, ``[*B, T, n]``, the values
            of all choices (integers concatenated). Either a list, or one critic to create ``num_qvalue_nets`` from:
            they share its memory and have new layers after it, drawn by their ``reset_parameters()``.
        num_qvalue_nets: number of critics to create from a single one.
        alpha_init: initial temperature.
        min_alpha: smallest temperature; None for no bound.
        max_alpha: largest temperature; None for no bound.
        fixed_alpha: keep the temperature fixed, without ``loss_alpha``.
        target_entropy: target of the entropy in nats; ``"auto"`` for ``target_entropy_weight`` times the entropy of a
            uniform distribution over the allowed choices.
        target_entropy_weight: see ``target_entropy``.
        gamma: discount factor per step, in [0, 1].
        n_steps: number of rewards summed before the bootstrap value, at least 1.
        loss_function: distance between values and targets: ``"smooth_l1"``, ``"l1"`` or ``"l2"``.

    Reads the same entries as :class:`SACLoss`. Actions are integers, ``[*B, T]`` or ``[*B, T, k]``, or one-hot. Returns
    the same entries; ``entropy`` is exact.

    Raises:
        ArgumentError: an option is out of range; the actor doesn't end with such a sampler; there isn't one value for
            each choice; the action has another shape; two critics begin with the same parameters and would stay
            identical; or two recurrent modules share state keys.
        MissingKeyError: an entry is missing, or the state of a sequence that begins inside an episode.

    Example:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> from recurl.modules import Categorical, ProbabilisticActor
        >>> net = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["observation"], out_keys=["logits"])
        >>> actor = ProbabilisticActor(net, in_keys=["logits"], distribution_class=Categorical)
        >>> critic = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["observation"], out_keys=["action_value"])
        >>> loss = DiscreteSACLoss(actor, critic)
        >>> after = TensorDict({"observation": torch.zeros(3, 3), "reward": torch.ones(3, 1)}, [3])
        >>> after["done"] = after["terminated"] = torch.tensor([[False], [False], [True]])
        >>> batch = TensorDict({"observation": torch.zeros(3, 3), "next": after}, [3])
        >>> batch["action"] = torch.zeros(3, dtype=torch.int64)
        >>> sorted(key for key, value in loss(batch).items() if value.requires_grad)
        ['loss_actor', 'loss_alpha', 'loss_qvalue']
    """

    accepted_keys = (*ActionValueLoss.accepted_keys, "action_value")
    reads_action = False

    @property
    def value_key(self) -> NestedKey:
        """Key of the critics' output."""
        return self.tensor_keys.action_value

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
        target_entropy_weight: float = 0.98,
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
        if not 0.0 <= target_entropy_weight <= 1.0:
            raise ArgumentError(f"target_entropy_weight must be in [0, 1], got {target_entropy_weight}.")
        self.target_entropy_weight = target_entropy_weight

    def losses(self, batch: Step) -> dict[NestedKey, Tensor]:
        """Compute the losses; called in recurrent mode."""
        sequences = Sequences.read(batch, self.tensor_keys)
        bootstrap, count = BootstrapSteps.of(sequences), batch.batch_size.numel()
        alpha, actor = self.temperature(), self.actor()
        trunks, critics = self.unroll_critics(batch, sequences)
        run = actor.trunk.unroll(batch, sequences, trunks, detached=True)
        dist = actor.distribution(run, bootstrap)
        log_prob, counts = _choices_of(dist)  # [N + E, k, n]
        allowed = ~torch.isneginf(log_prob)
        log_prob = log_prob.masked_fill(~allowed, 0.0)
        prob = log_prob.exp() * allowed
        values = self._choice_values(critics, counts, allowed[:count])
        with torch.no_grad():
            slow = self._choice_values(self.unroll_target_critics(batch, sequences, bootstrap)[1], counts, allowed)
            value = (prob.detach() * (slow.amin(0) - alpha * log_prob.detach())).sum((-2, -1))
            target = self.targets(sequences, bootstrap, value)
        chosen = _chosen(values, self.actions_taken(batch))
        out = self.critic_losses(batch, sequences, chosen, target)
        log_prob, prob, mask = log_prob[:count], prob[:count], sequences.flat_mask
        best = values.detach().amin(0)
        out["loss_actor"] = masked_mean((prob * (alpha * log_prob - best)).sum((-2, -1)), mask)
        entropy = -(prob * log_prob).detach().sum((-2, -1))
        return self.with_temperature(out, entropy, self._target_entropies(allowed[:count]), mask)

    def _target_entropies(self, allowed: Tensor) -> Tensor:
        """Return the target of the entropy, ``[N]`` or a scalar."""
        if isinstance(self.target_entropy, str):
            choices = allowed.sum(-1).clamp_min(1).to(self.log_alpha.dtype)
            return self.target_entropy_weight * choices.log().sum(-1)
        return torch.full_like(self.log_alpha.detach(), self.target_entropy)

    def _choice_values(self, critics: list[UnrolledCritic], counts: Sequence[int], allowed: Tensor) -> Tensor:
        """Return the critics' values of all choices, ``[K, M, k, n]``; 0 for forbidden ones."""
        values = torch.stack([critic.inputs[self.value_key] for critic in critics])
        if values.shape[-1] != sum(counts):
            raise ArgumentError(
                f"A critic must write one value for each of the {sum(counts)} choices of the action, "
                f"{self.value_key!r} of shape [*B, T, {sum(counts)}], got {values.shape[-1]} values."
            )
        return torch.where(allowed, split_choices(values, counts, 0.0), 0.0)


def _choices_of(dist: Any) -> tuple[Tensor, tuple[int, ...]]:
    """Return the log-probabilities of all choices, ``[M, k, n]``, -inf where forbidden, and the k choice counts."""
    found = getattr(dist, "choice_log_probs", None)
    if found is None:
        raise ArgumentError(
            f"DiscreteSACLoss needs the probabilities of all choices, which a {type(dist).__name__} doesn't provide: "
            "use Categorical, OneHotCategorical or IndependentCategorical of recurl.modules, or SACLoss for continuous "
            "actions."
        )
    return found, dist.choice_counts


def _chosen(values: Tensor, action: Tensor) -> Tensor:
    """Return the values ``[K, N]`` of the actions taken, given those of all choices, ``[K, N, k, n]``."""
    _, tokens, integers, choices = values.shape
    one_hot = integers == 1 and action.shape == (tokens, choices) and choices > 1
    index = action.long().argmax(-1) if one_hot else action
    if index.is_floating_point() or index.numel() != tokens * integers:
        kinds = f"integers [*B, T{'' if integers == 1 else f', {integers}'}]"
        other = f" or one-hot [*B, T, {choices}]" if integers == 1 else ""
        raise ArgumentError(
            f"The action must be {kinds}{other}, got {action.dtype} with {list(action.shape[1:])} each."
        )
    index = index.long().reshape(1, tokens, integers, 1).expand(len(values), -1, -1, -1)
    return values.gather(-1, index).sum((-2, -1))

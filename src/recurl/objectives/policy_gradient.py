"""Base class of policy-gradient losses with an actor and a critic."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from recurl.core.errors import ArgumentError
from recurl.core.keys import IS_INIT, MASK, NestedKey
from recurl.execution.explain import Explanation, reason_of
from recurl.execution.lowering import explain
from recurl.objectives import value as estimators
from recurl.objectives.common import LossModule, check_network, entry, masked_mean, moments, per_token
from recurl.objectives.kinds import ValueEstimators, find_kind, hyperparameters_of
from recurl.objectives.policy import ActorCritic, PolicySampler, check_states, log_prob_and_entropy, sum_events
from recurl.objectives.surrogate import DISTANCES, value_distances
from recurl.objectives.tensor_keys import TensorKeys
from recurl.objectives.value.estimator import ValueEstimator
from recurl.sequences.continuity import check_order, check_starts
from recurl.sequences.entries import Step
from recurl.sequences.mode import set_recurrent_mode

__all__ = ["PolicyEvaluation", "PolicyGradientLoss", "estimated", "explained_variance", "mask_of"]

_ADVICE = (
    "Run the advantage estimator on the whole batch before splitting it into minibatches: batch = GAE(...)(batch). Or "
    "call make_value_estimator() to let the loss estimate advantages for batches that have none."
)
_GAMMA = {"gamma": 0.99}
_LAMBDA = {**_GAMMA, "lmbda": 0.95}
_ESTIMATORS: Mapping[ValueEstimators, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        ValueEstimators.GAE: ("GAE", {**_LAMBDA, "average_gae": False}),
        ValueEstimators.TD0: ("TD0Estimator", {**_GAMMA, "average_rewards": False}),
        ValueEstimators.TD1: ("TD1Estimator", {**_GAMMA, "average_rewards": False}),
        ValueEstimators.TDLambda: ("TDLambdaEstimator", {**_LAMBDA, "average_rewards": False}),
        ValueEstimators.VTrace: ("VTrace", {**_GAMMA, "rho_thresh": 1.0, "c_thresh": 1.0, "average_adv": False}),
    }
)


class PolicyEvaluation(NamedTuple):
    """Outputs of the networks on a batch: log-probability and value, ``[*B, T]`` each, and the mean entropy."""

    log_prob: Tensor
    value: Tensor
    entropy: Tensor


class PolicyGradientLoss(LossModule):
    """Base class of actor-critic losses that learn from advantages and value targets.

    Leading modules shared by both networks run once. If a batch has no advantage, the estimator chosen with
    :meth:`make_value_estimator` computes it on a copy.

    Args:
        actor_network: policy that ends with a sampler, such as ``ProbabilisticActor(..., return_log_prob=True)``.
        critic_network: critic, from observations (and states) to the value.
        entropy_bonus: include ``loss_entropy``.
        entropy_coeff: coefficient of the entropy, a number or a scalar tensor.
        critic_coeff: coefficient of the critic's loss.
        loss_critic_type: distance between values and targets: ``"smooth_l1"``, ``"l1"`` or ``"l2"``.
        clip_value: maximum distance of the value from the stored one; 0 for no clipping.

    Raises:
        ArgumentError: an option is out of range; the actor has no sampler or several log-probabilities; or two
            recurrent modules share state keys.
    """

    accepted_keys: ClassVar[tuple[str, ...]] = (
        "action", "advantage", "done", "reward", "sample_log_prob", "terminated", "value", "value_target",
    )  # fmt: skip

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        critic_network: TensorDictModuleBase,
        *,
        entropy_bonus: bool,
        entropy_coeff: float | Tensor,
        critic_coeff: float,
        loss_critic_type: str,
        clip_value: float,
    ) -> None:
        super().__init__()
        if loss_critic_type not in DISTANCES:
            raise ArgumentError(f"loss_critic_type must be one of {sorted(DISTANCES)}, got {loss_critic_type!r}.")
        if clip_value < 0:
            raise ArgumentError(f"clip_value must be True, False or a positive number, got {clip_value}.")
        check_network("The critic", critic_network, "ValueOperator")
        check_states(actor_network, critic_network)
        self.actor_network = actor_network
        self.critic_network = critic_network
        self.entropy_bonus = entropy_bonus
        self.entropy_coeff = entropy_coeff
        self.critic_coeff = critic_coeff
        self.clip_value = float(clip_value)
        self.metrics: bool | Collection[str] = True
        self._distance = loss_critic_type
        self._estimate: tuple[ValueEstimators, dict[str, Any]] | None = None
        self.plan()

    @property
    def in_keys(self) -> list[NestedKey]:  # type: ignore[override] # follows the networks
        """Keys of all entries that are read from a batch."""
        plan, keys, estimator = self.plan(), self.tensor_keys, self.value_estimator
        read = [*plan.keys, *plan.sampler.keys_of_action(keys.action), keys.advantage, keys.value_target]
        old_value = [keys.value] if self.clip_value else []
        return list(dict.fromkeys([*read, *old_value, MASK, *([] if estimator is None else estimator.in_keys)]))

    def network_keys(self) -> dict[str, NestedKey]:
        """Return the keys of action and log-probability, as the actor names them."""
        return PolicySampler.of(self.actor_network, self).keys

    def make_value_estimator(self, value_type: ValueEstimators | str | None = None, **hyperparameters: Any) -> Self:
        """Choose the estimator for batches without advantages and value targets, and return the loss.

        Convenient where the loss reads whole batches. Minibatches need advantages computed before splitting.

        Args:
            value_type: an estimator, such as ``ValueEstimators.TDLambda`` or ``"tdlambda"``; GAE by default.
            **hyperparameters: arguments of the estimator except its networks: gamma (0.99 by default), lmbda (0.95).

        Raises:
            ArgumentError: there is no such estimator, or a hyperparameter is out of range.
            ArgumentTypeError: the estimator has no such hyperparameter.
        """
        kind = find_kind(ValueEstimators.GAE if value_type is None else value_type, _ESTIMATORS, self)
        self._estimate = kind, hyperparameters_of(kind, hyperparameters, _ESTIMATORS[kind][1])
        _ = self.value_estimator
        return self

    @property
    def value_estimator(self) -> ValueEstimator | None:
        """The estimator for batches without advantages, with the current networks; None if none was chosen."""
        if self._estimate is None:
            return None
        kind, hyperparameters = self._estimate
        create: Any = getattr(estimators, _ESTIMATORS[kind][0])
        actor = {"actor_network": self.actor_network} if kind is ValueEstimators.VTrace else {}
        estimator: ValueEstimator = create(**hyperparameters, **actor, value_network=self.critic_network)
        keys = self.tensor_keys
        shared = set(estimator.accepted_keys) & set(self.accepted_keys)
        estimator.set_keys(**{name: getattr(keys, name) for name in shared})
        return estimator

    def explain(self, batch: Step | None = None) -> Explanation:
        """Explain in which form the networks run.

        Args:
            batch: ``[T]`` or ``[*B, T]``; if given, also for :func:`recurl.execution.compile` of :meth:`gradients`.
        """
        plan = self.plan()
        forms = dict(explain("losses", plan.networks))
        if batch is not None:
            from recurl.objectives.compiled_policy import compiled_plan  # noqa: PLC0415 - imported where it is used

            with set_recurrent_mode(True):
                reason = reason_of(lambda: compiled_plan(plan).prepared(batch, self.keys_of(plan).value))
            forms = {"cpp": reason, **forms}
        return Explanation("losses", forms)

    def wanted(self, metrics: Iterable[str]) -> list[str]:
        """Return those of the names ``metrics`` that are computed: all if the attribute ``metrics`` is True."""
        return [name for name in metrics if self.metrics is True or name in (self.metrics or ())]

    def keys_of(self, plan: ActorCritic) -> TensorKeys:
        """Return the keys of the entries that the loss reads."""
        return self._keys(plan.sampler.keys)

    @property
    def distance(self) -> str:
        """Distance between values and targets: the argument ``loss_critic_type``."""
        return self._distance

    def plan(self) -> ActorCritic:
        """Return the current actor and critic, split into a shared trunk and the rest of each."""
        return ActorCritic.of(self.actor_network, self.critic_network, self)

    def losses(self, batch: Step, plan: ActorCritic | None = None) -> dict[NestedKey, Tensor]:
        """Compute the losses; called in recurrent mode.

        Args:
            batch: ``[T]`` or ``[*B, T]``.
            plan: the networks in another form; by default those of :meth:`plan`.
        """
        plan = self.plan() if plan is None else plan
        keys = self.keys_of(plan)
        if batch.get(IS_INIT, None) is not None:
            check_order(batch)
            check_starts(batch, plan.states)
        return self.losses_of(self._estimated(batch, keys), plan, keys)

    def losses_of(self, batch: Step, plan: ActorCritic, keys: TensorKeys) -> dict[NestedKey, Tensor]:
        """Compute the losses of a batch with advantages, given the current networks and keys."""
        raise NotImplementedError

    def _estimated(self, batch: Step, keys: TensorKeys) -> Step:
        """Return ``batch`` with advantages, if an estimator was chosen."""
        estimator = self.value_estimator
        if estimator is None or batch.get(keys.advantage, None) is not None:
            return batch
        with torch.no_grad():
            results = estimator.results(batch)
        batch = batch.copy()
        for key, result in results.items():
            batch.set(key, result.detach().unsqueeze(-1))
        return batch

    def _evaluate(self, batch: Step, plan: ActorCritic, keys: TensorKeys, mask: Tensor | None) -> PolicyEvaluation:
        """Evaluate the current networks on ``batch``."""
        shape = batch.batch_size
        dist, value = plan(batch, keys.value)
        # The value of a tensor is not read, as that would synchronize with the device.
        grad = self.entropy_bonus and (isinstance(self.entropy_coeff, Tensor) or self.entropy_coeff != 0.0)
        log_prob, entropy = log_prob_and_entropy(dist, plan.sampler.actions(batch, keys.action), entropy_grad=grad)
        return PolicyEvaluation(sum_events(log_prob, shape), value, masked_mean(sum_events(entropy, shape), mask))

    def _score(self, now: PolicyEvaluation, batch: Step, keys: TensorKeys, mask: Tensor | None) -> Tensor:
        """Return the policy-gradient loss: log-probabilities weighted by advantages."""
        return -masked_mean(now.log_prob * estimated(batch, keys.advantage).detach(), mask)

    def _critic_loss(self, now: PolicyEvaluation, batch: Step, keys: TensorKeys, mask: Tensor | None) -> Tensor:
        """Return the weighted distance between values and targets."""
        old_value = estimated(batch, keys.value) if self.clip_value else None
        target = estimated(batch, keys.value_target).detach()
        distance, far = value_distances(self.distance, now.value, target, old_value, self.clip_value)
        return self.critic_coeff * masked_mean(distance if far is None else torch.maximum(distance, far), mask)


def estimated(batch: Step, key: NestedKey) -> Tensor:
    """Return an entry written by an estimator, ``[*B, T]``."""
    return per_token(key, entry(batch, key, _ADVICE), batch.batch_size)


def mask_of(batch: Step) -> Tensor | None:
    """Return the mask of a batch, bool ``[*B, T]``, or None."""
    mask = cast(Tensor | None, batch.get(MASK, None))
    return None if mask is None else per_token(MASK, mask, batch.batch_size)


def explained_variance(value: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
    """Return the fraction of the targets' variance explained by the values; 0 if all targets are equal."""
    (_, total), (_, rest) = moments([target, target - value], mask)
    return torch.where(total > 0, 1.0 - rest / total, 0.0)

"""Proximal policy optimisation (PPO)."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase
from torch import Tensor
from torch import distributions as d

from recurl.continuity import check_order, check_starts
from recurl.errors import ArgumentError, UsageError
from recurl.keys import (
    ADVANTAGE,
    IS_INIT,
    MASK,
    STATE_VALUE,
    TRAJ_IDS,
    TRAJ_STEPS,
    VALUE_TARGET,
    NestedKey,
    normalize_key,
)
from recurl.lowering import Network, Step, distribution_of, inputs_of, modules_in_order, shared_state, why_not_lowered
from recurl.objectives.common import (
    LossModule,
    common_prefix,
    entry,
    masked_mean,
    per_token,
    standardized,
    states_of,
)
from recurl.objectives.surrogate import DISTANCES, Data, Surrogate

__all__ = ["ClipPPOLoss"]

_RUN_GAE = "Run the advantage estimator on the whole batch before cutting it into minibatches: batch = GAE(...)(batch)."


class _Plan(NamedTuple):
    """Parts of the actor and the critic, as they run in one call."""

    trunk: Network
    """Modules at the beginning of both, run once."""
    actor: Network
    critic: Network
    sampler: TensorDictModuleBase
    action_keys: list[NestedKey]
    """The action, or each of its parts."""
    log_prob_key: NestedKey
    keys: list[NestedKey]
    """Entries that the networks read."""
    states: list[NestedKey]

    @property
    def networks(self) -> tuple[Network, Network, Network]:
        """All networks, in the order in which they run."""
        return self.trunk, self.actor, self.critic


class ClipPPOLoss(LossModule):
    """Clipped surrogate objective, value loss and entropy bonus.

    Source: Schulman et al., "Proximal policy optimization algorithms" (2017), equations 7 and 9.
    With ``ratio = exp(log_prob - stored log_prob)``, the losses to be summed and minimised are::

        loss_objective = -mean(min(ratio * A, clip(ratio, 1 - clip_epsilon, 1 + clip_epsilon) * A))
        loss_critic    = critic_coeff * mean(distance(V, value_target))
        loss_entropy   = -entropy_coeff * mean(entropy)

    Means are over the valid tokens of the batch: all, or those where ``("collector", "mask")`` is true. The batch is a
    set of sequences, ``[T]``, ``[*B, T]`` or flat slices from ``SequenceMinibatches``; the networks run in recurrent
    mode, whatever the mode outside, and modules at the beginning of both networks run once.

    Args:
        actor_network: policy that ends with a sampler, such as ``ProbabilisticActor(..., return_log_prob=True)``.
        critic_network: critic, from observations (and states) to ``"state_value"``.
        clip_epsilon: maximum distance of the ratio from 1, in (0, 1); a tensor may change between calls, also in a CUDA
            graph.
        entropy_bonus: include ``loss_entropy``.
        entropy_coeff: coefficient of the entropy; may be assigned between updates. A scalar tensor on the device may be
            overwritten between the replays of a CUDA graph.
        critic_coeff: coefficient of ``loss_critic``.
        loss_critic_type: distance of values and targets: ``"smooth_l1"``, ``"l1"`` or ``"l2"``.
        normalize_advantage: shift and scale the advantage to mean 0 and standard deviation 1 in each minibatch; a value
            that isn't finite makes all of them NaN.
        clip_value: maximum distance of the value from the stored ``"state_value"``, or True for ``clip_epsilon``; the
            larger of the losses of the clipped and the unclipped value counts. No clipping if False.

    Reads the inputs of the networks, the action, its stored log-probability ``"action_log_prob"`` ``[*B, T]``,
    ``"advantage"`` and ``"value_target"`` ``[*B, T, 1]``, with ``clip_value`` also ``"state_value"``, and where present
    ``("collector", "traj_ids")``, ``("collector", "traj_steps")`` and ``("collector", "mask")``: all listed in
    ``in_keys``. Never writes into the batch.

    Returns a TensorDict of scalars: the three losses, and without gradients ``entropy`` (nats), ``kl_approx`` (mean of
    ``ratio - 1 - log ratio``, the low-variance estimate of KL(stored || current) of Schulman, "Approximating KL
    divergence", 2020), ``clip_fraction``, ``ESS`` (Kish's effective sample size of the ratios, divided by the number of
    tokens), ``max_ratio``, ``mean_ratio``, and the ``explained_variance`` of the targets by the values (0 if all
    targets are equal). If the attribute ``metrics`` is False, only the losses are computed and returned.

    Raises:
        ArgumentError: an option is out of range; the actor has no sampler or several log-probabilities; or two
            recurrent modules share state keys.
        MissingKeyError: an entry is missing, or a state of sequences that begin inside an episode.
        UsageError: the stored log-probability requires gradients.

    Example:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import ProbabilisticTensorDictModule as Sampler
        >>> from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
        >>> from torch.distributions import Categorical
        >>> net = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["observation"], out_keys=["logits"])
        >>> head = Sampler(["logits"], ["action"], distribution_class=Categorical)
        >>> actor = ProbabilisticTensorDictSequential(net, head)
        >>> critic = TensorDictModule(torch.nn.Linear(3, 1), in_keys=["observation"], out_keys=["state_value"])
        >>> batch = TensorDict({"observation": torch.zeros(5, 3), "action": torch.zeros(5, dtype=torch.int64)}, [5])
        >>> batch["action_log_prob"] = actor.get_dist(batch).log_prob(batch["action"]).detach()
        >>> batch["advantage"] = batch["value_target"] = torch.ones(5, 1)
        >>> losses = ClipPPOLoss(actor, critic)(batch)
        >>> losses["loss_objective"].item(), losses["clip_fraction"].item()
        (-1.0, 0.0)
    """

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        critic_network: TensorDictModuleBase,
        *,
        clip_epsilon: float | Tensor = 0.2,
        entropy_bonus: bool = True,
        entropy_coeff: float | Tensor = 0.01,
        critic_coeff: float = 1.0,
        loss_critic_type: str = "smooth_l1",
        normalize_advantage: bool = False,
        clip_value: bool | float = False,
    ) -> None:
        super().__init__()
        if not isinstance(clip_epsilon, Tensor) and not 0.0 < clip_epsilon < 1.0:
            raise ArgumentError(f"clip_epsilon must be in (0, 1), got {clip_epsilon}.")
        if loss_critic_type not in DISTANCES:
            raise ArgumentError(f"loss_critic_type must be one of {sorted(DISTANCES)}, got {loss_critic_type!r}.")
        if clip_value < 0:
            raise ArgumentError(f"clip_value must be True, False or a positive number, got {clip_value}.")
        _check_states(actor_network, critic_network)
        self.actor_network = actor_network
        self.critic_network = critic_network
        self.clip_epsilon = clip_epsilon
        self.entropy_bonus = entropy_bonus
        self.entropy_coeff = entropy_coeff
        self.critic_coeff = critic_coeff
        self.normalize_advantage = normalize_advantage
        self.clip_value = float(clip_epsilon if clip_value is True else clip_value)
        self.metrics = True
        self._distance = loss_critic_type
        self._plan()

    @property
    def in_keys(self) -> list[NestedKey]:  # type: ignore[override] # follows the networks
        """Keys of all entries that are read from a batch."""
        plan = self._plan()
        old_value = [STATE_VALUE] if self.clip_value else []
        return [*plan.keys, *plan.action_keys, plan.log_prob_key, ADVANTAGE, VALUE_TARGET, *old_value, MASK]

    @property
    def out_keys(self) -> list[str]:  # type: ignore[override] # follows the options
        """Names of the losses and metrics."""
        metrics = ("entropy", "kl_approx", "clip_fraction", "ESS", "max_ratio", "mean_ratio", "explained_variance")
        entropy = ["loss_entropy"] if self.entropy_bonus else []
        return ["loss_objective", "loss_critic", *entropy, *(metrics if self.metrics else ())]

    def _plan(self) -> _Plan:
        """Return the parts of the networks as they are now."""
        *actor, sampler = _parts(self.actor_network)
        critic = modules_in_order(self.critic_network)
        shared = common_prefix(actor, critic)
        networks = (self.actor_network, self.critic_network)
        if set(states_of(*actor[shared:], sampler)) & set(states_of(*critic[shared:])):
            _check_states(*networks)
        return _Plan(
            Network(actor[:shared]),
            Network(actor[shared:]),
            Network(critic[shared:]),
            sampler,
            *_keys_of(sampler),
            list(
                dict.fromkeys(
                    normalize_key(k) for k in (*(k for n in networks for k in n.in_keys), TRAJ_IDS, TRAJ_STEPS)
                )
            ),
            list(dict.fromkeys(key for network in networks for key in states_of(network))),
        )

    def why_not_lowered(self) -> str | None:
        """Return the reason why the networks need TensorDicts, or None if they are lowered."""
        return why_not_lowered(self._plan().networks)

    def losses(self, batch: Step) -> dict[NestedKey, Tensor]:
        """Compute the losses; called in recurrent mode."""
        plan = self._plan()
        if batch.get(IS_INIT, None) is not None:
            check_order(batch)
            check_starts(batch, plan.states)
        data = self._read(batch, plan)
        dist, value = _run(batch, plan)
        shape = batch.batch_size
        surrogate = Surrogate(self.clip_epsilon, self.clip_value, self._distance)
        actions = [entry(batch, key, "The actor writes it during collection.") for key in plan.action_keys]
        log_prob, entropy = self._log_prob_and_entropy(dist, actions)
        terms = surrogate(_sum_events(log_prob, shape), value, data)
        out = {"loss_objective": -terms.gain, "loss_critic": self.critic_coeff * terms.distance}
        entropy = masked_mean(_sum_events(entropy, shape), data.mask)
        if self.entropy_bonus:
            out["loss_entropy"] = -self.entropy_coeff * entropy
        if not self.metrics:
            return out
        out["entropy"] = entropy.detach()
        out |= self._ratio_metrics(terms.log_ratio, terms.ratio, data.mask)
        out["explained_variance"] = _explained_variance(value.detach(), data.target, data.mask)
        return {key: out[key] for key in self.out_keys}

    def _read(self, batch: Step, plan: _Plan) -> Data:
        shape = batch.batch_size
        log_prob = entry(
            batch, plan.log_prob_key, "Build the actor with return_log_prob=True, so that collection stores it."
        )
        if log_prob.requires_grad:
            raise UsageError(
                f"The stored {plan.log_prob_key!r} must not require gradients: collect under torch.no_grad(), or "
                "detach it."
            )
        old_value = entry(batch, STATE_VALUE, _RUN_GAE) if self.clip_value else None
        mask = cast(Tensor | None, batch.get(MASK, None))
        data = Data(
            _sum_events(log_prob, shape),
            per_token(ADVANTAGE, entry(batch, ADVANTAGE, _RUN_GAE), shape),
            per_token(VALUE_TARGET, entry(batch, VALUE_TARGET, _RUN_GAE), shape),
            None if old_value is None else per_token(STATE_VALUE, old_value, shape),
            None if mask is None else per_token(MASK, mask, shape),
        )
        if self.normalize_advantage:
            return data._replace(advantage=standardized(data.advantage, data.mask))
        return data

    def _log_prob_and_entropy(self, dist: d.Distribution, actions: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the log-probability of an action and the entropy, without gradients if its coefficient is 0."""
        # The value of a tensor is not read, which would synchronise with the device.
        counts = self.entropy_bonus and (isinstance(self.entropy_coeff, Tensor) or self.entropy_coeff != 0.0)
        together = getattr(dist, "log_prob_and_entropy", None)
        if together is not None:
            log_prob, entropy = together(*actions)
            return log_prob, entropy if counts else entropy.detach()
        with torch.set_grad_enabled(counts and torch.is_grad_enabled()):
            entropy = dist.entropy()
        return cast(Any, dist).log_prob(*actions), entropy

    def _ratio_metrics(self, log_ratio: Tensor, ratio: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        outside = (ratio - 1.0).abs() > self.clip_epsilon
        mean, mean_square = masked_mean(ratio, mask), masked_mean(ratio.square(), mask)
        return {
            "kl_approx": masked_mean(ratio - 1.0 - log_ratio, mask),
            "clip_fraction": masked_mean(outside.to(ratio.dtype), mask),
            "ESS": mean.square() / mean_square,
            "max_ratio": (ratio if mask is None else torch.where(mask, ratio, 0.0)).max(),
            "mean_ratio": mean,
        }


def _run(batch: Step, plan: _Plan) -> tuple[d.Distribution, Tensor]:
    """Return the current action distribution, and the current values ``[*B, T]``."""
    run = plan.trunk(inputs_of(batch, plan.keys, plan.networks))
    branch = plan.critic(run.copy() if plan.critic.modules else run)
    value = per_token(STATE_VALUE, entry(branch, STATE_VALUE, "The critic must write it."), batch.batch_size)
    return distribution_of(plan.sampler, plan.actor(run)), value


def _parts(actor: TensorDictModuleBase) -> list[TensorDictModuleBase]:
    """Return the modules of an actor, in order; the actor itself if it overrides ``get_dist``."""
    own = isinstance(actor, ProbabilisticTensorDictSequential) and (
        "get_dist" in vars(actor) or type(actor).get_dist is not ProbabilisticTensorDictSequential.get_dist
    )
    return [actor] if own else modules_in_order(actor)


def _keys_of(sampler: TensorDictModuleBase) -> tuple[list[NestedKey], NestedKey]:
    """Return the keys of the action, or of its parts, and the key of its log-probability."""
    actions = getattr(sampler, "dist_sample_keys", None)
    log_probs = getattr(sampler, "log_prob_keys", ())
    if actions is None or len(log_probs) != 1:
        given = f"is a {type(sampler).__name__}" if actions is None else f"samples {actions}"
        raise ArgumentError(
            "PPO needs action probabilities, so the actor must end with a sampler of one action, as "
            "ProbabilisticActor(module, ..., distribution_class=..., return_log_prob=True) does; the last module "
            f"of this one {given}."
        )
    return [normalize_key(key) for key in actions], normalize_key(log_probs[0])


def _check_states(actor: TensorDictModuleBase, critic: TensorDictModuleBase) -> None:
    shared = shared_state([*actor.modules(), *critic.modules()])
    if shared is not None:
        raise ArgumentError(
            f"Actor and critic must not share state keys, but each has a recurrent module with the state {shared!r}, "
            "so one would start from the states of the other. Share the module (ActorValueOperator), or give one other "
            "keys, in_keys=[value, 'its_state', ...] and out_keys=[features, ('next', 'its_state'), ...]."
        )


def _sum_events(values: Tensor, batch_shape: torch.Size) -> Tensor:
    """Sum values of a distribution, ``[*B, T, ...]``, over the components of an action, to ``[*B, T]``."""
    extra = values.ndim - len(batch_shape)
    return values.sum(tuple(range(-extra, 0))) if extra > 0 else values


def _explained_variance(value: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
    def variance(x: Tensor) -> Tensor:
        if mask is None:
            return x.var(correction=0)
        return masked_mean((x - masked_mean(x, mask)).square(), mask)

    total = variance(target)
    return torch.where(total > 0, 1.0 - variance(target - value) / total, 0.0)

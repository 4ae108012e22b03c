"""Proximal policy optimization (PPO)."""

from __future__ import annotations

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from recurl.core.errors import ArgumentError, UsageError
from recurl.core.keys import NestedKey
from recurl.objectives.common import entry, masked_mean, standardized
from recurl.objectives.policy import ActorCritic, sum_events
from recurl.objectives.policy_gradient import PolicyGradientLoss, estimated, explained_variance, mask_of
from recurl.objectives.surrogate import Surrogate, SurrogateInputs
from recurl.objectives.tensor_keys import TensorKeys
from recurl.sequences.entries import Step

__all__ = ["ClipPPOLoss"]


class ClipPPOLoss(PolicyGradientLoss):
    """Clipped surrogate objective, value loss and entropy bonus.

    Source: Schulman et al., "Proximal policy optimization algorithms" (2017), equations 7 and 9.
    With ``ratio = exp(log_prob - stored log_prob)``, the losses to be summed and minimized are::

        loss_objective = -mean(min(ratio * A, clip(ratio, 1 - clip_epsilon, 1 + clip_epsilon) * A))
        loss_critic    = critic_coeff * mean(distance(V, value_target))
        loss_entropy   = -entropy_coeff * mean(entropy)

    Means are over the valid tokens of the batch: all, or those where ``("collector", "mask")`` is true. The batch is a
    set of sequences, ``[T]``, ``[*B, T]`` or flat slices from ``SequenceMinibatches``. The networks run in recurrent
    mode, whatever the mode outside, and leading modules shared by both run once.

    Args:
        actor_network: policy that ends with a sampler, such as ``ProbabilisticActor(..., return_log_prob=True)``.
        critic_network: critic, from observations (and states) to ``"state_value"``.
        clip_epsilon: maximum distance of the ratio from 1, in (0, 1). A tensor may change between calls, even inside a
            CUDA graph.
        entropy_bonus: include ``loss_entropy``.
        entropy_coeff: coefficient of the entropy; may be reassigned between updates. A scalar tensor on the device may
            be overwritten between replays of a CUDA graph.
        critic_coeff: coefficient of ``loss_critic``.
        loss_critic_type: distance between values and targets: ``"smooth_l1"``, ``"l1"`` or ``"l2"``.
        normalize_advantage: standardize the advantage to mean 0 and standard deviation 1 in each minibatch. A single
            non-finite value makes all of them NaN.
        clip_value: maximum distance of the value from the stored ``"state_value"``, or True for ``clip_epsilon``. The
            larger of the clipped and the unclipped loss is used. False disables clipping.

    Reads the inputs of the networks, the action, its stored log-probability ``"action_log_prob"`` ``[*B, T]``,
    ``"advantage"`` and ``"value_target"`` ``[*B, T, 1]``, with ``clip_value`` also ``"state_value"``, and if present
    ``("collector", "traj_ids")``, ``("collector", "traj_steps")`` and ``("collector", "mask")``. All are listed in
    ``in_keys``. Never writes into the batch.

    Returns a TensorDict of scalars: the three losses and, without gradients, ``entropy`` (nats), ``kl_approx`` (mean of
    ``ratio - 1 - log ratio``, the low-variance estimate of KL(stored || current) of Schulman, "Approximating KL
    divergence", 2020), ``clip_fraction``, ``ESS`` (Kish's effective sample size of the ratios, divided by the number of
    tokens), ``max_ratio``, ``mean_ratio``, and the ``explained_variance`` of the targets by the values (0 if all
    targets are equal). The attribute ``metrics`` selects the metrics that are computed: all
    if it is True, none if False, or those that it names.

    Raises:
        ArgumentError: an option is out of range; the actor has no sampler or several log-probabilities; or two
            recurrent modules share state keys.
        MissingKeyError: an entry is missing, or the state of a sequence that begins inside an episode.
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
        if not isinstance(clip_epsilon, Tensor) and not 0.0 < clip_epsilon < 1.0:
            raise ArgumentError(f"clip_epsilon must be in (0, 1), got {clip_epsilon}.")
        super().__init__(
            actor_network,
            critic_network,
            entropy_bonus=entropy_bonus,
            entropy_coeff=entropy_coeff,
            critic_coeff=critic_coeff,
            loss_critic_type=loss_critic_type,
            clip_value=float(clip_epsilon if clip_value is True else clip_value),
        )
        self.clip_epsilon = clip_epsilon
        self.normalize_advantage = normalize_advantage

    @property
    def in_keys(self) -> list[NestedKey]:  # type: ignore[override] # follows the networks
        """Keys of all entries that are read from a batch."""
        return [*super().in_keys, self.tensor_keys.sample_log_prob]

    @property
    def out_keys(self) -> list[str]:  # type: ignore[override] # follows the options
        """Names of the losses and metrics."""
        metrics = ("entropy", "kl_approx", "clip_fraction", "ESS", "max_ratio", "mean_ratio", "explained_variance")
        entropy = ["loss_entropy"] if self.entropy_bonus else []
        return ["loss_objective", "loss_critic", *entropy, *self.wanted(metrics)]

    def losses_of(self, batch: Step, plan: ActorCritic, keys: TensorKeys) -> dict[NestedKey, Tensor]:
        """Compute the losses; see :class:`PolicyGradientLoss`."""
        data = self.read(batch, keys, normalize=self.normalize_advantage)
        now = self._evaluate(batch, plan, keys, data.mask)
        terms = Surrogate(self.clip_epsilon, self.clip_value, self.distance)(now.log_prob, now.value, data)
        out: dict[NestedKey, Tensor] = {
            "loss_objective": -terms.gain,
            "loss_critic": self.critic_coeff * terms.distance,
        }
        if self.entropy_bonus:
            out["loss_entropy"] = -self.entropy_coeff * now.entropy
        if not self.metrics:
            return out
        metrics = {
            "entropy": now.entropy.detach(),
            **self._ratio_metrics(terms.log_ratio, terms.ratio, data.mask),
            "explained_variance": explained_variance(now.value.detach(), data.target, data.mask),
        }
        return out | {name: metrics[name] for name in self.wanted(metrics)}

    def read(self, batch: Step, keys: TensorKeys, *, normalize: bool) -> SurrogateInputs:
        """Return the inputs of the losses, with advantages unchanged or normalized."""
        log_prob = entry(
            batch, keys.sample_log_prob, "Build the actor with return_log_prob=True, so that collection stores it."
        )
        if log_prob.requires_grad:
            raise UsageError(
                f"The stored {keys.sample_log_prob!r} must not require gradients: collect under torch.no_grad(), or "
                "detach it."
            )
        data = SurrogateInputs(
            sum_events(log_prob, batch.batch_size),
            estimated(batch, keys.advantage),
            estimated(batch, keys.value_target),
            estimated(batch, keys.value) if self.clip_value else None,
            mask_of(batch),
        )
        if normalize:
            return data._replace(advantage=standardized(data.advantage, data.mask))
        return data

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

"""Advantage actor-critic (A2C)."""

from __future__ import annotations

from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from recurl.core.keys import NestedKey
from recurl.core.messages import without_arguments
from recurl.objectives.policy import ActorCritic
from recurl.objectives.policy_gradient import PolicyGradientLoss, estimated, explained_variance, mask_of
from recurl.objectives.tensor_keys import TensorKeys
from recurl.sequences.entries import Step

__all__ = ["A2CLoss"]


@without_arguments(
    gamma="give it to the estimator, make_value_estimator(gamma=...)",
    advantage_key="write set_keys(advantage=...)",
    value_target_key="write set_keys(value_target=...)",
    separate_losses="leave it out, pass a critic that shares no modules to separate them",
    samples_mc_entropy="leave it out, entropies are exact or by quadrature",
    functional="leave it out, networks are called as they are",
    reduction="leave it out, losses are means",
    entropy_coef="write entropy_coeff",
    critic_coef="write critic_coeff",
)
class A2CLoss(PolicyGradientLoss):
    """Policy gradient with advantages, value loss and entropy bonus.

    Source: Mnih et al., "Asynchronous methods for deep reinforcement learning" (2016), algorithm S3. The losses to be
    summed and minimized are::

        loss_objective = -mean(log_prob * A)
        loss_critic    = critic_coeff * mean(distance(V, value_target))
        loss_entropy   = -entropy_coeff * mean(entropy)

    With advantages from :class:`~recurl.objectives.value.VTrace`, which include the importance weights of off-policy
    actions, this is the loss of IMPALA (Espeholt et al., 2018). With advantages from ``GAE`` or TD estimators, the
    batch must be on-policy.

    Means are over the valid tokens of the batch: all, or those where ``("collector", "mask")`` is true. The batch is a
    set of sequences, ``[T]``, ``[*B, T]`` or flat slices from ``SequenceMinibatches``. The networks run in recurrent
    mode, whatever the mode outside, and leading modules shared by both run once.

    Args:
        actor_network: policy that ends with a sampler, such as ``ProbabilisticActor(..., return_log_prob=True)``.
        critic_network: critic, from observations (and states) to ``"state_value"``.
        entropy_bonus: include ``loss_entropy``.
        entropy_coeff: coefficient of the entropy; may be reassigned between updates. A scalar tensor on the device may
            be overwritten between replays of a CUDA graph.
        critic_coeff: coefficient of ``loss_critic``.
        loss_critic_type: distance between values and targets: ``"smooth_l1"``, ``"l1"`` or ``"l2"``.
        clip_value: maximum distance of the value from the stored ``"state_value"``. The larger of the clipped and the
            unclipped loss is used. 0 disables clipping.

    Reads the inputs of the networks, the action, ``"advantage"`` and ``"value_target"`` ``[*B, T, 1]``, with
    ``clip_value`` also ``"state_value"``, and if present ``("collector", "traj_ids")``, ``("collector",
    "traj_steps")`` and ``("collector", "mask")``. All are listed in ``in_keys``. Never writes into the batch.

    Returns a TensorDict of scalars: the three losses and, without gradients, ``entropy`` (nats) and the
    ``explained_variance`` of the targets by the values (0 if all targets are equal). If the attribute ``metrics`` is
    False, only the losses are computed and returned.

    Raises:
        ArgumentError: an option is out of range; the actor has no sampler or several log-probabilities; or two
            recurrent modules share state keys.
        MissingKeyError: an entry is missing, or the state of a sequence that begins inside an episode.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import ProbabilisticTensorDictModule as Sampler
        >>> from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
        >>> from torch.distributions import Categorical
        >>> net = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["observation"], out_keys=["logits"])
        >>> head = Sampler(["logits"], ["action"], distribution_class=Categorical, return_log_prob=True)
        >>> actor = ProbabilisticTensorDictSequential(net, head)
        >>> critic = TensorDictModule(torch.nn.Linear(3, 1), in_keys=["observation"], out_keys=["state_value"])
        >>> batch = TensorDict({"observation": torch.zeros(5, 3), "action": torch.zeros(5, dtype=torch.int64)}, [5])
        >>> batch["advantage"] = batch["value_target"] = torch.ones(5, 1)
        >>> loss = A2CLoss(actor, critic)(batch)["loss_objective"]
        >>> torch.equal(loss, -actor.get_dist(batch).log_prob(batch["action"]).mean())
        True
    """

    def __init__(
        self,
        actor_network: TensorDictModuleBase,
        critic_network: TensorDictModuleBase,
        *,
        entropy_bonus: bool = True,
        entropy_coeff: float | Tensor = 0.01,
        critic_coeff: float = 1.0,
        loss_critic_type: str = "smooth_l1",
        clip_value: float = 0.0,
    ) -> None:
        super().__init__(
            actor_network,
            critic_network,
            entropy_bonus=entropy_bonus,
            entropy_coeff=entropy_coeff,
            critic_coeff=critic_coeff,
            loss_critic_type=loss_critic_type,
            clip_value=clip_value,
        )

    @property
    def out_keys(self) -> list[str]:  # type: ignore[override] # follows the options
        """Names of the losses and metrics."""
        entropy = ["loss_entropy"] if self.entropy_bonus else []
        return ["loss_objective", "loss_critic", *entropy, *self.wanted(("entropy", "explained_variance"))]

    def losses_of(self, batch: Step, plan: ActorCritic, keys: TensorKeys) -> dict[NestedKey, Tensor]:
        """Compute the losses; see :class:`PolicyGradientLoss`."""
        mask = mask_of(batch)
        now = self._evaluate(batch, plan, keys, mask)
        out: dict[NestedKey, Tensor] = {
            "loss_objective": self._score(now, batch, keys, mask),
            "loss_critic": self._critic_loss(now, batch, keys, mask),
        }
        if self.entropy_bonus:
            out["loss_entropy"] = -self.entropy_coeff * now.entropy
        if not self.metrics:
            return out
        target = estimated(batch, keys.value_target).detach()
        explained = explained_variance(now.value.detach(), target, mask)
        metrics = {"entropy": now.entropy.detach(), "explained_variance": explained}
        return out | {name: metrics[name] for name in self.wanted(metrics)}

"""V-trace: off-policy value targets and advantages."""

from __future__ import annotations

from typing import Any, cast

from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from recurl.core.errors import ArgumentError
from recurl.core.keys import NestedKey
from recurl.execution.lowering import Network
from recurl.objectives.common import entry
from recurl.objectives.policy import ActorCritic, PolicySampler, sum_events
from recurl.objectives.sequences import Sequences, inputs_in_sequence
from recurl.objectives.value.estimator import ValueEstimator, Values, check_fractions, without_torchrl_arguments
from recurl.sequences.continuity import check_starts
from recurl.sequences.entries import Step
from recurl.sequences.mode import set_recurrent_mode
from recurl.sequences.returns import truncated_weight, vtrace_advantage_estimate

__all__ = ["VTrace"]


@without_torchrl_arguments
class VTrace(ValueEstimator):
    """V-trace: value targets and advantages of the current policy, from off-policy actions.

    Source: Espeholt et al., "IMPALA: scalable distributed deep-RL with importance weighted actor-learner architectures"
    (2018), section 4; see :func:`~recurl.sequences.returns.vtrace_advantage_estimate` for the formula.

    One pass of actor and critic over the batch, in recurrent mode, computes log-probabilities and V with the current
    weights; leading modules shared by both run once. The values at the ends of sequences are computed as in
    :class:`GAE`, from states just computed. For on-policy actions and thresholds of at least 1, the target is the
    return to the end of the sequence, as with :class:`TD1Estimator`.

    Args:
        gamma: discount factor per step, in [0, 1].
        actor_network: policy that ends with a sampler, such as ``ProbabilisticActor(..., return_log_prob=True)``.
        value_network: critic; see :class:`GAE`.
        rho_thresh: largest importance weight of a temporal difference and an advantage; inf for no bound.
        c_thresh: largest importance weight of the trace; inf for no bound.
        average_adv: standardize the advantage to mean 0 and standard deviation 1 over the batch.
        differentiable: let gradients flow from the results into actor and critic.
        weight_advantage: multiply the advantage by the importance weight, as the gradient of ``A2CLoss`` requires. Set
            to False if the loss itself weights by the ratio, as ``ClipPPOLoss`` does (APPO).

    Reads a batch ``[T]`` or ``[*B, T]`` as :class:`GAE` does, and in addition the inputs of the actor, the action, and
    its stored log-probability ``"action_log_prob"``.

    Writes the entries of :class:`GAE`, and ``"importance_weight"``, ``[*B, T, 1]``: the current probability of the
    action divided by the stored one (1 at padding).

    Raises:
        ArgumentError: gamma is not in [0, 1], or a threshold not positive; the actor has no sampler; two recurrent
            modules share state keys; or see :class:`GAE`.
        MissingKeyError: an entry is missing; see :class:`GAE`.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import ProbabilisticTensorDictModule as Sampler
        >>> from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
        >>> from torch.distributions import Categorical
        >>> net = TensorDictModule(torch.nn.Linear(1, 2), in_keys=["observation"], out_keys=["logits"])
        >>> head = Sampler(["logits"], ["action"], distribution_class=Categorical, return_log_prob=True)
        >>> actor = ProbabilisticTensorDictSequential(net, head)
        >>> critic = TensorDictModule(torch.nn.Linear(1, 1), in_keys=["observation"], out_keys=["state_value"])
        >>> ends = torch.tensor([[False], [False], [True]])
        >>> batch = actor(TensorDict({"observation": torch.zeros(3, 1)}, [3]))
        >>> batch["next"] = TensorDict(
        ...     {"observation": torch.zeros(3, 1), "reward": torch.ones(3, 1), "done": ends, "terminated": ends}, [3]
        ... )
        >>> VTrace(0.5, actor, critic)(batch)["value_target"].squeeze(-1)
        tensor([1.7500, 1.5000, 1.0000])
    """

    accepted_keys = (*ValueEstimator.accepted_keys, "action", "importance_weight", "sample_log_prob")

    def __init__(
        self,
        gamma: float,
        actor_network: TensorDictModuleBase,
        value_network: TensorDictModuleBase | None,
        rho_thresh: float = 1.0,
        c_thresh: float = 1.0,
        average_adv: bool = False,
        differentiable: bool = False,
        weight_advantage: bool = True,
    ) -> None:
        check_fractions(gamma=gamma)
        for name, value in (("rho_thresh", rho_thresh), ("c_thresh", c_thresh)):
            if not value > 0.0:
                raise ArgumentError(f"{name} must be positive, got {value}.")
        super().__init__(value_network, differentiable=differentiable, average=average_adv)
        self.actor_network = actor_network
        self.gamma = gamma
        self.rho_thresh = rho_thresh
        self.c_thresh = c_thresh
        self.weight_advantage = weight_advantage
        self._plan()

    @property
    def in_keys(self) -> list[NestedKey]:  # type: ignore[override] # follows the networks
        """Keys of all entries that are read from a batch."""
        plan, keys = self._plan(), self.tensor_keys
        own = [*plan.keys, *plan.sampler.keys_of_action(keys.action), keys.sample_log_prob]
        return list(dict.fromkeys([*super().in_keys, *own]))

    @property
    def out_keys(self) -> list[NestedKey]:  # type: ignore[override] # follows set_keys
        """Keys of advantage, value target, value, next value and importance weight."""
        return [*super().out_keys, self.tensor_keys.importance_weight]

    def network_keys(self) -> dict[str, NestedKey]:
        """Return the keys of action and log-probability, as the actor names them."""
        return PolicySampler.of(self.actor_network, self).keys

    def _networks(self) -> list[Network]:
        return [*self._plan().networks, *super()._networks()]

    def estimate(self, values: Values) -> tuple[Tensor, ...]:
        """Compute advantages, value targets and importance weights; see :class:`ValueEstimator`."""
        sequences, log_ratio = values.sequences, cast(Tensor, values.log_ratio)
        advantage, target = vtrace_advantage_estimate(
            self.gamma,
            log_ratio,
            values.value,
            values.next_value,
            sequences.reward,
            sequences.terminated,
            sequences.ends,
            self.rho_thresh,
            self.c_thresh,
        )
        if self.weight_advantage:
            advantage = truncated_weight(log_ratio, self.rho_thresh) * advantage
        return advantage, target, log_ratio.exp()

    def _plan(self) -> ActorCritic:
        return ActorCritic.of(self.actor_network, self.value_network, self)

    def _values(self, batch: Step, sequences: Sequences) -> Values:
        plan, unroll = self._plan(), self._unroll()
        check_starts(batch, plan.states, sequences.segments.starts)
        if unroll is not None:
            unroll.check(batch, sequences)
        unread = [key for key in plan.states if unroll is None or key not in unroll.states]  # those of the actor
        with set_recurrent_mode(True):
            inputs = inputs_in_sequence(batch, sequences, plan.keys, plan.networks)
            dist, run = plan.run(plan.without(unread, inputs))
        stored = unroll is None
        values = self._stored(batch, sequences) if stored else self._computed(batch, sequences, unroll, run)
        keys = self.tensor_keys
        before = entry(
            batch, keys.sample_log_prob, "Build the actor with return_log_prob=True, so that collection stores it."
        )
        now = cast(Any, dist).log_prob(*plan.sampler.actions(batch, keys.action))
        shape = batch.batch_size
        log_ratio = sum_events(now, shape) - sum_events(before, shape)
        if sequences.mask is not None:  # the ratio of padding may overflow, and 0 * inf is NaN
            log_ratio = log_ratio.where(sequences.mask, 0.0)
        return values._replace(log_ratio=log_ratio)

"""Imitation of given actions: the loss of behavioral cloning and of distillation."""

from __future__ import annotations

from typing import cast

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from recurl.core.keys import NestedKey
from recurl.core.specs import Bounded, TensorSpec, Unbounded
from recurl.objectives.common import entry
from recurl.objectives.policy import ActorCritic
from recurl.sequences.entries import Step
from recurl.sequences.mode import set_recurrent_mode

__all__ = ["ImitationLoss"]


class ImitationLoss(nn.Module):
    """Distance of a policy's actions from given ones, over sequences that start from their stored states.

    Discrete actions: minus the log-probability of the given action. Real-valued actions: the squared distance of the
    greedy action from the given one, averaged over the components and in units of half their range if they are bounded;
    the spread of the policy isn't trained.

    Sources: Pomerleau, "ALVINN" (1989); Ross et al., "A reduction of imitation learning and structured prediction to
    no-regret online learning" (2011), DAgger.

    Args:
        actor_network: policy that ends with a sampler, such as ``ProbabilisticActor``.
        action_spec: spec of its action for one environment.
        label_key: key of the actions to imitate.

    Example:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> from recurl.core.specs import Categorical as Choice
        >>> from recurl.modules import Categorical, ProbabilisticActor
        >>> net = TensorDictModule(nn.Linear(2, 3), in_keys=["observation"], out_keys=["logits"])
        >>> actor = ProbabilisticActor(net, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True)
        >>> loss = ImitationLoss(actor, Choice(3), "label")
        >>> batch = TensorDict({"observation": torch.zeros(4, 2), "label": torch.tensor([0, 1, 2, 0])}, [4])
        >>> sorted(loss(batch))
        ['agreement', 'loss']
    """

    half_range: Tensor

    def __init__(self, actor_network: TensorDictModuleBase, action_spec: TensorSpec, label_key: NestedKey) -> None:
        super().__init__()
        self.actor_network = actor_network
        self.label_key = label_key
        self.is_real = isinstance(action_spec, Bounded | Unbounded) and bool(
            action_spec.dtype is not None and action_spec.dtype.is_floating_point
        )
        half = (action_spec.high - action_spec.low) / 2 if isinstance(action_spec, Bounded) else torch.ones(())
        self.register_buffer("half_range", half.float(), persistent=False)
        self._plan = ActorCritic.of(actor_network, None, self)

    @property
    def in_keys(self) -> list[NestedKey]:
        """Keys of all entries that are read from a batch."""
        return list(dict.fromkeys([*self._plan.keys, self.label_key]))

    def forward(self, batch: Step) -> dict[str, Tensor]:
        """Compute the loss of a batch of sequences, ``[M]`` or ``[B, T]``.

        Returns:
            ``"loss"``, a scalar with gradients, and ``"agreement"``, without: the fraction of equal choices, or for
            real-valued actions 1 minus the mean absolute distance.
        """
        label = entry(batch, self.label_key, "The teacher writes it during collection.")
        with set_recurrent_mode(True):
            dist, _ = self._plan.run(self._plan.inputs(batch))
        greedy = cast(Tensor, getattr(dist, "deterministic_sample", dist.mode))
        if self.is_real:
            distance = (greedy - label.to(greedy.dtype)) / self.half_range
            return {"loss": distance.square().mean(), "agreement": 1 - distance.detach().abs().mean()}
        equal = (greedy == label).to(torch.float32)
        return {"loss": -dist.log_prob(label).mean(), "agreement": equal.mean()}

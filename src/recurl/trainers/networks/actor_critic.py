"""Actor and critic of a run: action probabilities and state values."""

from __future__ import annotations

from typing import Any

import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

from recurl import specs
from recurl.errors import UnsupportedError
from recurl.keys import ACTION, NestedKey
from recurl.mode import ExplorationType
from recurl.modules import Categorical, NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
from recurl.trainers.config import NO_CELL, RunConfig
from recurl.trainers.networks.agent import Agent
from recurl.trainers.networks.layers import make_head


class Choices(Categorical):
    """A ``Categorical`` with the same draws, which also returns a choice where a probability is NaN.

    A batch with a NaN observation is collected to its end, and the trainer can say where that began. On a GPU, an
    assertion about such probabilities would make the device unusable.

    Example:
        >>> Choices(logits=torch.full((2, 3), torch.nan)).sample().shape
        torch.Size([2])
    """

    def sample(self, sample_shape: torch.Size | list[int] | tuple[int, ...] = torch.Size()) -> Tensor:  # noqa: B008 - as in torch
        """Return choices, ``[*sample_shape, *B]`` int64."""
        probs = self.probs.detach().expand(*sample_shape, *self.batch_shape, -1)
        return torch.div(probs, torch.empty_like(probs).exponential_()).max(-1).indices


class ActorCritic(Agent):
    """Policy and critic of a run, with a shared trunk or one each.

    Args:
        config: see :class:`Agent`.
        observation_spec: see :class:`Agent`.
        action_spec: actions of one environment: ``Categorical`` or ``Bounded``.
        shared_trunk: give both one encoder and one memory.

    Attributes:
        actor: from observations to actions and their log-probability.
        critic: from observations to ``"state_value"``.
        policy: the actor, and before it the critic's trunk when it has its own.

    Raises:
        UnsupportedError: the actions are of another kind.
    """

    def __init__(
        self,
        config: RunConfig,
        observation_spec: specs.Composite,
        action_spec: specs.TensorSpec,
        *,
        shared_trunk: bool = True,
    ) -> None:
        super().__init__(config, observation_spec)
        actor_trunk = self.trunk(config, "" if shared_trunk else "actor_")
        critic_trunk = actor_trunk if shared_trunk else self.trunk(config, "critic_")
        head, distribution = _actor_head(config, actor_trunk[-1].out_keys[0], action_spec)
        value_head = ValueOperator(make_head(config, 1, 1.0), in_keys=[critic_trunk[-1].out_keys[0]])
        self.actor = ProbabilisticActor(
            TensorDictSequential(*actor_trunk, head),
            **distribution,
            out_keys=[ACTION],
            return_log_prob=True,
            default_interaction_type=ExplorationType.RANDOM,
        )
        self.critic = TensorDictSequential(*critic_trunk, value_head)
        carried = [] if shared_trunk or config.cell == NO_CELL else critic_trunk
        self.policy = TensorDictSequential(*carried, self.actor)


def _actor_head(
    config: RunConfig, memory: NestedKey, spec: specs.TensorSpec
) -> tuple[TensorDictModule, dict[str, Any]]:
    if isinstance(spec, specs.Categorical) and not spec.shape:
        head = TensorDictModule(make_head(config, spec.n, 0.01), in_keys=[memory], out_keys=["logits"])
        return head, {"in_keys": ["logits"], "distribution_class": Choices}
    if (
        isinstance(spec, specs.Bounded)
        and len(spec.shape) == 1
        and spec.low.isfinite().all()
        and spec.high.isfinite().all()
    ):
        net = nn.Sequential(make_head(config, 2 * spec.shape[0], 0.01), NormalParamExtractor())
        head = TensorDictModule(net, in_keys=[memory], out_keys=["loc", "scale"])
        bounds = {"low": spec.low, "high": spec.high}
        return head, {"in_keys": ["loc", "scale"], "distribution_class": TanhNormal, "distribution_kwargs": bounds}
    raise UnsupportedError(
        f"PPO needs Discrete actions, or a Box of one dimension with finite bounds, got {spec}: wrap the environment."
    )

"""Actor-critic networks of a run: action distribution and state value."""

from __future__ import annotations

from tensordict.nn import TensorDictSequential

from recurl.core import specs
from recurl.modules import ProbabilisticActor, ValueOperator
from recurl.sequences.mode import ExplorationType
from recurl.trainers.config import NO_CELL, RunConfig
from recurl.trainers.networks.action_head import make_action_head
from recurl.trainers.networks.agent import Agent
from recurl.trainers.networks.layers import make_head


class ActorCritic(Agent):
    """Actor and critic of a run, with a shared trunk or separate trunks.

    Args:
        config: see :class:`Agent`.
        observation_spec: see :class:`Agent`.
        action_spec: action spec of one environment: ``Categorical``, ``MultiCategorical``, ``Binary``, ``Bounded``,
            ``Unbounded`` or a ``Composite`` of these. If ``observation_spec`` has an ``"action_mask"``, only allowed
            actions are sampled.
        shared_trunk: whether actor and critic share one encoder and one memory.

    Attributes:
        actor: maps observations to actions and their log-probability.
        critic: maps observations to ``"state_value"``.
        policy: the actor, preceded by the critic's trunk if that is separate.

    Raises:
        UnsupportedError: ``action_spec`` is of another kind.
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
        actor_trunk, critic_trunk = self.trunks(config, shared=shared_trunk)
        masked = specs.has_mask(observation_spec, action_spec)
        head = make_action_head(config, actor_trunk[-1].out_keys[0], action_spec, masked=masked)
        value_head = ValueOperator(make_head(config, 1, 1.0), in_keys=[critic_trunk[-1].out_keys[0]])
        self.actor = ProbabilisticActor(
            TensorDictSequential(*actor_trunk, head.module),
            **head.sampler,
            return_log_prob=True,
            default_interaction_type=ExplorationType.RANDOM,
        )
        self.critic = TensorDictSequential(*critic_trunk, value_head)
        carried = [] if shared_trunk or config.cell == NO_CELL else critic_trunk
        self.policy = TensorDictSequential(*carried, self.actor)

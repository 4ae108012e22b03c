"""Actor and critics of SAC."""

from __future__ import annotations

from tensordict.nn import TensorDictModuleBase, TensorDictSequential

from recurl.core import specs
from recurl.core.errors import UnsupportedError
from recurl.modules import ProbabilisticActor
from recurl.sequences.mode import ExplorationType
from recurl.trainers.config import RunConfig
from recurl.trainers.networks.action_head import make_action_head
from recurl.trainers.networks.actor_q import ActorQ, is_box


class SoftActor(ActorQ):
    """Stochastic actor of SAC, and critics.

    Actions are real-valued (a squashed normal if bounded), one discrete choice, or several. If the observation has an
    ``"action_mask"``, only allowed actions are sampled. See :class:`ActorQ` for the arguments.

    Raises:
        UnsupportedError: actions are of another kind.
    """

    def make_actor(
        self,
        config: RunConfig,
        observation_spec: specs.Composite,
        action_spec: specs.TensorSpec,
        trunk: list[TensorDictModuleBase],
    ) -> TensorDictSequential:
        """Build the actor on top of ``trunk``."""
        masked = specs.has_mask(observation_spec, action_spec)
        head = make_action_head(config, trunk[-1].out_keys[0], action_spec, masked=masked)
        return ProbabilisticActor(
            TensorDictSequential(*trunk, head.module),
            **head.sampler,
            default_interaction_type=ExplorationType.RANDOM,
        )


def check_soft_actions(spec: specs.TensorSpec) -> None:
    """Raise if SAC doesn't support the action spec.

    Raises:
        UnsupportedError: actions are neither real-valued nor one or several discrete choices.
    """
    if not is_box(spec) and not isinstance(spec, specs.Categorical | specs.MultiCategorical):
        raise UnsupportedError(
            f"SAC needs Box, Discrete or MultiDiscrete actions, got {spec}: use PPO, or wrap the environment."
        )

"""Actor and critics of SAC."""

from __future__ import annotations

from tensordict.nn import TensorDictModuleBase, TensorDictSequential

from recurl import specs
from recurl.errors import UnsupportedError
from recurl.mode import ExplorationType
from recurl.modules import ProbabilisticActor
from recurl.trainers.config import RunConfig
from recurl.trainers.networks.action_head import make_action_head
from recurl.trainers.networks.actor_q import ActorQ, is_box


class SoftActor(ActorQ):
    """Actor of SAC, which draws its actions, and critics.

    Actions are real numbers (a squashed normal where they have bounds), one choice, or several; with ``"action_mask"``
    in the observation, only allowed choices are made. See :class:`ActorQ` for the arguments.

    Raises:
        UnsupportedError: the actions are of another kind.
    """

    def make_actor(
        self,
        config: RunConfig,
        observation_spec: specs.Composite,
        action_spec: specs.TensorSpec,
        trunk: list[TensorDictModuleBase],
    ) -> TensorDictSequential:
        """Return the actor, on its encoder and memory."""
        masked = specs.has_mask(observation_spec, action_spec)
        head = make_action_head(config, trunk[-1].out_keys[0], action_spec, masked=masked)
        return ProbabilisticActor(
            TensorDictSequential(*trunk, head.module),
            **head.sampler,
            default_interaction_type=ExplorationType.RANDOM,
        )


def check_soft_actions(spec: specs.TensorSpec) -> None:
    """Refuse actions that SAC can't choose.

    Raises:
        UnsupportedError: they are none of real numbers, one choice or several.
    """
    if not is_box(spec) and not isinstance(spec, specs.Categorical | specs.MultiCategorical):
        raise UnsupportedError(
            f"SAC needs Box, Discrete or MultiDiscrete actions, got {spec}: take PPO, or wrap the environment."
        )

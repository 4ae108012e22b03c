"""Q-network of a run with epsilon-greedy exploration."""

from __future__ import annotations

from tensordict.nn import TensorDictModule, TensorDictSequential

from recurl.core import specs
from recurl.core.errors import UnsupportedError
from recurl.core.keys import ACTION_MASK
from recurl.modules import EGreedyModule, QValueActor
from recurl.trainers.config import RunConfig
from recurl.trainers.networks.agent import Agent
from recurl.trainers.networks.layers import make_head


class QNetwork(Agent):
    """Q-network of a run with epsilon-greedy exploration.

    Args:
        config: see :class:`Agent`.
        observation_spec: see :class:`Agent`.
        action_spec: action spec of one environment, ``Categorical``. If ``observation_spec`` has an
            ``"action_mask"``, only allowed actions are chosen and have values.
        eps_init: initial probability of a random action.
        eps_end: probability of a random action after ``eps_steps``.
        eps_steps: environment steps over which the probability is annealed linearly.

    Attributes:
        actor: maps observations to action values and the greedy action.
        explore: replaces some of these actions with random ones during collection.
        policy: the actor followed by ``explore``.

    Raises:
        UnsupportedError: ``action_spec`` is not a scalar ``Categorical``.
    """

    def __init__(
        self,
        config: RunConfig,
        observation_spec: specs.Composite,
        action_spec: specs.TensorSpec,
        *,
        eps_init: float,
        eps_end: float,
        eps_steps: int,
    ) -> None:
        if not isinstance(action_spec, specs.Categorical) or action_spec.shape:
            raise UnsupportedError(f"DQN needs Discrete actions, got {action_spec}: use PPO, or wrap the environment.")
        super().__init__(config, observation_spec)
        trunk = self.trunk(config)
        head = TensorDictModule(
            make_head(config, action_spec.n), in_keys=[trunk[-1].out_keys[0]], out_keys=["action_value"]
        )
        mask = ACTION_MASK if specs.has_mask(observation_spec, action_spec) else None
        self.actor = QValueActor(TensorDictSequential(*trunk, head), spec=action_spec, action_mask_key=mask)
        self.explore = EGreedyModule(
            action_spec, eps_init, eps_end, annealing_num_steps=eps_steps, action_mask_key=mask
        )
        self.policy = TensorDictSequential(self.actor, self.explore)

"""The network of a DQN run: encoder, memory, action values."""

from __future__ import annotations

from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from recurl import specs
from recurl.errors import UnsupportedError
from recurl.modules import EGreedyModule, ObservationNorm, QValueActor
from recurl.trainers.agent import FlatObservation, make_trunk
from recurl.trainers.replay_config import DQNConfig


class QAgent(nn.Module):
    """Action values of a run, and how it explores.

    Args:
        config: cell, sizes, normalisation, exploration.
        observation_spec: observations of the environments, ``[*B]``.
        action_spec: the actions of one environment, ``Categorical``.

    Attributes:
        actor: from observations to action values and the best action.
        explore: what follows it while collecting.
        policy: both.
        flat: turns observations into one vector.
        norm: statistics of these vectors, or None.

    Raises:
        UnsupportedError: the actions are of another kind.
    """

    def __init__(self, config: DQNConfig, observation_spec: specs.Composite, action_spec: specs.TensorSpec) -> None:
        super().__init__()
        if not isinstance(action_spec, specs.Categorical) or action_spec.shape:
            raise UnsupportedError(f"DQN needs Discrete actions, got {action_spec}: take PPO, or wrap the environment.")
        self.flat = flat = FlatObservation(observation_spec)
        self.norm = ObservationNorm((flat.features,)) if config.normalize_observations else None
        trunk = make_trunk(config, flat, self.norm, "")
        head = TensorDictModule(
            nn.Linear(config.hidden_size, action_spec.n), in_keys=[trunk[-1].out_keys[0]], out_keys=["action_value"]
        )
        self.actor = QValueActor(TensorDictSequential(*trunk, head), spec=action_spec)
        self.explore = EGreedyModule(
            action_spec,
            config.eps_init,
            config.eps_end,
            annealing_num_steps=max(1, round(config.exploration_fraction * config.total_steps)),
        )
        self.policy = TensorDictSequential(self.actor, self.explore)

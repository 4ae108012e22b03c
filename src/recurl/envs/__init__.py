"""Environments: Gymnasium wrappers, recurl's tasks, transformed and batched environments, and the interaction loop."""

from typing import TYPE_CHECKING

from recurl.core.lazy import lazy_names
from recurl.envs import tasks as tasks

if TYPE_CHECKING:
    from recurl.envs.base import EnvBase
    from recurl.envs.batched import EnvCreator, SerialEnv
    from recurl.envs.env_specs import EnvSpecs
    from recurl.envs.grouped import GroupedEnv
    from recurl.envs.gym import GymEnv, GymWrapper
    from recurl.envs.gym_spaces import ActionReader as ActionReader
    from recurl.envs.gym_spaces import MaskReader as MaskReader
    from recurl.envs.gym_spaces import ObservationReader as ObservationReader
    from recurl.envs.in_place import InPlace as InPlace
    from recurl.envs.jax_env import JaxEnv
    from recurl.envs.libs.pettingzoo import PettingZooEnv
    from recurl.envs.libs.vmas import VmasEnv
    from recurl.envs.multi_agent import AgentsReset, AgentsStep, MultiAgentEnv
    from recurl.envs.parallel import ParallelEnv, parallel_groups
    from recurl.envs.rollout import Act as Act
    from recurl.envs.rollout import interact
    from recurl.envs.rollout import interact_in_turn as interact_in_turn
    from recurl.envs.tensor_env import TensorEnv
    from recurl.envs.transformed import TransformedEnv
    from recurl.envs.trials import TrialDynamics, Trials
    from recurl.envs.utils import (
        ExplorationType,
        check_env_specs,
        exploration_type,
        set_exploration_type,
        step_mdp,
    )
    from recurl.envs.vec_tensor_env import VecTensorEnv
    from recurl.transforms import (
        Compose,
        InitTracker,
        ObservationDelay,
        ObservationNoise,
        PreviousAction,
        PreviousReward,
        RewardSum,
        StepCounter,
        TensorDictPrimer,
        Transform,
    )

lazy_names(
    __name__,
    {
        ".base": "EnvBase",
        ".batched": "EnvCreator SerialEnv",
        ".env_specs": "EnvSpecs",
        ".grouped": "GroupedEnv",
        ".gym": "GymEnv GymWrapper",
        ".gym_spaces": "ActionReader MaskReader ObservationReader",
        ".in_place": "InPlace",
        ".jax_env": "JaxEnv",
        ".libs.pettingzoo": "PettingZooEnv",
        ".libs.vmas": "VmasEnv",
        ".multi_agent": "AgentsReset AgentsStep MultiAgentEnv",
        ".parallel": "ParallelEnv parallel_groups",
        ".rollout": "Act interact interact_in_turn",
        ".tensor_env": "TensorEnv",
        ".transformed": "TransformedEnv",
        ".trials": "TrialDynamics Trials",
        ".utils": "ExplorationType check_env_specs exploration_type set_exploration_type step_mdp",
        ".vec_tensor_env": "VecTensorEnv",
        "recurl.transforms": (
            "Compose InitTracker ObservationDelay ObservationNoise PreviousAction PreviousReward RewardSum StepCounter "
            "TensorDictPrimer Transform"
        ),
    },
)

__all__ = [
    "AgentsReset",
    "AgentsStep",
    "Compose",
    "EnvBase",
    "EnvCreator",
    "EnvSpecs",
    "ExplorationType",
    "GroupedEnv",
    "GymEnv",
    "GymWrapper",
    "InitTracker",
    "JaxEnv",
    "MultiAgentEnv",
    "ObservationDelay",
    "ObservationNoise",
    "ParallelEnv",
    "PettingZooEnv",
    "PreviousAction",
    "PreviousReward",
    "RewardSum",
    "SerialEnv",
    "StepCounter",
    "TensorDictPrimer",
    "TensorEnv",
    "Transform",
    "TransformedEnv",
    "TrialDynamics",
    "Trials",
    "VecTensorEnv",
    "VmasEnv",
    "check_env_specs",
    "exploration_type",
    "interact",
    "parallel_groups",
    "set_exploration_type",
    "step_mdp",
]

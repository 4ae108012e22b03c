"""Training: PPO, A2C, IMPALA, DQN, R2D2, SAC and TD3, with and without memory; run folders, evaluation, export.

Names are imported lazily, on first use: the options of the algorithms can be read without importing torch.
"""

from typing import TYPE_CHECKING

from recurl.core.lazy import lazy_names

if TYPE_CHECKING:
    from recurl.trainers.algorithms.a2c import A2C
    from recurl.trainers.algorithms.configs import (
        A2CConfig,
        DQNConfig,
        ImpalaConfig,
        PPOConfig,
        R2D2Config,
        ReplayConfig,
        SACConfig,
        TD3Config,
    )
    from recurl.trainers.algorithms.dqn import DQN
    from recurl.trainers.algorithms.environment import make_env
    from recurl.trainers.algorithms.impala import Impala
    from recurl.trainers.algorithms.learner import Learner
    from recurl.trainers.algorithms.ppo import PPO
    from recurl.trainers.algorithms.replay import ReplayLearner
    from recurl.trainers.algorithms.sac import SAC
    from recurl.trainers.algorithms.table import ALGORITHMS, OPTIONS, Algorithm, find_algorithm, read_options, register
    from recurl.trainers.algorithms.td3 import TD3
    from recurl.trainers.config import RunConfig
    from recurl.trainers.env_name import EnvSource
    from recurl.trainers.export.checksum import check_export
    from recurl.trainers.export.policy_file import export_policy, export_run
    from recurl.trainers.networks.actor_critic import ActorCritic
    from recurl.trainers.networks.agent import Agent
    from recurl.trainers.networks.own_actor_critic import OwnActorCritic
    from recurl.trainers.networks.q_network import QNetwork
    from recurl.trainers.optim.cuda_graph import CudaGraphStep
    from recurl.trainers.optim.gradient_step import GradientStep
    from recurl.trainers.policies.load import load
    from recurl.trainers.policies.play import play_run
    from recurl.trainers.policies.policy import Policy, PolicyState
    from recurl.trainers.run.callback import Callback
    from recurl.trainers.run.evaluate import Evaluation, evaluate_policy
    from recurl.trainers.run.folder import RunFolder
    from recurl.trainers.run.load import evaluate_run, load_agent
    from recurl.trainers.run.outcome import Outcome
    from recurl.trainers.run.trainer import Trainer

lazy_names(
    __name__,
    {
        ".algorithms.a2c": "A2C",
        ".algorithms.configs": (
            "A2CConfig DQNConfig ImpalaConfig PPOConfig R2D2Config ReplayConfig SACConfig TD3Config"
        ),
        ".algorithms.dqn": "DQN",
        ".algorithms.environment": "make_env",
        ".algorithms.impala": "Impala",
        ".algorithms.learner": "Learner",
        ".algorithms.ppo": "PPO",
        ".algorithms.replay": "ReplayLearner",
        ".algorithms.sac": "SAC",
        ".algorithms.table": "ALGORITHMS OPTIONS Algorithm find_algorithm read_options register",
        ".algorithms.td3": "TD3",
        ".config": "RunConfig",
        ".env_name": "EnvSource",
        ".export.checksum": "check_export",
        ".export.policy_file": "export_policy export_run",
        ".networks.actor_critic": "ActorCritic",
        ".networks.agent": "Agent",
        ".networks.own_actor_critic": "OwnActorCritic",
        ".networks.q_network": "QNetwork",
        ".optim.cuda_graph": "CudaGraphStep",
        ".optim.gradient_step": "GradientStep",
        ".policies.load": "load",
        ".policies.play": "play_run",
        ".policies.policy": "Policy PolicyState",
        ".run.callback": "Callback",
        ".run.evaluate": "Evaluation evaluate_policy",
        ".run.folder": "RunFolder",
        ".run.load": "evaluate_run load_agent",
        ".run.outcome": "Outcome",
        ".run.trainer": "Trainer",
    },
)

__all__ = [
    "A2C",
    "ALGORITHMS",
    "DQN",
    "OPTIONS",
    "PPO",
    "SAC",
    "TD3",
    "A2CConfig",
    "ActorCritic",
    "Agent",
    "Algorithm",
    "Callback",
    "CudaGraphStep",
    "DQNConfig",
    "EnvSource",
    "Evaluation",
    "GradientStep",
    "Impala",
    "ImpalaConfig",
    "Learner",
    "Outcome",
    "OwnActorCritic",
    "PPOConfig",
    "Policy",
    "PolicyState",
    "QNetwork",
    "R2D2Config",
    "ReplayConfig",
    "ReplayLearner",
    "RunConfig",
    "RunFolder",
    "SACConfig",
    "TD3Config",
    "Trainer",
    "check_export",
    "evaluate_policy",
    "evaluate_run",
    "export_policy",
    "export_run",
    "find_algorithm",
    "load",
    "load_agent",
    "make_env",
    "play_run",
    "read_options",
    "register",
]

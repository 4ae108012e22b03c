"""Training: PPO, A2C, IMPALA, DQN, R2D2, SAC and TD3, with and without memory; run folders, evaluation, export.

Names are imported lazily, on first use: the options of the algorithms can be read without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recurl.trainers.algorithms.a2c import A2C as A2C
    from recurl.trainers.algorithms.configs import A2CConfig as A2CConfig
    from recurl.trainers.algorithms.configs import DQNConfig as DQNConfig
    from recurl.trainers.algorithms.configs import ImpalaConfig as ImpalaConfig
    from recurl.trainers.algorithms.configs import PPOConfig as PPOConfig
    from recurl.trainers.algorithms.configs import R2D2Config as R2D2Config
    from recurl.trainers.algorithms.configs import ReplayConfig as ReplayConfig
    from recurl.trainers.algorithms.configs import SACConfig as SACConfig
    from recurl.trainers.algorithms.configs import TD3Config as TD3Config
    from recurl.trainers.algorithms.dqn import DQN as DQN
    from recurl.trainers.algorithms.environment import make_env as make_env
    from recurl.trainers.algorithms.impala import Impala as Impala
    from recurl.trainers.algorithms.learner import Learner as Learner
    from recurl.trainers.algorithms.ppo import PPO as PPO
    from recurl.trainers.algorithms.replay import ReplayLearner as ReplayLearner
    from recurl.trainers.algorithms.sac import SAC as SAC
    from recurl.trainers.algorithms.table import ALGORITHMS as ALGORITHMS
    from recurl.trainers.algorithms.table import OPTIONS as OPTIONS
    from recurl.trainers.algorithms.table import Algorithm as Algorithm
    from recurl.trainers.algorithms.table import find_algorithm as find_algorithm
    from recurl.trainers.algorithms.table import read_options as read_options
    from recurl.trainers.algorithms.table import register as register
    from recurl.trainers.algorithms.td3 import TD3 as TD3
    from recurl.trainers.config import RunConfig as RunConfig
    from recurl.trainers.env_name import EnvSource as EnvSource
    from recurl.trainers.export.checksum import check_export as check_export
    from recurl.trainers.export.policy_file import export_run as export_run
    from recurl.trainers.networks.actor_critic import ActorCritic as ActorCritic
    from recurl.trainers.networks.agent import Agent as Agent
    from recurl.trainers.networks.q_network import QNetwork as QNetwork
    from recurl.trainers.optim.cuda_graph import CudaGraphStep as CudaGraphStep
    from recurl.trainers.optim.gradient_step import GradientStep as GradientStep
    from recurl.trainers.policies.load import load as load
    from recurl.trainers.policies.play import play_run as play_run
    from recurl.trainers.policies.policy import Policy as Policy
    from recurl.trainers.policies.policy import PolicyState as PolicyState
    from recurl.trainers.run.callback import Callback as Callback
    from recurl.trainers.run.evaluate import Evaluation as Evaluation
    from recurl.trainers.run.evaluate import evaluate_policy as evaluate_policy
    from recurl.trainers.run.folder import RunFolder as RunFolder
    from recurl.trainers.run.load import evaluate_run as evaluate_run
    from recurl.trainers.run.load import load_agent as load_agent
    from recurl.trainers.run.outcome import Outcome as Outcome
    from recurl.trainers.run.trainer import Trainer as Trainer

_MODULES = {
    "A2C": "algorithms.a2c",
    "A2CConfig": "algorithms.configs",
    "ALGORITHMS": "algorithms.table",
    "ActorCritic": "networks.actor_critic",
    "Agent": "networks.agent",
    "Algorithm": "algorithms.table",
    "Callback": "run.callback",
    "CudaGraphStep": "optim.cuda_graph",
    "DQN": "algorithms.dqn",
    "DQNConfig": "algorithms.configs",
    "EnvSource": "env_name",
    "Evaluation": "run.evaluate",
    "GradientStep": "optim.gradient_step",
    "Impala": "algorithms.impala",
    "ImpalaConfig": "algorithms.configs",
    "Learner": "algorithms.learner",
    "OPTIONS": "algorithms.table",
    "Outcome": "run.outcome",
    "PPO": "algorithms.ppo",
    "PPOConfig": "algorithms.configs",
    "Policy": "policies.policy",
    "PolicyState": "policies.policy",
    "QNetwork": "networks.q_network",
    "R2D2Config": "algorithms.configs",
    "ReplayConfig": "algorithms.configs",
    "ReplayLearner": "algorithms.replay",
    "RunConfig": "config",
    "RunFolder": "run.folder",
    "SAC": "algorithms.sac",
    "SACConfig": "algorithms.configs",
    "TD3": "algorithms.td3",
    "TD3Config": "algorithms.configs",
    "Trainer": "run.trainer",
    "check_export": "export.checksum",
    "evaluate_policy": "run.evaluate",
    "evaluate_run": "run.load",
    "export_run": "export.policy_file",
    "find_algorithm": "algorithms.table",
    "load": "policies.load",
    "load_agent": "run.load",
    "make_env": "algorithms.environment",
    "play_run": "policies.play",
    "read_options": "algorithms.table",
    "register": "algorithms.table",
}

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
    "export_run",
    "find_algorithm",
    "load",
    "load_agent",
    "make_env",
    "play_run",
    "read_options",
    "register",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})

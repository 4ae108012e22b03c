"""Training: PPO, DQN and R2D2, with and without memory; run folders, checkpoints, evaluation."""

from recurl.trainers.config import PPOConfig, RunConfig
from recurl.trainers.cuda_graph import CudaGraphStep
from recurl.trainers.dqn import DQN
from recurl.trainers.environment import make_env
from recurl.trainers.evaluate import Evaluation, evaluate_policy, evaluate_run, load_agent
from recurl.trainers.export import check_export, export_run
from recurl.trainers.options import OPTIONS, read_options
from recurl.trainers.outcome import Outcome
from recurl.trainers.ppo import PPO
from recurl.trainers.replay_config import DQNConfig, R2D2Config
from recurl.trainers.run_folder import RunFolder
from recurl.trainers.trainer import Trainer

__all__ = [
    "DQN",
    "OPTIONS",
    "PPO",
    "CudaGraphStep",
    "DQNConfig",
    "Evaluation",
    "Outcome",
    "PPOConfig",
    "R2D2Config",
    "RunConfig",
    "RunFolder",
    "Trainer",
    "check_export",
    "evaluate_policy",
    "evaluate_run",
    "export_run",
    "load_agent",
    "make_env",
    "read_options",
]

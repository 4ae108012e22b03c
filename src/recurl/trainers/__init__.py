"""Training: PPO with and without memory, run folders, checkpoints, evaluation."""

from recurl.trainers.config import PPOConfig
from recurl.trainers.evaluate import Evaluation, evaluate_policy, evaluate_run, load_agent
from recurl.trainers.ppo import PPO, make_env
from recurl.trainers.run_folder import RunFolder
from recurl.trainers.trainer import Outcome, Trainer

__all__ = [
    "PPO",
    "Evaluation",
    "Outcome",
    "PPOConfig",
    "RunFolder",
    "Trainer",
    "evaluate_policy",
    "evaluate_run",
    "load_agent",
    "make_env",
]

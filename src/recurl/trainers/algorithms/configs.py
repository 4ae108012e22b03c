"""Registry of the built-in algorithms' options; importing it doesn't import torch."""

from __future__ import annotations

from recurl.trainers.algorithms.a2c_config import A2CConfig
from recurl.trainers.algorithms.dqn_config import DQNConfig
from recurl.trainers.algorithms.impala_config import ImpalaConfig
from recurl.trainers.algorithms.ppo_config import PPOConfig
from recurl.trainers.algorithms.r2d2_config import R2D2Config
from recurl.trainers.algorithms.sac_config import SACConfig
from recurl.trainers.algorithms.td3_config import TD3Config
from recurl.trainers.config import RunConfig

CONFIGS: dict[str, type[RunConfig]] = {
    config.algorithm: config
    for config in (PPOConfig, DQNConfig, R2D2Config, A2CConfig, ImpalaConfig, SACConfig, TD3Config)
}

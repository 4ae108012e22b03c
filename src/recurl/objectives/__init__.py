"""Losses and value estimators over sequences, which run networks in recurrent mode, whatever the mode outside."""

from recurl.objectives.common import LossModule
from recurl.objectives.discrete_sac import DiscreteSACLoss
from recurl.objectives.dqn import DQNLoss
from recurl.objectives.ppo import ClipPPOLoss
from recurl.objectives.sac import SACLoss
from recurl.objectives.targets import HardUpdate, SoftUpdate, target_of
from recurl.objectives.td3 import TD3Loss

__all__ = [
    "ClipPPOLoss",
    "DQNLoss",
    "DiscreteSACLoss",
    "HardUpdate",
    "LossModule",
    "SACLoss",
    "SoftUpdate",
    "TD3Loss",
    "target_of",
]

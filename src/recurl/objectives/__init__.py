"""Losses and value estimators over sequences, which run networks in recurrent mode, whatever the mode outside."""

from recurl.objectives.common import LossModule
from recurl.objectives.discrete_sac import DiscreteSACLoss
from recurl.objectives.dqn import DQNLoss
from recurl.objectives.ppo import ClipPPOLoss
from recurl.objectives.sac import SACLoss
from recurl.objectives.targets import HardUpdate, SoftUpdate, target_of

__all__ = [
    "ClipPPOLoss",
    "DQNLoss",
    "DiscreteSACLoss",
    "HardUpdate",
    "LossModule",
    "SACLoss",
    "SoftUpdate",
    "target_of",
]

"""Losses and value estimators. Each runs sequences in recurrent mode by itself and leaves its input batch intact."""

from recurl.objectives.common import LossModule
from recurl.objectives.dqn import DQNLoss
from recurl.objectives.ppo import ClipPPOLoss
from recurl.objectives.targets import HardUpdate, SoftUpdate, target_of

__all__ = ["ClipPPOLoss", "DQNLoss", "HardUpdate", "LossModule", "SoftUpdate", "target_of"]

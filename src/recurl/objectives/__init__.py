"""Losses and value estimators. Each runs sequences in recurrent mode by itself and leaves its input batch intact."""

from recurl.objectives.common import LossModule
from recurl.objectives.ppo import ClipPPOLoss

__all__ = ["ClipPPOLoss", "LossModule"]

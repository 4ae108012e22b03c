"""Losses and value estimators over sequences. They run networks in recurrent mode, whatever the mode outside."""

from typing import TYPE_CHECKING

from recurl.core.lazy import lazy_names

if TYPE_CHECKING:
    from recurl.objectives.a2c import A2CLoss
    from recurl.objectives.common import LossModule
    from recurl.objectives.discrete_sac import DiscreteSACLoss
    from recurl.objectives.dqn import DQNLoss
    from recurl.objectives.kinds import ValueEstimators
    from recurl.objectives.ppo import ClipPPOLoss
    from recurl.objectives.reinforce import ReinforceLoss
    from recurl.objectives.sac import SACLoss
    from recurl.objectives.symmetry import MirroredStates, SignedPermutation, Symmetry, SymmetryLoss
    from recurl.objectives.targets import HardUpdate, SoftUpdate, target_of
    from recurl.objectives.td3 import TD3Loss

lazy_names(
    __name__,
    {
        ".a2c": "A2CLoss",
        ".common": "LossModule",
        ".discrete_sac": "DiscreteSACLoss",
        ".dqn": "DQNLoss",
        ".kinds": "ValueEstimators",
        ".ppo": "ClipPPOLoss",
        ".reinforce": "ReinforceLoss",
        ".sac": "SACLoss",
        ".symmetry": "MirroredStates SignedPermutation Symmetry SymmetryLoss",
        ".targets": "HardUpdate SoftUpdate target_of",
        ".td3": "TD3Loss",
    },
)

__all__ = [
    "A2CLoss",
    "ClipPPOLoss",
    "DQNLoss",
    "DiscreteSACLoss",
    "HardUpdate",
    "LossModule",
    "MirroredStates",
    "ReinforceLoss",
    "SACLoss",
    "SignedPermutation",
    "SoftUpdate",
    "Symmetry",
    "SymmetryLoss",
    "TD3Loss",
    "ValueEstimators",
    "target_of",
]

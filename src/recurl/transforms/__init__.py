"""Transforms of environments: entries added at reset and at every step."""

from recurl.transforms.base import Compose, Transform, makes_memory
from recurl.transforms.init_tracker import InitTracker
from recurl.transforms.previous import PreviousAction, PreviousReward
from recurl.transforms.primer import TensorDictPrimer
from recurl.transforms.reward import RewardSum
from recurl.transforms.step_counter import StepCounter

__all__ = [
    "Compose",
    "InitTracker",
    "PreviousAction",
    "PreviousReward",
    "RewardSum",
    "StepCounter",
    "TensorDictPrimer",
    "Transform",
    "makes_memory",
]

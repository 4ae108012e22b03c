"""Environment transforms, which add or change entries at resets and steps."""

from typing import TYPE_CHECKING

from recurl.core.messages import absent_names
from recurl.transforms.base import Compose, Transform, makes_memory
from recurl.transforms.init_tracker import InitTracker
from recurl.transforms.previous import PreviousAction, PreviousReward
from recurl.transforms.primer import TensorDictPrimer
from recurl.transforms.reward import RewardSum
from recurl.transforms.step_counter import StepCounter

if not TYPE_CHECKING:  # type checkers assume that a module with __getattr__ has every name
    __getattr__ = absent_names(__name__)

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

"""Environment transforms, which add or change entries at resets and steps."""

from typing import TYPE_CHECKING

from recurl.core.lazy import lazy_names

if TYPE_CHECKING:
    from recurl.transforms.base import Compose, Transform, makes_memory
    from recurl.transforms.init_tracker import InitTracker
    from recurl.transforms.previous import PreviousAction, PreviousReward
    from recurl.transforms.primer import TensorDictPrimer
    from recurl.transforms.reward import RewardSum
    from recurl.transforms.sensors import ObservationDelay, ObservationNoise
    from recurl.transforms.step_counter import StepCounter

lazy_names(
    __name__,
    {
        ".base": "Compose Transform makes_memory",
        ".init_tracker": "InitTracker",
        ".previous": "PreviousAction PreviousReward",
        ".primer": "TensorDictPrimer",
        ".reward": "RewardSum",
        ".sensors": "ObservationDelay ObservationNoise",
        ".step_counter": "StepCounter",
    },
)

__all__ = [
    "Compose",
    "InitTracker",
    "ObservationDelay",
    "ObservationNoise",
    "PreviousAction",
    "PreviousReward",
    "RewardSum",
    "StepCounter",
    "TensorDictPrimer",
    "Transform",
    "makes_memory",
]

"""Transforms and ``TransformedEnv`` of :mod:`recurl.envs`, under TorchRL's module path."""

from recurl.core.lazy import lazy_names
from recurl.envs.transformed import TransformedEnv
from recurl.transforms import (
    Compose,
    InitTracker,
    ObservationDelay,
    ObservationNoise,
    PreviousAction,
    PreviousReward,
    RewardSum,
    StepCounter,
    TensorDictPrimer,
    Transform,
)

lazy_names(__name__)
__path__: list[str] = []  # in TorchRL it is a package, whose modules' names are here

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
    "TransformedEnv",
]

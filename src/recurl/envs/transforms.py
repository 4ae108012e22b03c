"""Transforms and ``TransformedEnv`` of :mod:`recurl.envs`, under TorchRL's module path."""

from typing import TYPE_CHECKING

from recurl.core.messages import absent_names
from recurl.envs.transformed import TransformedEnv
from recurl.transforms import (
    Compose,
    InitTracker,
    PreviousAction,
    PreviousReward,
    RewardSum,
    StepCounter,
    TensorDictPrimer,
    Transform,
)

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
    "TransformedEnv",
]

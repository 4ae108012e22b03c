"""``GymEnv`` and ``GymWrapper`` of :mod:`recurl.envs`, under TorchRL's module path."""

from typing import TYPE_CHECKING

from recurl.core.messages import absent_names
from recurl.envs.gym import GymEnv, GymWrapper

if not TYPE_CHECKING:  # type checkers assume that a module with __getattr__ has every name
    __getattr__ = absent_names(__name__)

__all__ = ["GymEnv", "GymWrapper"]

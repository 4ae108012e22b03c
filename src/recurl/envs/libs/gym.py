"""``GymEnv`` and ``GymWrapper`` of :mod:`recurl.envs`, under TorchRL's module path."""

from recurl.core.lazy import lazy_names
from recurl.envs.gym import GymEnv, GymWrapper

lazy_names(__name__)

__all__ = ["GymEnv", "GymWrapper"]

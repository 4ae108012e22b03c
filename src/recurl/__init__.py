"""Recurrent reinforcement learning for PyTorch, with hidden states that are correct by construction.

Public names are imported lazily, on first access.
"""

import sys
from typing import TYPE_CHECKING

from recurl._version import __version__
from recurl.core.lazy import lazy_names
from recurl.core.moved import MovedModules

if TYPE_CHECKING:
    from recurl.collectors import Collector
    from recurl.data import SequenceMinibatches
    from recurl.envs import GymEnv
    from recurl.modules import ActorValueOperator, Categorical, LSTMModule, ProbabilisticActor, ValueOperator
    from recurl.modules.accelerate import accelerate
    from recurl.objectives import ClipPPOLoss
    from recurl.objectives.value import GAE
    from recurl.trainers import Policy, export_policy, load

lazy_names(
    __name__,
    {
        ".collectors": "Collector",
        ".data": "SequenceMinibatches",
        ".envs": "GymEnv",
        ".modules": "ActorValueOperator Categorical LSTMModule ProbabilisticActor ValueOperator",
        ".modules.accelerate": "accelerate",
        ".objectives": "ClipPPOLoss",
        ".objectives.value": "GAE",
        ".trainers": "Policy export_policy load",
    },
)

__all__ = [
    "GAE",
    "ActorValueOperator",
    "Categorical",
    "ClipPPOLoss",
    "Collector",
    "GymEnv",
    "LSTMModule",
    "Policy",
    "ProbabilisticActor",
    "SequenceMinibatches",
    "ValueOperator",
    "__version__",
    "accelerate",
    "export_policy",
    "load",
]

if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
    sys.meta_path.insert(0, MovedModules())  # before the finder of the files of a package that moved

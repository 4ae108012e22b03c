"""Recurrent reinforcement learning for PyTorch, with hidden states that are correct by construction.

Public names are imported lazily, on first access.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from recurl._version import __version__ as __version__
from recurl.core.moved import MovedModules

if TYPE_CHECKING:
    from recurl.collectors import Collector as Collector
    from recurl.data import SequenceMinibatches as SequenceMinibatches
    from recurl.envs import GymEnv as GymEnv
    from recurl.modules import ActorValueOperator as ActorValueOperator
    from recurl.modules import Categorical as Categorical
    from recurl.modules import LSTMModule as LSTMModule
    from recurl.modules import ProbabilisticActor as ProbabilisticActor
    from recurl.modules import ValueOperator as ValueOperator
    from recurl.objectives import ClipPPOLoss as ClipPPOLoss
    from recurl.objectives.value import GAE as GAE
    from recurl.trainers import Policy as Policy
    from recurl.trainers import load as load

_HOMES = {
    "ActorValueOperator": "modules",
    "Categorical": "modules",
    "ClipPPOLoss": "objectives",
    "Collector": "collectors",
    "GAE": "objectives.value",
    "GymEnv": "envs",
    "LSTMModule": "modules",
    "Policy": "trainers",
    "ProbabilisticActor": "modules",
    "SequenceMinibatches": "data",
    "ValueOperator": "modules",
    "load": "trainers",
}

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
    "load",
]

if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
    sys.meta_path.insert(0, MovedModules())  # before the finder of the files of a package that moved


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'recurl' has no attribute {name!r}")
    value = getattr(import_module(f"recurl.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

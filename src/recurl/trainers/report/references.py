"""Reference returns for learning curves: those of the best policies with and without memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recurl.core.errors import UnsupportedError
from recurl.envs.tasks import TASKS

OPTIMUM, MEMORYLESS = "optimum", "best without memory"
"""Names of the reference returns that tasks declare."""


def reference_returns(env: str, arguments: Mapping[str, Any]) -> dict[str, float]:
    """Return the known reference returns of a task by name; empty for other tasks or unsupported arguments.

    Example:
        >>> reference_returns("recurl/RepeatPrevious-v0", {"k": 8})
        {'optimum': 1.0, 'best without memory': 0.25}
        >>> reference_returns("CartPole-v1", {})
        {}
    """
    if env not in TASKS:
        return {}
    task = TASKS[env]
    known = (task.optimal_return, task.memoryless_return)
    names = (OPTIMUM, MEMORYLESS)
    try:
        return {name: float(value(**arguments)) for name, value in zip(names, known, strict=True)}
    except (TypeError, ValueError, ArithmeticError, UnsupportedError):
        return {}

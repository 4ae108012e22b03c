"""Detection of exceptions that environments, as third-party code, raise in the process of a command."""

from __future__ import annotations

import traceback
from itertools import pairwise

from recurl.core.errors import EnvError, RecurlError
from recurl.envs.workers_child import Failure

_ENVS = "recurl.envs"
_NO_ENVIRONMENT = ("recurl", "torch", "tensordict", "numpy", "contextlib", "functools")  # called by recurl itself


def error_of_environment(error: Exception) -> EnvError | None:
    """Return an ``EnvError`` for an exception raised by an environment's code.

    None if recurl raised the exception itself, or if no environment code was involved.
    """
    if isinstance(error, RecurlError):
        return None
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    for caller, called in pairwise(modules):
        if _is_in(caller, (_ENVS,)) and not _is_in(called, _NO_ENVIRONMENT):
            found = EnvError(f"The environment raised {Failure.of(error).summary}")
            found.__cause__ = error
            return found
    return None


def _is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)

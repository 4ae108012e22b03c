"""Transfer of Gymnasium registrations to worker processes."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import cloudpickle
import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from recurl.core.errors import ArgumentError

__all__ = ["Registration", "register_all", "registrations"]

_LIBRARY_PREFIXES = ("gymnasium.", "recurl.")  # modules that also register their environments in a worker
_ENTRY_POINTS = ("entry_point", "vector_entry_point")


class Registration(NamedTuple):
    """Id of an environment and its pickled spec."""

    id: str
    spec: bytes


class _PickledEntryPoint:
    """Picklable entry point that unpickles the environment's constructor only when called.

    Args:
        function: the constructor; pickled by value if defined in the main script.
    """

    def __init__(self, function: Any) -> None:
        self._data = cloudpickle.dumps(function)

    def __call__(self, **options: Any) -> Any:
        return pickle.loads(self._data)(**options)


class _UnsendableEntryPoint:
    """Entry point of an environment that can't be sent to a worker.

    Args:
        reason: the reason.
    """

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __call__(self, **options: Any) -> NoReturn:
        raise ArgumentError(
            f"The registration of this environment can't be sent to a worker process ({self._reason}): register it in "
            "a module that the id names, 'module:id'."
        )


def registrations() -> list[Registration]:
    """Return the environments registered in this process that a new interpreter would lack."""
    return [_registration(spec) for spec in list(gym.registry.values()) if not _is_from_library(spec)]


def register_all(registered: Sequence[Registration]) -> None:
    """Register the result of :func:`registrations` from another process, except for ids already registered here."""
    for name, data in registered:
        if name in gym.registry:
            continue
        try:
            gym.registry[name] = pickle.loads(data)
        except Exception as error:  # noqa: BLE001 - imports of the spec may raise anything; reported at creation
            gym.registry[name] = _unsendable_spec(name, error)


def _is_from_library(spec: EnvSpec) -> bool:
    points = [point for point in (spec.entry_point, spec.vector_entry_point) if point is not None]
    return all(isinstance(point, str) and point.startswith(_LIBRARY_PREFIXES) for point in points)


def _registration(spec: EnvSpec) -> Registration:
    try:
        points = {name: _sendable(getattr(spec, name)) for name in _ENTRY_POINTS}
        return Registration(spec.id, cloudpickle.dumps(replace(spec, **points)))
    except Exception as error:  # noqa: BLE001 - pickling may raise anything; reported when the environment is created
        return Registration(spec.id, cloudpickle.dumps(_unsendable_spec(spec.id, error)))


def _unsendable_spec(name: str, error: Exception) -> EnvSpec:
    point: Any = _UnsendableEntryPoint(f"{type(error).__name__}: {error}")
    return EnvSpec(name, point, vector_entry_point=point)


def _sendable(point: Any) -> Any:
    if isinstance(point, str) and point.startswith("__main__:"):
        point = getattr(importlib.import_module("__main__"), point.removeprefix("__main__:"))
    return _PickledEntryPoint(point) if callable(point) else point

"""Environments that a process has registered with Gymnasium, sent to its workers."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import cloudpickle
import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from recurl.errors import ArgumentError

__all__ = ["Registration", "register_all", "registrations"]

_LIBRARY_PREFIXES = ("gymnasium.", "recurl.")  # modules that register their environments in a worker too
_ENTRY_POINTS = ("entry_point", "vector_entry_point")


class Registration(NamedTuple):
    """An environment's id, and its pickled spec."""

    id: str
    spec: bytes


class _PickledEntryPoint:
    """Picklable entry point; what makes the environment is unpickled only when it is asked for.

    Args:
        function: what makes it; one defined in the main script is pickled by value.
    """

    def __init__(self, function: Any) -> None:
        self._data = cloudpickle.dumps(function)

    def __call__(self, **options: Any) -> Any:
        return pickle.loads(self._data)(**options)


class _UnsendableEntryPoint:
    """Entry point of an environment that can't be sent to a worker.

    Args:
        reason: why not.
    """

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __call__(self, **options: Any) -> NoReturn:
        raise ArgumentError(
            f"What this environment is registered with can't be sent to a worker process ({self._reason}): register it "
            "in a module that the id names, 'module:id'."
        )


def registrations() -> list[Registration]:
    """Return the environments that this process has registered and a new interpreter would lack."""
    return [_registration(spec) for spec in list(gym.registry.values()) if not _is_from_library(spec)]


def register_all(registered: Sequence[Registration]) -> None:
    """Register what :func:`registrations` returned in another process, except for ids that are known here."""
    for name, data in registered:
        if name in gym.registry:
            continue
        try:
            gym.registry[name] = pickle.loads(data)
        except Exception as error:  # noqa: BLE001 - whatever the spec's arguments import; told when it is made
            gym.registry[name] = _unsendable_spec(name, error)


def _is_from_library(spec: EnvSpec) -> bool:
    points = [point for point in (spec.entry_point, spec.vector_entry_point) if point is not None]
    return all(isinstance(point, str) and point.startswith(_LIBRARY_PREFIXES) for point in points)


def _registration(spec: EnvSpec) -> Registration:
    try:
        points = {name: _sendable(getattr(spec, name)) for name in _ENTRY_POINTS}
        return Registration(spec.id, cloudpickle.dumps(replace(spec, **points)))
    except Exception as error:  # noqa: BLE001 - whatever pickling raises; told when the environment is made
        return Registration(spec.id, cloudpickle.dumps(_unsendable_spec(spec.id, error)))


def _unsendable_spec(name: str, error: Exception) -> EnvSpec:
    point: Any = _UnsendableEntryPoint(f"{type(error).__name__}: {error}")
    return EnvSpec(name, point, vector_entry_point=point)


def _sendable(point: Any) -> Any:
    if isinstance(point, str) and point.startswith("__main__:"):
        point = getattr(importlib.import_module("__main__"), point.removeprefix("__main__:"))
    return _PickledEntryPoint(point) if callable(point) else point

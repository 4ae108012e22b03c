"""State of running environments of several agents as plain data: the attributes that steps and resets change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from recurl.core.errors import ArgumentError, UnfitStateError, UnsupportedError
from recurl.envs.state_graph import GraphReader, GraphWriter
from recurl.envs.state_plain import MAX_BYTES, UnsavableError

__all__ = ["restore", "save"]


def save(env: object, names: Iterable[str], num_envs: int) -> dict[str, Any]:
    """Return attributes of ``num_envs`` environments, and all that they refer to, as tensors and plain Python values.

    Raises:
        UnsupportedError: a value can't be saved.
    """
    try:
        return GraphWriter(MAX_BYTES * num_envs).written(_holder(env, names))
    except UnsavableError as error:
        raise UnsupportedError(f"{env!r} can't save its state: {error}.") from error


def restore(env: object, names: Iterable[str], simulators: Iterable[object], state: dict[str, Any]) -> None:
    """Restore a result of :func:`save` in an environment constructed the same way, after a reset.

    Args:
        env: the environment.
        names: names of the attributes.
        simulators: objects from whose packages come the classes of what a state may create.
        state: the state.

    Raises:
        UnfitStateError: the state belongs to another environment. This one must be reset afterwards.
    """
    holder = _holder(env, names)
    try:
        GraphReader(state).restore(holder, simulators)
    except ArgumentError as error:
        raise UnfitStateError(str(error)) from error
    for name in names:
        vars(env).pop(name, None)
    vars(env).update(vars(holder))


def _holder(env: object, names: Iterable[str]) -> object:
    """Return an object with attributes of an environment, named as its class for the sake of messages."""
    made = type(type(env).__name__, (), {"__repr__": lambda _: repr(env)})()
    vars(made).update({name: vars(env)[name] for name in names if name in vars(env)})
    return made

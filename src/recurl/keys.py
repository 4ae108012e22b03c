"""Names of the TensorDict entries that the parts of recurl agree on, and key arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from recurl.errors import ArgumentTypeError

NestedKey: TypeAlias = str | tuple[str, ...]

ACTION = "action"
COLLECTOR = "collector"
"""What a collector, a buffer or a rollout notes about steps is under this key."""
DONE = "done"
IS_INIT = "is_init"
MASK = ("collector", "mask")
NEXT = "next"
OBSERVATION = "observation"
RESET = "_reset"
REWARD = "reward"
STORED = ("collector", "stored")
"""Beside each entry that a sample changes, what is stored: ``is_init`` as collected is at ``(*STORED, "is_init")``."""
TERMINATED = "terminated"
TRAJ_IDS = ("collector", "traj_ids")
TRAJ_STEPS = ("collector", "traj_steps")
"""Number of a step within its trajectory id, from 0: a token continues the one before it by the next number."""
TRUNCATED = "truncated"


def normalize_key(key: object) -> NestedKey:
    """Return ``key`` as a string, or as a flat tuple of strings when nested.

    Args:
        key: a non-empty string, or a (possibly nested) tuple of them.

    Raises:
        ArgumentTypeError: ``key`` is anything else, or empty.

    Example:
        >>> normalize_key(("agents", ("observation",)))
        ('agents', 'observation')
        >>> normalize_key(("observation",))
        'observation'
    """
    if type(key) is str and key:  # most are
        return key
    flat = tuple(_flatten(key))
    return flat[0] if len(flat) == 1 else flat


def _flatten(key: object) -> list[str]:
    if isinstance(key, str) and key:
        return [key]
    if isinstance(key, tuple) and key:
        return [part for item in key for part in _flatten(item)]  # pyright: ignore[reportUnknownVariableType] - narrowing object to tuple
    raise ArgumentTypeError(f"A key must be a non-empty string or a tuple of such, got {key!r}.")


def shared_state(modules: Iterable[Any]) -> NestedKey | None:
    """Return a key under which two of ``modules`` keep a recurrent state, or None.

    Args:
        modules: modules of one or several networks; those without ``state_keys`` have no states.

    Example:
        >>> from recurl.modules import GRUModule
        >>> first, second = (GRUModule(2, 3, in_key="observation", out_key="features") for _ in range(2))
        >>> print(shared_state([first, first]), shared_state([first, second]))
        None recurrent_state
    """
    owners: dict[NestedKey, Any] = {}
    for module in modules:
        for key in getattr(module, "state_keys", ()):
            if owners.setdefault(key, module) is not module:
                return key
    return None


def next_key(key: NestedKey) -> tuple[str, ...]:
    """Return ``key`` under ``"next"``.

    Example:
        >>> next_key("observation")
        ('next', 'observation')
    """
    return (NEXT, *((key,) if isinstance(key, str) else key))

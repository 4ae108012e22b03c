"""Names of the TensorDict entries shared across recurl, and functions on keys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from recurl.core.errors import ArgumentTypeError

NestedKey: TypeAlias = str | tuple[str, ...]

ACTION = "action"
"""The action: one tensor, or nested entries, one for each part of a Dict or Tuple action space."""
ACTION_MASK = "action_mask"
"""Bool ``[*B, n]``, True for allowed choices: the n choices of a discrete action, or those of all its parts."""
ADVANTAGE = "advantage"
AGENT_ID = "agent_id"
"""One-hot index of the agent of a row, float32 ``[*B, n_agents]``."""
AGENT_MASK = "agent_mask"
"""Bool ``[*B, 1]``, False in rows whose agent takes no part in the step: nothing is learned there."""
COLLECTOR = "collector"
"""Root of the metadata of steps, written by collectors, buffers and rollouts."""
DONE = "done"
IS_INIT = "is_init"
LAST_STEP = ("collector", "last_step")
"""Flat index of the last token of the row's sequence, int64, at every token; for padded rows of one sequence each."""
MASK = ("collector", "mask")
NEXT = "next"
OBSERVATION = "observation"
PREVIOUS_ACTION = "previous_action"
PREVIOUS_REWARD = "previous_reward"
RESET = "_reset"
REWARD = "reward"
STATE = "state"
"""Observations of all agents of an environment, concatenated, for a central critic."""
STATE_VALUE = "state_value"
STORED = ("collector", "stored")
"""Stored values of the entries changed by sampling: the collected ``is_init`` is at ``(*STORED, "is_init")``."""
TERMINATED = "terminated"
TRAJ_IDS = ("collector", "traj_ids")
TRAJ_STEPS = ("collector", "traj_steps")
"""Index of a step within its trajectory, from 0: a token continues the previous one if its index is one higher."""
TRUNCATED = "truncated"
VALUE_TARGET = "value_target"
WEIGHTS_LAG = ("collector", "lag")
"""Number of versions by which the acting weights were older than the newest ones."""
WEIGHTS_VERSION = ("collector", "version")
"""Version number of the acting weights, from 0."""
DONE_KEYS = (DONE, TERMINATED, TRUNCATED)


def normalize_key(key: object) -> NestedKey:
    """Return ``key`` as a string, or as a flat tuple of strings when nested.

    Args:
        key: a non-empty string, or a (possibly nested) tuple of such strings.

    Raises:
        ArgumentTypeError: ``key`` is anything else, or empty.

    Example:
        >>> normalize_key(("agents", ("observation",)))
        ('agents', 'observation')
        >>> normalize_key(("observation",))
        'observation'
    """
    if type(key) is str and key:  # the common case
        return key
    if type(key) is tuple and len(key) == 2 and type(key[0]) is type(key[1]) is str and key[0] and key[1]:
        return key  # pyright: ignore[reportUnknownVariableType] - also common
    flat = tuple(_flatten(key))
    return flat[0] if len(flat) == 1 else flat


def _flatten(key: object) -> list[str]:
    if isinstance(key, str) and key:
        return [key]
    if isinstance(key, tuple) and key:
        return [part for item in key for part in _flatten(item)]  # pyright: ignore[reportUnknownVariableType] - narrowing object to tuple
    raise ArgumentTypeError(f"A key must be a non-empty string or a tuple of non-empty strings, got {key!r}.")


def path_of(key: NestedKey) -> tuple[str, ...]:
    """Return ``key`` as a tuple of names.

    Example:
        >>> path_of("observation"), path_of(("agents", "observation"))
        (('observation',), ('agents', 'observation'))
    """
    return (key,) if isinstance(key, str) else key


def dotted(key: NestedKey) -> str:
    """Return a key as written on the command line: the parts of a nested key are joined by dots.

    Example:
        >>> dotted(("agents", "observation")), dotted("observation")
        ('agents.observation', 'observation')
    """
    return key if isinstance(key, str) else ".".join(key)


def is_within(key: NestedKey, names: Iterable[NestedKey]) -> bool:
    """Return whether ``names`` contains ``key`` or an entry that ``key`` is nested in.

    Args:
        key: the key.
        names: keys; nested ones may be written with dots.

    Example:
        >>> is_within(("agents", "observation"), ["agents"]), is_within("agent", ["agents.observation"])
        (True, False)
    """
    path = dotted(key)
    return any(path == name or path.startswith(f"{name}.") for name in map(dotted, names))


def is_action(key: NestedKey) -> bool:
    """Return whether ``key`` is the action or a part of it.

    Example:
        >>> is_action("action"), is_action(("action", "move")), is_action("action_mask")
        (True, True, False)
    """
    return path_of(key)[0] == ACTION


def next_key(key: NestedKey) -> tuple[str, ...]:
    """Return ``key`` under ``"next"``.

    Example:
        >>> next_key("observation")
        ('next', 'observation')
    """
    return (NEXT, *path_of(key))

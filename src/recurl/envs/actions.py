"""Random actions, and the check that action masks allow a choice."""

from __future__ import annotations

from typing import Any

from recurl.core.errors import MissingKeyError, UsageError
from recurl.core.keys import ACTION_MASK
from recurl.core.specs import TensorSpec, choice_counts, masked_rand, rows_without_choice
from recurl.sequences.entries import Step

__all__ = ["check_choice", "random_action"]


def random_action(spec: TensorSpec, root: Step) -> Any:
    """Return random actions among the choices allowed by the mask in ``root``, drawn from torch's global generator.

    Args:
        spec: action spec of one environment.
        root: root of a step, ``[*B]``.

    Raises:
        MissingKeyError: ``root`` has no mask.
    """
    if ACTION_MASK not in root:
        raise MissingKeyError(
            f"A random action in an environment with masks needs {ACTION_MASK!r}: pass the root, as in "
            "env.rand_action(env.reset())."
        )
    return masked_rand(spec, root.get(ACTION_MASK))


def check_choice(spec: TensorSpec, root: Step) -> None:
    """Raise if the action mask of a root allows no choice.

    Args:
        spec: action spec of one environment.
        root: root of a step, with a mask.

    Raises:
        UsageError: a mask allows no choice; the message names the rows.
    """
    rows = rows_without_choice(root.get(ACTION_MASK), choice_counts(spec))
    if rows.any():
        where = f"environments {rows.flatten().nonzero().flatten().tolist()}" if rows.ndim else "the environment"
        raise UsageError(
            "At least one choice of every action must be allowed where an action is taken, but the mask of "
            f"{where} allows none: end the episode there (terminated), or allow a choice."
        )

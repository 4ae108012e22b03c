"""Spelling suggestions for error messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["nearest"]


def nearest(name: str, names: Iterable[str]) -> str:
    """Return ``" Did you mean ...?"`` with the name most similar to ``name``, or ``""`` if none is similar.

    Case is ignored only if there is no close match otherwise.

    Example:
        >>> nearest("wandbb", ["tensorboard", "wandb"])
        ' Did you mean wandb?'
        >>> nearest("colour", ["tensorboard", "wandb"])
        ''
        >>> nearest("GRU", ["lstm", "gru"])
        ' Did you mean gru?'
    """
    known = list(names)
    close = get_close_matches(name, known, 1)
    if not close:
        alike = get_close_matches(name.lower(), [one.lower() for one in known], 1)
        close = [one for one in known if one.lower() in alike]
    return f" Did you mean {close[0]}?" if close else ""

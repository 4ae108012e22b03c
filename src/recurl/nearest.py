"""Suggestion of the name that was meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["nearest"]


def nearest(name: str, names: Iterable[str]) -> str:
    """Return ``" Did you mean ...?"`` with the name that is most like ``name``, or nothing where none is.

    Example:
        >>> nearest("wandbb", ["tensorboard", "wandb"])
        ' Did you mean wandb?'
        >>> nearest("colour", ["tensorboard", "wandb"])
        ''
    """
    close = get_close_matches(name, list(names), 1)
    return f" Did you mean {close[0]}?" if close else ""

"""Shuffled decks of 52 cards each, and what a player sees of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from gymnasium.spaces import MultiBinary

from recurl.envs.tasks.namespaces import Draw, Namespace

CARDS = 52
KINDS = {"colors": 2, "suits": 4, "ranks": 13}
"""How many values each kind of a card's faces has."""
Kind: TypeAlias = Literal["colors", "suits", "ranks"]


def shuffle(xp: Namespace, draw: Draw, num_decks: int, kind: Kind) -> Any:
    """Return the faces of shuffled decks in the order in which they are dealt, int8 `[cards, rows]`.

    Args:
        xp: the namespace.
        draw: random numbers.
        num_decks: decks that are shuffled together.
        kind: which faces: `colors` from 0 to 1, `suits` to 3, or `ranks` to 12.

    Example:
        >>> import numpy as np
        >>> from recurl.envs.tasks.namespaces import HOST, RowDraw
        >>> suits = shuffle(HOST, RowDraw([np.random.default_rng(0)]), 1, "suits")
        >>> np.unique(suits, return_counts=True)[1]
        array([13, 13, 13, 13])
    """
    order = xp.argsort(draw.uniform(0.0, 1.0, (CARDS * num_decks,)), axis=0)  # cards that differ, as numbers
    faces = order // 4 if kind == "ranks" else order
    return xp.astype(faces % KINDS[kind], xp.int8)


def dealt(xp: Namespace, faces: Any, place: Any) -> Any:
    """Return the face at a place of every row's deck, `[rows]`; beyond the ends, those at the ends.

    Args:
        xp: the namespace.
        faces: `[cards, rows]`.
        place: integers `[rows]`.
    """
    return xp.pick(faces, xp.clip(place, 0, len(faces) - 1))


def one_hot_space(*sizes: int) -> MultiBinary:
    """Return the space of one-hot vectors of these sizes, one after the other."""
    return MultiBinary(sum(sizes))


def one_hot(xp: Namespace, values: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return the one-hot vectors of some values, one after the other, int8 `[rows, sum(sizes)]`.

    Args:
        xp: the namespace.
        values: integers or bool, `[rows]` each.
        sizes: how many values each can have.

    Example:
        >>> import numpy as np
        >>> from recurl.envs.tasks.namespaces import HOST
        >>> one_hot(HOST, [np.array([1, 0]), np.array([2, 0])], [2, 3])
        array([[0, 1, 0, 0, 1],
               [1, 0, 1, 0, 0]], dtype=int8)
    """
    bits = [value[:, None] == xp.arange(size) for value, size in zip(values, sizes, strict=True)]
    return xp.astype(bits[0] if len(bits) == 1 else xp.concat(bits, axis=1), xp.int8)


def score(xp: Namespace, right: Any, size: float) -> Any:
    """Return the rewards of answers: `size` for a right one, `-size` for a wrong one.

    Args:
        xp: the namespace.
        right: bool `[rows]`.
        size: the reward.
    """
    return xp.where(right, size, -size)

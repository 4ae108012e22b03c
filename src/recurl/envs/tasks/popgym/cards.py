"""Shuffled decks of 52 cards, and their one-hot observations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from gymnasium.spaces import MultiBinary

from recurl.envs.tasks.namespaces import Draw, Namespace

CARDS = 52
KINDS = {"colors": 2, "suits": 4, "ranks": 13}
"""Number of values of each kind of card face."""
Kind: TypeAlias = Literal["colors", "suits", "ranks"]


def shuffle(xp: Namespace, draw: Draw, num_decks: int, kind: Kind) -> Any:
    """Return the faces of shuffled decks in dealing order, int8 `[cards, rows]`.

    Args:
        xp: the namespace.
        draw: source of random numbers.
        num_decks: number of decks shuffled together.
        kind: kind of faces: `colors` from 0 to 1, `suits` to 3, or `ranks` to 12.

    Example:
        >>> import numpy as np
        >>> from recurl.envs.tasks.namespaces import HOST, RowDraw
        >>> suits = shuffle(HOST, RowDraw([np.random.default_rng(0)]), 1, "suits")
        >>> np.unique(suits, return_counts=True)[1]
        array([13, 13, 13, 13])
    """
    order = xp.argsort(draw.uniform(0.0, 1.0, (CARDS * num_decks,)), axis=0)  # distinct cards, as numbers
    faces = order // 4 if kind == "ranks" else order
    return xp.astype(faces % KINDS[kind], xp.int8)


def entry_at(xp: Namespace, faces: Any, place: Any) -> Any:
    """Return one entry per row, `[rows]`, such as a card of its deck; places out of range are clipped.

    Args:
        xp: the namespace.
        faces: table of entries, `[cards, rows]`.
        place: integers `[rows]`.
    """
    return xp.pick(faces, xp.clip(place, 0, len(faces) - 1))


def one_hot_space(*sizes: int) -> MultiBinary:
    """Return the space of concatenated one-hot vectors of the given sizes."""
    return MultiBinary(sum(sizes))


def one_hot(xp: Namespace, values: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return the concatenated one-hot vectors of several values, int8 `[rows, sum(sizes)]`.

    Args:
        xp: the namespace.
        values: integers or bool, `[rows]` each.
        sizes: number of possible values of each.

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
        size: magnitude of the reward.
    """
    return xp.where(right, size, -size)

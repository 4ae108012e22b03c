"""Cases of tests with two choices that have nothing to do with each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def paired(first: Iterable[Any], second: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return every value of ``first`` with one of ``second``, in turn, and the first of them with all.

    >>> paired("abc", [1, 2])
    [('a', 1), ('a', 2), ('b', 2), ('c', 1)]
    """
    return [
        (value, other)
        for index, value in enumerate(first)
        for place, other in enumerate(second)
        if index == 0 or place == index % len(second)
    ]

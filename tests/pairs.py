"""Test cases with two independent parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def paired(first: Iterable[Any], second: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Pair every value of ``first`` with one of ``second`` in turn, and its first value with all of them.

    >>> paired("abc", [1, 2])
    [('a', 1), ('a', 2), ('b', 2), ('c', 1)]
    """
    return [
        (value, other)
        for index, value in enumerate(first)
        for place, other in enumerate(second)
        if index == 0 or place == index % len(second)
    ]

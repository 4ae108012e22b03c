"""Items that can be made before they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Ahead(Iterator[_T], Generic[_T]):
    """Iterates over items, of which the next one can be made early.

    Args:
        items: makes an item when it is asked for the next.

    Example:
        >>> ahead = Ahead(map(print, "ab"))
        >>> ahead.fetch()
        a
        >>> [None for _ in ahead]
        b
        [None, None]
    """

    def __init__(self, items: Iterable[_T]) -> None:
        self._items = iter(items)
        self._fetched: list[_T] = []

    def fetch(self) -> None:
        """Make the next item, if there is one and it wasn't made."""
        if not self._fetched:
            self._fetched = list(islice(self._items, 1))

    def __next__(self) -> _T:
        self.fetch()
        if not self._fetched:
            raise StopIteration
        return self._fetched.pop()

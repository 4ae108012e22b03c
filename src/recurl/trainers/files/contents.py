"""Table of contents of a checkpoint: type, shape and checksum of every value."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, TypeAlias, cast

import torch

__all__ = ["Contents", "contents_of", "first_difference"]

Contents: TypeAlias = dict[str, str]
_PLAIN = (bool, int, float, str, bytes, type(None))


def contents_of(state: Any) -> Contents:
    """Return the table of contents of a state: tensors and plain values, nested in dicts, lists and tuples.

    Example:
        >>> contents_of({"weights": torch.ones(2, 3), "seen": [1, 2], "more": {"name": "x", "none": {}}})
        {'weights': 'float32 [2, 3], 29dd1225', 'seen': 'list of 2, ...', 'more/name': 'str, ...', 'more/none': ...}
    """
    return dict(_leaves(state, ""))


def first_difference(state: Any, contents: Contents) -> str | None:
    """Describe the first difference between ``state`` and the state that ``contents`` was made from, or return None.

    Example:
        >>> state = {"weights": torch.ones(2), "step": 3}
        >>> first_difference({"weights": torch.ones(3), "step": 3}, contents_of(state))
        'weights was float32 [2], is float32 [3]'
        >>> first_difference({"weights": torch.zeros(2), "step": 3}, contents_of(state))
        'weights has another value'
    """
    found = contents_of(state)
    for path in dict.fromkeys((*contents, *found)):
        was, now = (table.get(path, "absent") for table in (contents, found))
        if was != now:
            before, after = (str(kind).rpartition(", ")[0] or kind for kind in (was, now))
            return f"{path} has another value" if before == after else f"{path} was {before}, is {after}"
    return None


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, part in cast(dict[Any, Any], value).items():
            name = key if isinstance(key, str) else repr(key)
            yield from _leaves(part, f"{path}/{name}" if path else name)
    elif isinstance(value, list | tuple) and not all(isinstance(part, _PLAIN) for part in value):
        for index, part in enumerate(cast(list[Any], value)):
            yield from _leaves(part, f"{path}/{index}")
    else:
        yield path, f"{_kind(value)}, {_checksum(value):08x}"


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    name = type(value).__name__
    return f"{name} of {len(value)}" if isinstance(value, dict | list | tuple) else name


def _checksum(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        # A one-element tensor counts as contiguous whatever its stride, but viewing it as bytes needs stride 1.
        data: Any = flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy()
        return zlib.crc32(data)
    return zlib.crc32(repr(value).encode())

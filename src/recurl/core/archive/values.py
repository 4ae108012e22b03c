"""Values allowed in an archive: dense tensors and plain Python values, nested in dicts, lists, tuples and sets."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

from recurl.core.errors import ArgumentError, ArgumentTypeError

__all__ = ["DEPTH", "INTEGER_BYTES", "check_key", "is_plain", "parts_of", "savable"]

DEPTH = 100
"""Maximum depth of nested containers."""
INTEGER_BYTES = 255
"""Maximum number of bytes of an integer."""
_KEY_PARTS = 1000
_KEY_BYTES = 16
_PLAIN = (bool, int, float, complex, str, bytes, bytearray, type(None), torch.dtype, torch.device, torch.Size)
_DICTS = (dict, OrderedDict)
_LISTS = (list, tuple, set, frozenset)
_KEYS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_METADATA = "_metadata"


def is_plain(value: Any) -> bool:
    """Return whether a value is a plain value and not a container."""
    return type(value) in _PLAIN


def parts_of(value: Any) -> Iterable[Any] | None:
    """Return the values in a container, including a state dict's metadata; None if ``value`` is not a container."""
    if type(value) in _LISTS:
        return value
    if type(value) in _DICTS:
        noted = getattr(value, _METADATA, None)
        return value.values() if noted is None else [*value.values(), noted]
    return None


def check_key(key: Any) -> None:
    """Reject keys whose hash could be slow to compute or could collide with many others.

    Raises:
        ArgumentTypeError: the key is not a plain value or a tuple of plain values, or is too large.
    """
    if type(key) is str:
        return
    left, count = [key], 0
    while left:
        part = left.pop()
        count += 1
        if type(part) is tuple and count < _KEY_PARTS and len(cast(tuple[Any, ...], part)) < _KEY_PARTS:
            left += part
        elif type(part) not in _KEYS or (type(part) is int and part.bit_length() > 8 * _KEY_BYTES):
            raise ArgumentTypeError(
                f"A key must be a plain value or a small tuple of such values, got {type(part).__name__}."
            )


def savable(value: Any, path: str = "") -> Any:
    """Check that a value can be saved, and return it with tensors that repeat memory, as from ``expand``, copied.

    Args:
        value: the value to save; it is not modified.
        path: location of the value, for messages.

    Raises:
        ArgumentTypeError: it contains something that :func:`load_archive` can't read.
        ArgumentError: it is nested too deeply or in itself, or an integer is too large.
    """
    return _savable(value, path, 0)


def _savable(value: Any, path: str, depth: int) -> Any:
    if depth > DEPTH:
        raise ArgumentError(f"A saved value may have at most {DEPTH} nested containers; {path[:80]} has more.")
    kind = type(value)
    if kind is int:
        if value.bit_length() >= 8 * INTEGER_BYTES:
            raise ArgumentError(f"Integers must have at most {INTEGER_BYTES} bytes, but the one at {path} has more.")
        return value
    if kind in _PLAIN:
        return value
    if kind in _DICTS:
        items = cast(dict[Any, Any], value).items()
        found: dict[Any, Any] = {}
        for key, part in items:
            check_key(key)
            found[key] = _savable(part, f"{path}/{key}" if path else str(key), depth + 1)
        if kind is dict:
            return value if all(part is found[key] for key, part in items) else found
        return _noting(OrderedDict(found), _savable(getattr(value, _METADATA, None), path, depth + 1))
    if kind in _LISTS:
        parts: list[Any] = [_savable(part, f"{path}/{place}", depth + 1) for place, part in enumerate(value)]
        return value if all(map(_identical, parts, value)) else kind(parts)
    if isinstance(value, Tensor):
        return _dense(value, path)
    raise ArgumentTypeError(
        f"Only tensors and plain Python values, in dicts, lists, tuples and sets, can be saved; {path or 'this'} is "
        f"{kind.__module__}.{kind.__qualname__}: convert it."
    )


def _identical(one: object, other: object) -> bool:
    return one is other


def _noting(state: OrderedDict[Any, Any], noted: Any) -> OrderedDict[Any, Any]:
    if noted is not None:
        setattr(state, _METADATA, noted)
    return state


def _dense(value: Tensor, path: str) -> Tensor:
    if type(value) not in (Tensor, torch.nn.Parameter) or value.layout != torch.strided or value.is_quantized:
        what = (
            type(value).__name__ if value.layout == torch.strided and not value.is_quantized else "sparse or quantized"
        )
        raise ArgumentTypeError(f"Only dense tensors can be saved, but {path or 'this'} is {what}: convert it.")
    if value.is_meta:
        raise ArgumentTypeError(f"{path or 'This'} is on the device meta, and has no values to save.")
    if value.is_conj() or value.is_neg():
        return value.resolve_conj().resolve_neg()
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        return value.clone(memory_format=torch.contiguous_format)
    return value

"""Pickles for other processes, and errors that name the part that can't be pickled."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any

import cloudpickle

from recurl.errors import ArgumentTypeError

__all__ = ["pickled", "unpicklable_part"]


def pickled(name: str, value: object) -> bytes:
    """Return a pickle of ``value``, functions and classes of the main script by value.

    Args:
        name: what ``value`` is, for messages.
        value: any object.

    Raises:
        ArgumentTypeError: a part of it can't be pickled; the message names it.

    Example:
        >>> import threading
        >>> lock = threading.Lock()
        >>> pickled("create_env_fn", lambda: lock)
        Traceback (most recent call last):
        recurl.errors.ArgumentTypeError: ... must be picklable, but create_env_fn.lock is a lock: ...
    """
    try:
        return cloudpickle.dumps(value)
    except Exception as error:
        path, part = unpicklable_part(name, value)
        raise ArgumentTypeError(
            f"Objects that are sent to another process must be picklable, but {path} is a {type(part).__name__}: "
            f"{error}. Create what can't be pickled inside create_env_fn, which runs there."
        ) from error


def unpicklable_part(name: str, value: object) -> tuple[str, object]:
    """Return the innermost part of ``value`` that can't be pickled, after the path to it.

    Args:
        name: where the path begins.
        value: an object that can't be pickled.
    """
    seen = {id(value)}
    while True:
        for below, part in _parts(value):
            if id(part) not in seen and not _is_picklable(part):
                name, value = f"{name}{below}", part
                seen.add(id(part))
                break
        else:
            return name, value


def _is_picklable(value: object) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # noqa: BLE001 - whatever the object's own methods raise
        return False
    return True


def _parts(value: Any) -> Iterator[tuple[str, object]]:
    """Yield what an object consists of: its attributes, items, or the variables that a function uses."""
    if isinstance(value, functools.partial):
        yield ".func", value.func
        yield from _parts(value.args)
        yield from _parts(value.keywords)
    elif isinstance(value, MethodType):
        yield "", value.__self__
    elif inspect.isfunction(value):
        used = inspect.getclosurevars(value)
        yield from ((f".{name}", part) for name, part in {**used.globals, **used.nonlocals}.items())
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set):
        yield from ((f"[{place}]", part) for place, part in enumerate(value))
    else:
        yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())

"""Pickling for other processes, with errors that name the part that can't be pickled."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any

import cloudpickle

from recurl.core.errors import ArgumentTypeError

__all__ = ["pickled", "unpicklable_part"]


def pickled(name: str, value: object) -> bytes:
    """Pickle ``value``, with functions and classes of the main script by value.

    Args:
        name: name of ``value``, for error messages.
        value: any object.

    Raises:
        ArgumentTypeError: a part of ``value`` can't be pickled; the message names it.

    Example:
        >>> import threading
        >>> lock = threading.Lock()
        >>> pickled("create_env_fn", lambda: lock)
        Traceback (most recent call last):
        recurl.core.errors.ArgumentTypeError: ... must be picklable, but create_env_fn.lock is a lock: ...
    """
    try:
        return cloudpickle.dumps(value)
    except Exception as error:
        path, part = unpicklable_part(name, value)
        raise ArgumentTypeError(
            f"Objects that are sent to another process must be picklable, but {path} is a {type(part).__name__}: "
            f"{error}. Create unpicklable objects inside create_env_fn, which runs there."
        ) from error


def unpicklable_part(name: str, value: object) -> tuple[str, object]:
    """Return the path to the innermost part of ``value`` that can't be pickled, and the part.

    Args:
        name: start of the path.
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
    except Exception:  # noqa: BLE001 - the object's methods may raise anything
        return False
    return True


def _parts(value: Any) -> Iterator[tuple[str, object]]:
    """Yield the parts of an object: its attributes, its items, or the variables that a function uses."""
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

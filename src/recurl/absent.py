"""Errors for names and arguments of TorchRL that recurl does not have; they say what to write instead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from recurl.errors import ArgumentTypeError, MissingNameError

__all__ = ["absent_names", "without_arguments"]

_C = TypeVar("_C", bound=type)


def absent_names(module: str, **advice: str) -> Callable[[str], NoReturn]:
    """Return a ``__getattr__`` for ``module`` that raises with ``advice`` for each name.

    Example:
        >>> absent_names("shop", coffee="drink tea")("coffee")
        Traceback (most recent call last):
        recurl.errors.MissingNameError: shop has no coffee: drink tea.
    """

    def find(name: str) -> NoReturn:
        if name in advice:
            raise MissingNameError(f"{module} has no {name}: {advice[name]}.")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return find


def without_arguments(**advice: str) -> Callable[[_C], _C]:
    """Return a class decorator that makes the constructor raise with ``advice`` for each of these arguments.

    Example:
        >>> @without_arguments(sugar="it is sweet as it is")
        ... class Tea: ...
        >>> Tea(sugar=2)
        Traceback (most recent call last):
        recurl.errors.ArgumentTypeError: Tea has no argument 'sugar': it is sweet as it is.
    """

    def decorate(decorated: _C) -> _C:
        construct = decorated.__init__

        @functools.wraps(construct)
        def check(self: Any, *args: Any, **kwargs: Any) -> None:
            for name in kwargs.keys() & advice.keys():
                raise ArgumentTypeError(f"{decorated.__name__} has no argument {name!r}: {advice[name]}.")
            construct(self, *args, **kwargs)

        decorated.__init__ = check
        return decorated

    return decorate

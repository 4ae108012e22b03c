"""Lookup of private names of other packages, for the compatibility file of each package."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any, NoReturn, TypeVar, cast

from recurl.core.errors import UnsupportedError

__all__ = ["Absent", "find", "load", "needs"]

F = TypeVar("F", bound=Callable[..., Any])
_MISSING = object()


class Absent:
    """Stand-in for a private name that the installed release of a package lacks; it raises at its first use.

    Args:
        path: the name, ``module:attribute.attribute``.

    Example:
        >>> find("math:_sine")(0.0)
        Traceback (most recent call last):
        recurl.core.errors.UnsupportedError: Python ... has no math._sine, a private name that recurl needs here: ...
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise UnsupportedError."""
        raise absent_error(self._path)

    def __repr__(self) -> str:
        """Return the name."""
        return f"<absent {self._path}>"


def find(path: str, fallback: Any = _MISSING) -> Any:
    """Return the object of a private name; if it is missing, the fallback, or an :class:`Absent`.

    The object itself is returned, so that calling it costs nothing extra and ``torch.compile`` recognizes it.

    Args:
        path: the name, ``module:attribute.attribute``.
        fallback: object with the same results, if there is one.

    Example:
        >>> find("math:sin")(0.0)
        0.0
        >>> find("math:_sine")
        <absent math:_sine>
    """
    try:
        return load(path)
    except UnsupportedError:
        return Absent(path) if fallback is _MISSING else fallback


def load(path: str) -> Any:
    """Return the object of a private name, where it is used.

    Raises:
        UnsupportedError: the installed release lacks it.
    """
    module, _, names = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in names.split(".") if names else ():
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise absent_error(path) from error
    return found


def needs(*paths: str, fallback: Callable[..., Any] | None = None) -> Callable[[F], F]:
    """Return a decorator that replaces a function by the fallback, or by an :class:`Absent`, if a name is missing."""

    def decorate(function: F) -> F:
        for path in paths:
            if isinstance(find(path), Absent):
                return cast(F, Absent(path) if fallback is None else fallback)
        return function

    return decorate


def absent_error(path: str) -> UnsupportedError:
    """Return the error about a missing private name."""
    package = path.partition(":")[0].partition(".")[0]
    name = path.replace(":", ".").removesuffix(".")
    try:
        release, advice = f"{package} {version(package)}", f"install a release that recurl supports, {_range(package)}"
    except PackageNotFoundError:  # of the standard library
        release, advice = f"Python {platform.python_version()}", "use a release that recurl supports, or a newer recurl"
    return UnsupportedError(f"{release} has no {name}, a private name that recurl needs here: {advice}.")


def _range(package: str) -> str:
    """Return the releases of a package that recurl supports, as in ``torch>=2.11,<2.16``."""
    try:
        needed = [requirement.partition(";")[0].strip() for requirement in requires("recurl") or ()]
    except PackageNotFoundError:  # imported from a checkout
        needed = []
    found = (
        requirement for requirement in needed if requirement.removeprefix(package)[:1] in ("<", ">", "=", "~", "!")
    )
    return next(found, f"or a newer recurl: pip install --upgrade recurl {package}")

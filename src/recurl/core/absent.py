"""Errors for TorchRL names and arguments that recurl does not provide; the messages suggest replacements."""

from __future__ import annotations

import functools
import inspect
import opcode
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn, TypeVar

from recurl.core.errors import ArgumentTypeError, MissingAttributeError, MissingNameError
from recurl.core.torchrl_names import ABSENT

__all__ = ["absent_names", "without_arguments"]

_C = TypeVar("_C", bound=type)
_IMPORT_FROM = opcode.opmap["IMPORT_FROM"]


def absent_names(module: str) -> Callable[[str], NoReturn]:
    """Return a module ``__getattr__`` that raises with the advice in :data:`~recurl.core.torchrl_names.ABSENT`.

    ``from module import name`` raises :class:`MissingNameError`, an ``ImportError``. Any other access, such as
    ``module.name`` or ``hasattr``, raises :class:`MissingAttributeError`, an ``AttributeError``.

    Example:
        >>> absent_names("recurl.objectives")("TargetNetUpdater")
        Traceback (most recent call last):
        recurl.core.errors.MissingAttributeError: recurl.objectives has no TargetNetUpdater: write SoftUpdate or HardUpdate.
    """
    advice = ABSENT[module]

    def find(name: str) -> NoReturn:
        if name not in advice:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        # An import statement would replace an AttributeError by an ImportError with a generic message.
        kind = MissingNameError if _is_imported(inspect.currentframe()) else MissingAttributeError
        raise kind(f"{module} has no {name}: {advice[name]}.")

    return find


def _is_imported(frame: FrameType | None) -> bool:
    """Return whether the caller of ``frame`` is executing a ``from ... import ...``."""
    caller = frame and frame.f_back
    return caller is not None and caller.f_lasti >= 0 and caller.f_code.co_code[caller.f_lasti] == _IMPORT_FROM


def without_arguments(**advice: str) -> Callable[[_C], _C]:
    """Return a class decorator whose constructor raises with ``advice`` if one of these arguments is passed.

    Example:
        >>> @without_arguments(sugar="it is sweet as it is")
        ... class Tea: ...
        >>> Tea(sugar=2)
        Traceback (most recent call last):
        recurl.core.errors.ArgumentTypeError: Tea has no argument 'sugar': it is sweet as it is.
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

"""Messages: suggestions for misspelled names, advice for arguments of TorchRL, output of other libraries held back."""

from __future__ import annotations

import functools
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, TypeVar

from recurl.core.errors import ArgumentTypeError, RecurlWarning

__all__ = ["nearest", "quiet", "quiet_if_failing", "warn_once", "without_arguments"]


def nearest(name: str, names: Iterable[str]) -> str:
    """Return ``" Did you mean ...?"`` with the name most similar to ``name``, or ``""`` if none is similar.

    Case is ignored only if there is no close match otherwise.

    Example:
        >>> nearest("wandbb", ["tensorboard", "wandb"])
        ' Did you mean wandb?'
        >>> nearest("colour", ["tensorboard", "wandb"])
        ''
        >>> nearest("GRU", ["lstm", "gru"])
        ' Did you mean gru?'
    """
    known = list(names)
    close = get_close_matches(name, known, 1)
    if not close:
        alike = get_close_matches(name.lower(), [one.lower() for one in known], 1)
        close = [one for one in known if one.lower() in alike]
    return f" Did you mean {close[0]}?" if close else ""


_C = TypeVar("_C", bound=type)


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


_STDERR = 2
_said = set[str]()


def warn_once(text: str) -> None:
    """Issue a :class:`~recurl.core.errors.RecurlWarning`, unless this process has issued the same before.

    Python's own record of what was issued is lost whenever a block catches warnings.
    """
    if text not in _said:
        warnings.warn(text, RecurlWarning, stacklevel=3)
        _said.add(text)


@contextmanager
def quiet(logger: str, level: int) -> Generator[None]:
    """Suppress warnings, and messages of a logger below ``level``, inside the block.

    A logger that was set up to say more than warnings, as by TORCH_LOGS, stays so.

    Example:
        >>> with quiet("noisy", logging.ERROR):
        ...     logging.getLogger("noisy").warning("never seen")
    """
    log = logging.getLogger(logger)
    before = log.level
    if not log.isEnabledFor(logging.INFO):
        log.setLevel(level)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        log.setLevel(before)


@contextmanager
def quiet_if_failing() -> Generator[None]:
    """Buffer the process's stderr, including that of C++ code, inside the block; discard it if the block raises.

    Compilers may print pages of internal state before they fail, below Python's logging. If the block succeeds, the
    output is written at its end.

    Example:
        >>> import sys
        >>> with quiet_if_failing():
        ...     print("at the end", file=sys.stderr)
    """
    try:
        before = os.dup(_STDERR)
    except OSError:  # no stderr
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), _STDERR)
        try:
            yield
        finally:
            os.dup2(before, _STDERR)
            os.close(before)
        held.seek(0)
        os.write(_STDERR, held.read())

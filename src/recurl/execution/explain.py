"""Explanations of what runs in which form, and why not in a faster one."""

from __future__ import annotations

import re
from collections.abc import Callable

from recurl.core.messages import warn_once

__all__ = ["CompilerFailed", "Explanation", "NotCompiled", "compiler_failed", "first_line", "reason_of"]

_MOST_SAID = 200  # characters


class NotCompiled(Exception):
    """Raised where a faster form of a function can't run; the message is the reason."""


class CompilerFailed(NotCompiled):
    """Raised where a compiler failed on a program, which is not compiled again."""


def compiler_failed(what: str, error: Exception) -> CompilerFailed:
    """Return the exception to raise if a compiler failed on a program; warn that it runs uncompiled, in one line.

    Args:
        what: the program, such as ``"the optimizer step"``. The same failure is reported only once.
        error: what the compiler raised; pages of it, often.
    """
    reason = first_line(error)
    warn_once(
        f"The compiler failed on {what} ({reason}), so it runs uncompiled: slower, with the same results up to "
        "rounding. Another version of torch, Triton or the C++ compiler may compile it; --no-compile doesn't try."
    )
    return CompilerFailed(f"the compiler failed ({reason})")


def first_line(error: Exception) -> str:
    """Return what a compiler said, in one line: the last one of a traceback, else the first one, and a C++ error.

    Example:
        >>> text = ["C++ compile error", "", "Command:", "g++ a.cpp", "", "Output:", "a.cpp:1: error: not an int"]
        >>> first_line(RuntimeError(chr(10).join(text)))
        'RuntimeError: C++ compile error: a.cpp:1: error: not an int'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "TORCH" not in line]
    if any(line.startswith("Traceback") for line in lines):
        lines = lines[-1:]
    said = ": ".join([*lines[:1], *[line for line in lines[1:] if "error:" in line][:1]])
    if not re.match(r"[A-Z]\w+: ", said):
        said = f"{type(error).__name__}: {said}".rstrip(": ")
    return said[:_MOST_SAID]


class Explanation(dict[str, str | None]):
    """The faster forms of a computation, fastest first, each with the reason why it isn't used, or None if it is.

    Attributes:
        what: the computation.
        otherwise: name of the form that always works.

    Example:
        >>> found = Explanation("steps", {"in place": "actions are masked", "cpp": None, "tensors": None})
        >>> found.form, found["in place"]
        ('cpp', 'actions are masked')
        >>> print(found)
        steps: cpp (not in place: actions are masked)
    """

    def __init__(self, what: str, forms: dict[str, str | None], otherwise: str = "TensorDicts") -> None:
        super().__init__(forms)
        self.what, self.otherwise = what, otherwise

    @property
    def form(self) -> str:
        """Name of the fastest form that is used."""
        return next((name for name, reason in self.items() if reason is None), self.otherwise)

    def __str__(self) -> str:
        missing: dict[str, list[str]] = {}
        for name, reason in self.items():
            if reason is None:
                break
            missing.setdefault(reason, []).append(name)
        said = "; ".join(f"not {' or '.join(names)}: {reason}" for reason, names in missing.items())
        return f"{self.what}: {self.form}{f' ({said})' if said else ''}"


def reason_of(attempt: Callable[[], object]) -> str | None:
    """Return the reason why ``attempt`` raises :class:`NotCompiled`, or None if it doesn't.

    Example:
        >>> def attempt():
        ...     raise NotCompiled("it draws random numbers")
        >>> reason_of(attempt)
        'it draws random numbers'
    """
    try:
        attempt()
    except NotCompiled as reason:
        return str(reason)
    return None

"""What a check found, and how checks are written."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec

P = ParamSpec("P")

# What a policy or an environment that is wired wrongly may raise; anything else is a mistake in this package.
PROBLEMS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check.

    Attributes:
        name: of the check: ``"replay"`` for :func:`~recurl.diagnostics.check_replay`.
        passed: whether all was as it must be.
        detail: what was seen.
        fix: what to do, with code to type; empty when the check passed.

    Example:
        >>> print(CheckResult("is_init", False, "always False", "env.append_transform(InitTracker())"))
        FAIL  is_init      always False
              fix: env.append_transform(InitTracker())
    """

    name: str
    passed: bool
    detail: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"{'ok' if self.passed else 'FAIL':6}{self.name:12} {self.detail}"
        return line if self.passed else f"{line}\n      fix: {self.fix}"


class Fault(Exception):
    """Raised inside a check: what is wrong, and the fix."""

    def __init__(self, detail: str, fix: str) -> None:
        super().__init__(detail)
        self.detail = detail
        self.fix = fix


def check(name: str) -> Callable[[Callable[P, str]], Callable[P, CheckResult]]:
    """Make a check of a function that returns what it saw, or raises a :class:`Fault`.

    Any other error that a policy or environment raises inside is a failure of the check too.
    """

    def decorate(function: Callable[P, str]) -> Callable[P, CheckResult]:
        @functools.wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> CheckResult:
            try:
                return CheckResult(name, True, function(*args, **kwargs))
            except Fault as fault:
                return CheckResult(name, False, fault.detail, fault.fix)
            except PROBLEMS as error:
                return CheckResult(name, False, f"raised {one_line(error)}", "repair what this error names")

        return wrapped

    return decorate


def one_line(error: BaseException) -> str:
    """Return the kind and the text of an error, without line breaks."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"

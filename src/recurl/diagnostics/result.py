"""Results of checks, and the decorator that defines a check."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec

P = ParamSpec("P")

# Exceptions that a miswired policy or environment may raise; any other exception is a bug in this package.
PROBLEMS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class CheckResult:
    """Outcome of one check.

    Attributes:
        name: name of the check: ``"replay"`` for :func:`~recurl.diagnostics.check_replay`.
        passed: whether the check passed.
        detail: description of the finding.
        fix: suggested fix, with code; empty if the check passed.

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
    """Exception that fails a check, with a description of the fault and a fix."""

    def __init__(self, detail: str, fix: str) -> None:
        super().__init__(detail)
        self.detail = detail
        self.fix = fix


def check(name: str) -> Callable[[Callable[P, str]], Callable[P, CheckResult]]:
    """Return a decorator that turns a function into a check.

    The function returns a description of its finding, or raises a :class:`Fault`. The check also fails if a policy or
    environment raises one of :data:`PROBLEMS`.

    Args:
        name: name of the check.
    """

    def decorate(function: Callable[P, str]) -> Callable[P, CheckResult]:
        @functools.wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> CheckResult:
            try:
                return CheckResult(name, True, function(*args, **kwargs))
            except Fault as fault:
                return CheckResult(name, False, fault.detail, fault.fix)
            except PROBLEMS as error:
                return CheckResult(name, False, f"raised {one_line(error)}", "fix the cause of this error")

        return wrapped

    return decorate


def one_line(error: BaseException) -> str:
    """Return the class and message of an error without line breaks."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"

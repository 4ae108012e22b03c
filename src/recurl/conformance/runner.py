"""Running the checks, and the matrix of several libraries."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from recurl.conformance.adapter import Adapter, NotOffered
from recurl.conformance.checks import CHECKS, Check
from recurl.conformance.scenes import Failed

Outcome: TypeAlias = Literal["passed", "failed", "documented", "not offered"]


@dataclass(frozen=True)
class Verdict:
    """Result of a check.

    Attributes:
        check: the check.
        outcome: ``"documented"`` is a failure that the library documents as its behavior.
        detail: what was found, or why the library doesn't offer it.
    """

    check: Check
    outcome: Outcome
    detail: str = ""

    def __str__(self) -> str:
        line = f"{self.outcome:12} {self.check.name}"
        return line if not self.detail else f"{line}: {self.detail}"


def run_checks(adapter: Adapter, names: Sequence[str] = ()) -> Iterator[Verdict]:
    """Run checks of a library, one after the other.

    Args:
        adapter: the library.
        names: names of checks; by default all.

    Example:
        >>> from recurl.conformance.adapters.recurl import Recurl
        >>> for verdict in run_checks(Recurl(), ["memory", "replay"]):
        ...     print(verdict)
        passed       memory
        passed       replay
    """
    for check in CHECKS.values():
        if not names or check.name in names:
            yield _verdict(adapter, check)


def _verdict(adapter: Adapter, check: Check) -> Verdict:
    try:
        check.run(adapter)
    except NotOffered as reason:
        return Verdict(check, "not offered", str(reason))
    except Failed as found:
        documented = adapter.documented.get(check.name)
        if documented is not None:
            return Verdict(check, "documented", f"{found} ({documented})")
        return Verdict(check, "failed", str(found))
    except Exception as error:  # noqa: BLE001 - any, of the library under test
        return Verdict(check, "failed", f"raised {type(error).__name__}: {brief(error)}{_where(error, adapter)}")
    return Verdict(check, "passed")


def brief(error: BaseException) -> str:
    """Return the message of an error as a line."""
    return " ".join(str(error).split())[:300]


def _where(error: BaseException, adapter: Adapter) -> str:
    """Name the last line of the adapter's file that led to an error, if any."""
    file = getattr(sys.modules.get(type(adapter).__module__), "__file__", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" ({Path(str(file)).name}, line {lines[-1]})" if lines else ""


def summary(verdicts: Iterable[Verdict]) -> str:
    """Count the outcomes in a line."""
    outcomes = [verdict.outcome for verdict in verdicts]
    kinds: tuple[Outcome, ...] = ("passed", "failed", "documented", "not offered")
    return ", ".join(f"{outcomes.count(kind)} {kind}" for kind in kinds if kind in outcomes)

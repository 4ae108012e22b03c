"""Results of several libraries: a CSV file, and the matrix of it."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from recurl.conformance.checks import CHECKS

_MARKS = {"passed": "yes", "failed": "**no**", "documented": "no (documented)", "not offered": "-"}


@dataclass(frozen=True)
class Result:
    """Result of a check of a library; a row of the file.

    Attributes:
        library: name of the library.
        versions: versions of the packages under test.
        check: name of the check.
        outcome: see :class:`~recurl.conformance.runner.Verdict`.
        detail: what was found.
        date: the day, as ISO 8601.
    """

    library: str
    versions: str
    check: str
    outcome: str
    detail: str
    date: str


def read_results(path: Path) -> list[Result]:
    """Read a results file, which may not exist yet."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [Result(**row) for row in csv.DictReader(file)]


def results_text(results: Iterable[Result]) -> str:
    """Write results as CSV."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [field.name for field in fields(Result)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(result) for result in results)
    return text.getvalue()


def updated(old: Sequence[Result], new: Sequence[Result]) -> list[Result]:
    """Return results in which new ones have replaced those of the same library and check.

    Example:
        >>> one = Result("a", "a 1", "replay", "failed", "", "2026-11-01")
        >>> two = Result("a", "a 2", "replay", "passed", "", "2026-11-02")
        >>> updated([one], [two]) == [two]
        True
    """
    replaced = {(result.library, result.check) for result in new}
    return [result for result in old if (result.library, result.check) not in replaced] + list(new)


def matrix(results: Sequence[Result]) -> str:
    """Return the results as a table in Markdown: a row per check, a column per library."""
    libraries = list(dict.fromkeys(result.library for result in results))
    found = {(result.library, result.check): _MARKS[result.outcome] for result in results}
    lines = [_line(["check", *libraries]), _line(["---"] * (len(libraries) + 1))]
    group = ""
    for check in CHECKS.values():
        if check.group != group:
            group = check.group
            lines.append(_line([f"**{group}**", *[""] * len(libraries)]))
        lines.append(_line([check.name, *(found.get((library, check.name), "") for library in libraries)]))
    counts = [_count(results, library) for library in libraries]
    return "\n".join([*lines, _line(["passed / offered", *counts])])


def _count(results: Sequence[Result], library: str) -> str:
    outcomes = [result.outcome for result in results if result.library == library]
    return f"{outcomes.count('passed')} / {len(outcomes) - outcomes.count('not offered')}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"

"""``recurl conformance``: checks of recurrent correctness of a library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import tyro

from recurl.cli.arguments import parse_arguments
from recurl.conformance.adapters import ADAPTERS
from recurl.conformance.checks import CHECKS
from recurl.conformance.matrix import Result, matrix, read_results, results_text, updated
from recurl.conformance.runner import Verdict, summary
from recurl.core.errors import ArgumentError
from recurl.core.messages import nearest
from recurl.trainers.files.durable import write_atomic


@dataclass(frozen=True)
class Conformance:
    """Check by experiment how a library with recurrent PPO handles hidden states.

    The library collects and learns in scripted environments, whose episodes end where a check needs it. Without
    arguments: the known libraries, and what is checked. Exit code 1 if a check fails.
    """

    library: Annotated[str | None, tyro.conf.Positional] = None
    """Name of a library, or module:Class of your adapter (see the documentation)."""
    only: tuple[str, ...] = ()
    """Names of checks, or of their groups; by default all."""
    python: Path = Path(sys.executable)
    """Interpreter that has the library; it needs NumPy and Gymnasium, but not recurl."""
    out: Path | None = None
    """CSV file in which the results replace those of the same library."""
    table: Path | None = None
    """Only show the matrix of the results in this CSV file, as Markdown."""


def read(arguments: list[str]) -> Conformance:
    """Parse the arguments."""
    return parse_arguments(Conformance, arguments, prog="recurl conformance")


def run(args: Conformance) -> int:
    """Run the checks of a library, or show what there is."""
    if args.table is not None:
        if not args.table.exists():
            raise ArgumentError(f"--table: there is no file {args.table}: --out writes it.")
        print(matrix(_read(args.table)))
        return 0
    if args.library is None:
        print(f"libraries: {', '.join(ADAPTERS)}, or module:Class")
        for group in _groups():
            print(group)
            print("\n".join(f"  {check.name:34} {check.text}" for check in CHECKS.values() if check.group == group))
        return 0
    only = _checks_of(args.library, args.only)
    old = [] if args.out is None else _read(args.out)
    if args.out is not None:
        write_atomic(args.out, results_text(old).encode())  # a folder that can't be written is found before all checks
    verdicts: list[Verdict] = []
    versions = ""
    for entry in _answers(args.library, only, args.python):
        if "versions" in entry:
            versions = " ".join(f"{name} {version}" for name, version in entry["versions"].items())
            print(versions, flush=True)
        else:
            verdicts.append(Verdict(CHECKS[entry["check"]], entry["outcome"], entry["detail"]))
            print(verdicts[-1], flush=True)
    print(summary(verdicts))
    if args.out is not None:
        date = datetime.now(UTC).date().isoformat()
        new = [Result(args.library, versions, each.check.name, each.outcome, each.detail, date) for each in verdicts]
        write_atomic(args.out, results_text(updated(old, new)).encode())
    return 1 if any(verdict.outcome == "failed" for verdict in verdicts) else 0


def _groups() -> list[str]:
    return list(dict.fromkeys(check.group for check in CHECKS.values()))


def _checks_of(library: str, only: tuple[str, ...]) -> list[str]:
    """Return the names of the checks to run."""
    if library not in ADAPTERS:
        module, colon, kind = library.partition(":")
        if not colon:
            known = ", ".join(ADAPTERS)
            hint = nearest(library, ADAPTERS)
            raise ArgumentError(f"There is no adapter for {library!r}, but for {known}; yours is module:Class.{hint}")
        if not all(part.isidentifier() for part in [*module.split("."), kind]) or module.endswith(".py"):
            raise ArgumentError(
                f"Your adapter must be module:Class, such as package.my_adapter:MyLibrary for the class MyLibrary in "
                f"package/my_adapter.py, got {library!r}."
            )
    known = [*CHECKS, *_groups()]
    for name in only:
        if name not in known:
            raise ArgumentError(f"--only: there is no check {name!r}: see recurl conformance.{nearest(name, known)}")
    return [check.name for check in CHECKS.values() if not only or check.name in only or check.group in only]


def _read(path: Path) -> list[Result]:
    try:
        return read_results(path)
    except (OSError, TypeError, ValueError) as error:
        raise ArgumentError(f"{path} isn't a file of recurl conformance: {error}") from None


def _answers(library: str, checks: Sequence[str], python: Path) -> Iterator[dict[str, Any]]:
    """Run checks in another process and yield its answers."""
    left = list(checks)
    source = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(path for path in (source, os.getcwd(), os.environ.get("PYTHONPATH")) if path)
    command = [str(python), "-m", "recurl.conformance.worker", library, *checks]
    with tempfile.TemporaryFile("w+") as errors:
        try:
            worker = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, "PYTHONPATH": paths}
            )
        except OSError as error:
            raise ArgumentError(f"--python {python} can't be run: {error.strerror}.") from None
        with worker:
            assert worker.stdout is not None
            try:
                for line in worker.stdout:
                    entry = json.loads(line)
                    if "error" in entry:
                        raise ArgumentError(f"The adapter of {library} can't be used: {entry['error']}")
                    if "check" in entry:
                        left.remove(entry["check"])
                    yield entry
            except BaseException:
                worker.kill()
                raise
        if worker.returncode or left:
            errors.seek(0)
            said = errors.read().strip().splitlines() or ["it said nothing"]
            place = f" before the end of {left[0]}" if left else ""
            raise ArgumentError(f"The process of {library} ended with code {worker.returncode}{place}: {said[-1]}")

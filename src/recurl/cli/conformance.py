"""``recurl conformance``: checks of recurrent correctness of a library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
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
    """Names of the checks to run; by default all."""
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
        print(matrix(_read(args.table)))
        return 0
    if args.library is None:
        print(f"libraries: {', '.join(ADAPTERS)}, or module:Class")
        print("\n".join(f"  {check.name:34} {check.text}" for check in CHECKS.values()))
        return 0
    _check_names(args.library, args.only)
    old = [] if args.out is None else _read(args.out)
    verdicts: list[Verdict] = []
    versions = ""
    for entry in _answers(args.library, args.only, args.python):
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


def _check_names(library: str, only: tuple[str, ...]) -> None:
    if library not in ADAPTERS and ":" not in library:
        known = ", ".join(ADAPTERS)
        hint = nearest(library, ADAPTERS)
        raise ArgumentError(f"There is no adapter for {library!r}, but for {known}; yours is module:Class.{hint}")
    for name in only:
        if name not in CHECKS:
            raise ArgumentError(f"--only: there is no check {name!r}: see recurl conformance.{nearest(name, CHECKS)}")


def _read(path: Path) -> list[Result]:
    try:
        return read_results(path)
    except (OSError, TypeError, ValueError) as error:
        raise ArgumentError(f"{path} isn't a file of recurl conformance: {error}") from None


def _answers(library: str, only: tuple[str, ...], python: Path) -> Iterator[dict[str, Any]]:
    """Run the checks in another process and yield its answers."""
    source = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(path for path in (source, os.getcwd(), os.environ.get("PYTHONPATH")) if path)
    command = [str(python), "-m", "recurl.conformance.worker", library, *only]
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
                        raise ArgumentError(f"The adapter of {library} can't be imported: {entry['error']}")
                    yield entry
            except BaseException:
                worker.kill()
                raise
        if worker.returncode:
            errors.seek(0)
            said = errors.read().strip().splitlines() or ["it said nothing"]
            raise ArgumentError(f"The process of {library} ended with code {worker.returncode}: {said[-1]}")

"""Process that runs the checks of one library, in the interpreter that has it.

``python -m recurl.conformance.worker ADAPTER [CHECK ...]`` prints lines of JSON: the versions, then the verdicts. It
imports NumPy, Gymnasium and what the adapter needs. What the library prints goes to the standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recurl.conformance.adapter import Adapter
from recurl.conformance.adapters import ADAPTERS
from recurl.conformance.checks import CHECKS
from recurl.conformance.runner import brief, run_checks


def find_adapter(name: str) -> Adapter:
    """Return an adapter by the name of its library, or by ``module:Class``.

    Raises:
        TypeError: it lacks an attribute of :class:`~recurl.conformance.adapter.Adapter`.
        ValueError: it documents the failure of a check that doesn't exist.
        Exception: it can't be imported or created.
    """
    own = ADAPTERS.get(name)
    module, _, kind = (name if own is None else f"recurl.conformance.adapters.{own}").partition(":")
    adapter = getattr(importlib.import_module(module), kind)()
    missing = [each for each in ("gamma", "lmbda", "versions", "documented", "make") if not hasattr(adapter, each)]
    if missing:
        raise TypeError(f"an adapter has gamma, lmbda, versions, documented and make; it lacks {', '.join(missing)}")
    for attribute in ("versions", "documented"):
        if not isinstance(found := getattr(adapter, attribute), Mapping):
            raise TypeError(f"{attribute} of an adapter must be a dictionary, got {found!r}")
    unknown = [check for check in adapter.documented if check not in CHECKS]
    if unknown:
        raise ValueError(f"it documents {', '.join(unknown)}, which aren't names of checks")
    return adapter


def main(name: str, checks: list[str]) -> None:
    """Run checks and print the verdicts."""
    lines = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    warnings.simplefilter("ignore")

    def say(**entries: Any) -> None:
        print(json.dumps(entries), file=lines, flush=True)

    try:
        adapter = find_adapter(name)
    except Exception as error:  # noqa: BLE001 - any, of another's module
        say(error=f"{type(error).__name__}: {brief(error)}{_origin(error)}")
        return
    say(versions=dict(adapter.versions))
    for verdict in run_checks(adapter, checks):
        say(check=verdict.check.name, outcome=verdict.outcome, detail=verdict.detail)


def _origin(error: Exception) -> str:
    """Name the line that raised an error, if it is neither this file's nor one of the import system."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    ours = (
        frame.filename == __file__ or frame.filename.startswith("<") or Path(frame.filename) == Path(importlib.__file__)
    )
    return "" if ours else f" ({Path(frame.filename).name}, line {frame.lineno})"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

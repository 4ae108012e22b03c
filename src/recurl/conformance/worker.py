"""Process that runs the checks of one library, in the interpreter that has it.

``python -m recurl.conformance.worker ADAPTER [CHECK ...]`` prints lines of JSON: the versions, then the verdicts. It
imports NumPy, Gymnasium and what the adapter needs. What the library prints goes to the standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from typing import Any

from recurl.conformance.adapter import Adapter
from recurl.conformance.adapters import ADAPTERS
from recurl.conformance.runner import run_checks


def find_adapter(name: str) -> Adapter:
    """Return an adapter by the name of its library, or by ``module:Class``.

    Raises:
        ImportError: it can't be imported.
        AttributeError: the module has no such class.
    """
    own = ADAPTERS.get(name)
    module, _, kind = (name if own is None else f"recurl.conformance.adapters.{own}").partition(":")
    return getattr(importlib.import_module(module), kind)()


def main(name: str, checks: list[str]) -> None:
    """Run checks and print the verdicts."""
    lines = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    warnings.simplefilter("ignore")

    def say(**entries: Any) -> None:
        print(json.dumps(entries), file=lines, flush=True)

    try:
        adapter = find_adapter(name)
    except (ImportError, AttributeError) as error:
        say(error=f"{type(error).__name__}: {error}")
        return
    say(versions=dict(adapter.versions))
    for verdict in run_checks(adapter, checks):
        say(check=verdict.check.name, outcome=verdict.outcome, detail=verdict.detail)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

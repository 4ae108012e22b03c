"""Attack runs in many ways, and count the outcomes; writes results/torture.csv.

Each kind of attack is a module of ``torture_kinds`` with a ``COUNT``, the default number of attacks, and a function
``attack(number, place)``, which performs the attack with that number in a given folder and returns a description of the
attack and its outcome, or raises ``Broken``. A number determines an attack. Completed attacks are recorded in the
folder, so that an interrupted torture can be resumed. Needs Linux and enough memory for twenty processes. Usage::

    python benchmarks/torture.py                        # every kind, an hour
    python benchmarks/torture.py kills --count 20       # some of one kind
    python benchmarks/torture.py kills --only 7         # repeat one attack
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import os
import pkgutil
import platform
import shutil
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import torture_kinds
from results_file import commit
from torture_kinds.forks import Broken

RESULTS = Path(__file__).parent / "results" / "torture.csv"
FIELDS = ("date", "commit", "device", "torch", "kind", "what", "attacks", "broken", "outcomes", "seconds")


def kinds() -> dict[str, ModuleType]:
    """Return the modules of ``torture_kinds`` that have an attack."""
    names = [module.name for module in pkgutil.iter_modules(torture_kinds.__path__)]
    modules = {name: importlib.import_module(f"torture_kinds.{name}") for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "attack")}


def main() -> None:
    found = kinds()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="*", metavar="KIND", help=f"of {', '.join(found)}; all by default")
    parser.add_argument("--count", type=int, help="number of attacks of each kind")
    parser.add_argument("--only", type=int, help="run only this attack, and keep its folder")
    parser.add_argument("--place", type=Path, default=Path("build/torture"), help="folder of the runs")
    options = parser.parse_args()
    unknown = set(options.kind) - set(found)
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}, only {', '.join(found)}")
    torch.set_num_threads(1)
    for name in options.kind or found:
        if options.only is not None:
            print(name, options.only, *once(found[name], options.only, options.place / name, keep=True))
        else:
            torture(name, found[name], options.count or found[name].COUNT, options.place)


def torture(name: str, module: ModuleType, count: int, place: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    notes = place / f"{name}.jsonl"
    made = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    known = {note["number"] for note in made}
    with notes.open("a") as file:
        for number in sorted(set(range(count)) - known):
            start = time.perf_counter()
            what, outcome = once(module, number, place / name, keep=False)
            note = {"number": number, "what": what, "outcome": outcome, "seconds": time.perf_counter() - start}
            print(f"{name} {number:4d} of {count}: {what}: {outcome}", flush=True)
            file.write(json.dumps(note) + "\n")
            file.flush()
            made.append(note)
    write(name, [note for note in made if note["number"] < count])


def once(module: ModuleType, number: int, place: Path, *, keep: bool) -> tuple[str, str]:
    """Run an attack in a separate folder, which is kept if the attack broke something."""
    folder = place / f"{number:05d}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        what, outcome = module.attack(number, folder)
    except Broken as error:
        return error.what, f"BROKEN: {error}"
    if not keep:
        shutil.rmtree(folder)
    return what, outcome


def write(name: str, notes: list[dict[str, Any]]) -> None:
    """Replace the rows of a kind, one per attacked operation."""
    rows: list[dict[str, Any]] = []
    if RESULTS.exists():
        with RESULTS.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["kind"] != name]
    for what in sorted({note["what"] for note in notes}):
        mine = [note for note in notes if note["what"] == what]
        outcomes = Counter(note["outcome"].partition(":")[0] for note in mine)
        rows.append(
            {
                "date": datetime.now(UTC).date().isoformat(),
                "commit": commit(),
                "device": f"{platform.machine()} CPU, {os.cpu_count()} cores",
                "torch": torch.__version__,
                "kind": name,
                "what": what,
                "attacks": len(mine),
                "broken": outcomes.pop("BROKEN", 0),
                "outcomes": ", ".join(f"{outcome} {number}" for outcome, number in sorted(outcomes.items())),
                "seconds": f"{sum(note['seconds'] for note in mine):.0f}",
            }
        )
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: (row["kind"], row["what"])))


if __name__ == "__main__":
    main()

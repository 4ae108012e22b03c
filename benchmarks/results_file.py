"""Tables of results, whose rows are tagged with a commit."""

from __future__ import annotations

import csv
import subprocess
from pathlib import Path
from typing import Any

import recurl


def commit() -> str:
    """Return the commit of recurl, with "-dirty" if the package has uncommitted changes."""
    folder = str(Path(recurl.__file__).parent)
    asked = (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--", folder])
    name, changes = (
        subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, check=False).stdout.strip()
        for words in asked
    )
    return f"{name}-dirty" if changes else name


def append(path: Path, row: dict[str, Any]) -> None:
    """Add a row to a table, which is created if missing."""
    path.parent.mkdir(exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)

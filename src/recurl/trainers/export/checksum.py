"""The description beside an exported policy, and the check of the file against its SHA-256."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, cast

from recurl.errors import ArgumentError
from recurl.untrusted import read_json


def check_export(path: Path) -> dict[str, Any]:
    """Verify a file that :func:`export_run` wrote, and return its description, ``<file>.json``.

    The file must have the SHA-256 that is written there: a damaged one, or one that doesn't belong to it, is refused.

    Raises:
        ArgumentError: it does not, or one of the two can't be read.
    """
    try:
        data, about = path.read_bytes(), read_json(description_of(path))
    except OSError as error:
        raise ArgumentError(f"{error.filename} can't be read ({error.strerror}): export the run again.") from error
    except ValueError as error:
        raise ArgumentError(f"{description_of(path)} is not JSON ({error}): export the run again.") from error
    expected = about.get("sha256") if isinstance(about, dict) else None
    if expected != sha256(data):
        raise ArgumentError(
            f"{path} must have the SHA-256 in {description_of(path).name}, {expected}, got {sha256(data)}: it was "
            "damaged, or is another file; export the run again."
        )
    return cast(dict[str, Any], about)


def description_of(path: Path) -> Path:
    """Return the path of the description that lies beside an exported policy."""
    return path.with_name(path.name + ".json")


def sha256(data: bytes) -> str:
    """Return the SHA-256 of ``data`` in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()

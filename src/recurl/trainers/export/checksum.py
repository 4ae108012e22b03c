"""Description file of an exported policy and verification of its SHA-256."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, cast

from recurl.core.errors import ArgumentError
from recurl.core.untrusted import read_json


def check_export(path: Path) -> dict[str, Any]:
    """Verify a file written by :func:`export_run` or :func:`export_policy` and return its description, ``<file>.json``.

    The SHA-256 of the file must match the one in the description, so damaged or mismatched files are rejected.

    Raises:
        ArgumentError: the checksums differ, or one of the two files can't be read.
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
            f"{path} must have the SHA-256 in {description_of(path).name}, {expected}, got {sha256(data)}: it is "
            "damaged or a different file; export the run again."
        )
    return cast(dict[str, Any], about)


def description_of(path: Path) -> Path:
    """Return the path of the description file of an exported policy."""
    return path.with_name(path.name + ".json")


def sha256(data: bytes) -> str:
    """Return the SHA-256 of ``data`` in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()

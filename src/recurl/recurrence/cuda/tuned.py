"""The fastest kernels as measured on this machine's GPU, in a file that ``recurl bench rnn --tune`` writes.

The file holds for one version of recurl, torch and Triton, and one kind of GPU; other entries are ignored.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from recurl._version import __version__
from recurl.core.cache import cache_folder
from recurl.core.errors import StorageError
from recurl.recurrence.cuda.hardware import Hardware

__all__ = ["Measured", "best", "path", "save"]

_NEAR = 1.5  # a batch has at most this many times the measured rows, or as much fewer


class Measured(NamedTuple):
    """The fastest family for a layer.

    Attributes:
        cell: name of the cell.
        hidden: H.
        precision: precision of the recurrent products.
        rows: rows of the batch.
        family: name of the family, or ``"portable"``.
    """

    cell: str
    hidden: int
    precision: str
    rows: int
    family: str


def path() -> Path:
    """Return the path of the file, in :func:`recurl.core.cache.cache_folder`."""
    return cache_folder() / "kernels.json"


def best(hardware: Hardware, cell: str, hidden: int, precision: str, rows: int) -> str | None:
    """Return the family that was fastest for this layer with about as many rows, or None if none was measured."""
    near = [
        entry
        for entry in _entries(hardware)
        if entry[:3] == (cell, hidden, precision) and max(entry.rows, rows) <= _NEAR * min(entry.rows, rows)
    ]
    return min(near, key=lambda entry: abs(math.log(entry.rows / rows))).family if near else None


def save(hardware: Hardware, measured: Iterable[Measured]) -> None:
    """Add entries to the file; they replace those of the same layers, and take effect at once in this process."""
    kept = {entry[:4]: entry for entry in (*_entries(hardware), *measured)}
    known = _read()
    known[_key(hardware)] = [entry._asdict() for entry in kept.values()]
    target = path()
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps(known, indent=1))
    draft.replace(target)
    _entries.cache_clear()


@cache
def _entries(hardware: Hardware) -> tuple[Measured, ...]:
    if not hardware.name:
        return ()
    try:
        return tuple(Measured(**entry) for entry in _read().get(_key(hardware), ()))
    except (StorageError, TypeError, AttributeError) as error:
        warnings.warn(f"The tuned kernels are not used: {path()} is damaged ({error}). Delete it.", stacklevel=2)
        return ()


def _read() -> dict[str, list[dict[str, Any]]]:
    try:
        return json.loads(path().read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StorageError(f"{path()} is not a file of tuned kernels ({error}): delete it") from error


def _key(hardware: Hardware) -> str:
    triton = importlib.metadata.version("triton")
    return f"{hardware.name}, recurl {__version__}, torch {torch.__version__}, triton {triton}"

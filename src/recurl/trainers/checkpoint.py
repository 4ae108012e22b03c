"""Checkpoints: written in one piece or not at all, and read without running code from the file."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from recurl.errors import ArgumentError

FORMAT_VERSION = 2
_SUFFIX = ".pt"
_KEPT = 2


def save_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write ``state`` as the checkpoint of environment step ``step``; the two newest are kept.

    The file appears under its name only when it is complete and on disk.

    Args:
        folder: where checkpoints go; made when missing.
        step: environment steps taken so far; it names the file.
        state: tensors and plain Python values, nested in dicts, lists and tuples.

    Returns:
        Path of the new file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as name:
        ...     path = save_checkpoint(Path(name), 1024, {"weights": torch.ones(2)})
        ...     load_checkpoint(path)["weights"]
        tensor([1., 1.])
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{step:012d}{_SUFFIX}"
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save({"format_version": FORMAT_VERSION, **state}, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    for old in _checkpoints(folder)[:-_KEPT]:
        old.unlink()
    return path


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU, running no code from it.

    Raises:
        ArgumentError: the file is missing, broken, or of another format version.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ArgumentError(f"There is no checkpoint {path}.") from error
    except (RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise ArgumentError(
            f"The checkpoint {path} is broken or not a checkpoint: delete it to go on from the one before, if any."
        ) from error
    version = state.get("format_version") if isinstance(state, dict) else None
    if version != FORMAT_VERSION:
        raise ArgumentError(
            f"The checkpoint {path} must have format version {FORMAT_VERSION}, got {version}: "
            "read it with the version of recurl that wrote it."
        )
    return state


def latest_checkpoint(folder: Path) -> Path:
    """Return the newest checkpoint in ``folder``.

    Raises:
        ArgumentError: there is none.
    """
    found = _checkpoints(folder)
    if not found:
        raise ArgumentError(f"There is no checkpoint in {folder}: the run stopped before its first; train it anew.")
    return found[-1]


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"*{_SUFFIX}") if path.stem.isdigit())

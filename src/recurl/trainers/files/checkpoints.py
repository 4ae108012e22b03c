"""Checkpoints: written atomically, verified when read, free of executable code."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from recurl.core.archive import read_archive, savable, save_archive
from recurl.core.errors import ArgumentError, RecurlError
from recurl.core.untrusted import open_regular
from recurl.trainers.files.contents import contents_of, first_difference
from recurl.trainers.files.durable import make_folder, remove_partials, replacing, sync_folder, writing

FORMAT_VERSION = 2
_SUFFIX = ".pt"
_ABOUT = ("format_version", "contents")  # keys reserved by the checkpoint format
_TRIES = 20
_SECONDS = 0.05
_LONGEST = 300


class _DamagedError(ArgumentError):
    """The file differs from the one that was written."""


def save_checkpoint(folder: Path, step: int, state: dict[str, Any], *, keep: int = 2) -> Path:
    """Save ``state`` as the checkpoint of environment step ``step``, and remove older checkpoints.

    The file appears under its name only once it is complete and on disk. Checkpoints of later steps, left from before
    the run was rolled back, are removed.

    Args:
        folder: folder of the checkpoints; created if missing.
        step: environment steps taken so far, which determine the file name.
        state: tensors and plain Python values, nested in dicts, lists and tuples.
        keep: number of checkpoints to keep, including this one.

    Returns:
        Path of the new file.

    Raises:
        StorageError: if it can't be written; existing checkpoints stay intact.
        ArgumentTypeError: if ``state`` contains other types, which can't be loaded.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import torch
        >>> from recurl.trainers.files.checkpoints import load_checkpoint
        >>> with tempfile.TemporaryDirectory() as name:
        ...     path = save_checkpoint(Path(name), 1024, {"weights": torch.ones(2)})
        ...     load_checkpoint(path)["weights"]
        tensor([1., 1.])
    """
    content = savable({name: value for name, value in state.items() if name not in _ABOUT})
    make_folder(folder)
    path = folder / f"{step:012d}{_SUFFIX}"
    with replacing(path) as file:
        save_archive({"format_version": FORMAT_VERSION, "contents": contents_of(content), **content}, file)
    found = _checkpoints(folder)
    kept = found[: found.index(path) + 1][-keep:]
    with writing(folder):
        for old in found:
            if old not in kept:
                old.unlink(missing_ok=True)
    remove_partials(folder)
    sync_folder(folder)
    return path


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Load a checkpoint onto the CPU and verify its contents, without running code from it.

    Raises:
        ArgumentError: if the file is missing, damaged, modified, or of another format version.
    """
    try:
        return _load(path)
    except FileNotFoundError as error:
        raise ArgumentError(f"There is no checkpoint {path}.") from error
    except _DamagedError as error:
        raise ArgumentError(f"{error} Use the previous checkpoint, or a copy.") from error


def latest_checkpoint(folder: Path) -> Path:
    """Return the path of the newest checkpoint in ``folder``.

    Raises:
        ArgumentError: if there is none.
    """
    found = _checkpoints(folder)
    if not found:
        raise ArgumentError(
            f"There is no checkpoint in {folder}: the run stopped before its first one; train it again."
        )
    return found[-1]


def load_newest(folder: Path, notify: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    """Load the newest undamaged checkpoint in ``folder``; a run may be writing others at the same time.

    Args:
        folder: checkpoint folder of a run.
        notify: called with a notice if newer checkpoints are damaged.

    Returns:
        Its path and content.

    Raises:
        ArgumentError: if there is none, all are damaged, or it is of another format version.
    """
    for _ in range(_TRIES):
        latest_checkpoint(folder)
        try:
            return _newest(folder, notify)
        except FileNotFoundError:  # the run has meanwhile written a newer one and removed this one
            time.sleep(_SECONDS)
    raise ArgumentError(
        f"The checkpoints in {folder} disappear while they are read: copy the folder, and read the copy."
    )


def _newest(folder: Path, notify: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    damaged: list[str] = []
    for path in reversed(_checkpoints(folder)):
        try:
            state = _load(path)
        except _DamagedError as error:
            damaged.append(str(error))
            continue
        if damaged:
            notify(f"{' '.join(damaged)} Using the previous one, {path.name}.")
        return path, state
    raise ArgumentError(f"{' '.join(damaged)} There is no other: restore one from a copy, or train again.")


@contextmanager
def restoring(path: Path) -> Generator[None]:
    """Context manager that reports errors while restoring a checkpoint as a mismatch with the run.

    Raises:
        ArgumentError: in place of any error other than recurl's own.
    """
    try:
        yield
    except (RecurlError, MemoryError):
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        reason = reason if len(reason) <= _LONGEST else f"{reason[:_LONGEST]}..."
        raise ArgumentError(f"The checkpoint {path} doesn't fit the run's config.json: {reason}") from error


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"*{_SUFFIX}") if path.stem.isascii() and path.stem.isdigit())


def _load(path: Path) -> dict[str, Any]:
    state = _unpacked(path)
    version = state.get("format_version") if isinstance(state, dict) else None
    if version != FORMAT_VERSION:
        raise ArgumentError(
            f"The checkpoint {path} must have format version {FORMAT_VERSION}, got {version}: "
            "read it with the version of recurl that wrote it."
        )
    state = cast(dict[str, Any], state)
    contents = state.pop("contents", None)  # absent from runs of earlier versions
    if contents is None:
        return state
    content = {name: value for name, value in state.items() if name not in _ABOUT}
    difference = (
        first_difference(content, contents) if isinstance(contents, dict) else "its table of contents is invalid"
    )
    if difference is not None:
        raise _DamagedError(
            f"The checkpoint {path} was modified after it was written ({difference}): only unmodified files written by "
            "recurl.trainers.checkpoint.save_checkpoint can be loaded."
        )
    return state


def _unpacked(path: Path) -> Any:
    try:
        with open_regular(path) as file:
            return read_archive(file)
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
    except ArgumentError as error:
        reason = str(error)
    reason = reason if len(reason) <= _LONGEST else f"{reason[:_LONGEST]}..."
    raise _DamagedError(f"The checkpoint {path} is broken or not a checkpoint ({reason}).")

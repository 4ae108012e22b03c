"""Checkpoints: written whole or not at all, verified when read, never executed."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from recurl.archive import read_archive, savable, save_archive
from recurl.errors import ArgumentError, RecurlError
from recurl.trainers.files.contents import changed, contents_of
from recurl.trainers.files.durable import make_folder, remove_partials, replacing, sync_folder, writing
from recurl.untrusted import open_regular

FORMAT_VERSION = 2
_SUFFIX = ".pt"
_ABOUT = ("format_version", "contents")  # a checkpoint's own keys
_TRIES = 20
_SECONDS = 0.05
_LONGEST = 300


class _DamagedError(ArgumentError):
    """The file differs from what was written."""


def save_checkpoint(folder: Path, step: int, state: dict[str, Any], *, keep: int = 2) -> Path:
    """Write ``state`` as the checkpoint of environment step ``step``; it and the one before are kept.

    The file appears under its name only when it is complete and on disk. Those of later steps, which the run has gone
    back from, are removed.

    Args:
        folder: where checkpoints go; made when missing.
        step: environment steps taken so far; it names the file.
        state: tensors and plain Python values, nested in dicts, lists and tuples.
        keep: checkpoints that are kept, this one included.

    Returns:
        Path of the new file.

    Raises:
        StorageError: it can't be written; the checkpoints that are there stay as they are.
        ArgumentTypeError: ``state`` holds something else, which could not be read again.

    Example:
        >>> import tempfile
        >>> import torch
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
    """Read a checkpoint onto the CPU, verify its contents, and run no code from it.

    Raises:
        ArgumentError: the file is missing, damaged, changed since it was written, or of another format version.
    """
    try:
        return _load(path)
    except FileNotFoundError as error:
        raise ArgumentError(f"There is no checkpoint {path}.") from error
    except _DamagedError as error:
        raise ArgumentError(f"{error} Take the one before, or a copy.") from error


def latest_checkpoint(folder: Path) -> Path:
    """Return the newest checkpoint in ``folder``.

    Raises:
        ArgumentError: there is none.
    """
    found = _checkpoints(folder)
    if not found:
        raise ArgumentError(f"There is no checkpoint in {folder}: the run stopped before its first; train it anew.")
    return found[-1]


def load_newest(folder: Path, notify: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    """Read the newest checkpoint in ``folder`` that is undamaged, while a run may be writing others.

    Args:
        folder: the checkpoints of a run.
        notify: called when it is not the newest of all.

    Returns:
        Its path and what it holds.

    Raises:
        ArgumentError: there is none, all are damaged, or it is of another format version.
    """
    for _ in range(_TRIES):
        latest_checkpoint(folder)
        try:
            return _newest(folder, notify)
        except FileNotFoundError:  # the run has written a newer one and removed this
            time.sleep(_SECONDS)
    raise ArgumentError(f"The checkpoints in {folder} vanish while they are read: copy the folder, and read the copy.")


def _newest(folder: Path, notify: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    damaged: list[str] = []
    for path in reversed(_checkpoints(folder)):
        try:
            state = _load(path)
        except _DamagedError as error:
            damaged.append(str(error))
            continue
        if damaged:
            notify(f"{' '.join(damaged)} The one before it is taken, {path.name}.")
        return path, state
    raise ArgumentError(f"{' '.join(damaged)} There is no other: put one back from a copy, or train anew.")


@contextmanager
def fitting(path: Path) -> Generator[None]:
    """Turn errors of restoring a checkpoint, inside the block, into one that says that it doesn't fit the run.

    Raises:
        ArgumentError: instead of any error but those of recurl.
    """
    try:
        yield
    except (RecurlError, MemoryError):
        raise
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        said = said if len(said) <= _LONGEST else f"{said[:_LONGEST]}..."
        raise ArgumentError(f"The checkpoint {path} doesn't fit the run's config.json: {said}") from error


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
    contents = state.pop("contents", None)  # runs of old have none
    if contents is None:
        return state
    content = {name: value for name, value in state.items() if name not in _ABOUT}
    difference = changed(content, contents) if isinstance(contents, dict) else "its table of contents is none"
    if difference is not None:
        raise _DamagedError(
            f"The checkpoint {path} was changed after it was written ({difference}): only what "
            "recurl.trainers.checkpoint.save_checkpoint writes is read."
        )
    return state


def _unpacked(path: Path) -> Any:
    try:
        with open_regular(path) as file:
            return read_archive(file)
    except FileNotFoundError:
        raise
    except OSError as error:
        wrong = error.strerror or str(error)
    except ArgumentError as error:
        wrong = str(error)
    wrong = wrong if len(wrong) <= _LONGEST else f"{wrong[:_LONGEST]}..."
    raise _DamagedError(f"The checkpoint {path} is broken or not a checkpoint ({wrong}).")

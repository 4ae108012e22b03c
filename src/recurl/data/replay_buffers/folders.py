"""Folders of memory-mapped tensors, written with checksums and read without running any code in them."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from recurl.archive import load_archive, save_archive
from recurl.errors import ArgumentError, RecurlError
from recurl.keys import NestedKey

__all__ = ["flat_tensordict", "fresh_folder", "load_folder", "map_tensors", "readable", "seal_folder", "tensor_leaves"]

Entries: TypeAlias = dict[NestedKey, Tensor]
_CONTENTS = "contents.pt"
_CHUNK = 1 << 22


def tensor_leaves(data: TensorDictBase) -> Entries:
    """Return the tensors of a TensorDict, by key."""
    return cast(Entries, dict(data.items(True, True)))


def flat_tensordict(entries: Entries, batch_size: torch.Size) -> TensorDict:
    """Return a TensorDict of ``entries``, which may have nested keys."""
    result = TensorDict({}, batch_size)
    for key, value in entries.items():
        result.set(key, value)
    return result


def map_tensors(items: Entries, batch_size: torch.Size, path: Path) -> Entries:
    """Return memory-mapped zeros in files under ``path``, readable by ``TensorDict.load_memmap``.

    Args:
        items: one example item of each entry, for shapes and dtypes.
        batch_size: number of items, followed by the batch size of one item.
        path: folder of the files; created if missing.
    """
    likes = {key: item.cpu().expand(batch_size[0], *item.shape) for key, item in items.items()}
    mapped = flat_tensordict(likes, batch_size).memmap_like(path)
    # The same memory as plain tensors: the class of memory-mapped tensors makes every operation slower.
    return {key: value.as_subclass(Tensor) for key, value in tensor_leaves(mapped).items()}


@contextmanager
def fresh_folder(path: Path) -> Generator[Path]:
    """Yield an empty folder, which replaces ``path`` once the block has ended without an error."""
    new, old = path.with_name(path.name + ".new"), path.with_name(path.name + ".old")
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    new.mkdir(parents=True)
    yield new
    if path.exists():
        path.rename(old)
    new.rename(path)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def readable(what: str) -> Generator[None]:
    """Convert errors caused by malformed saved values to ArgumentError.

    Args:
        what: the saved object, as the subject of the message.

    Raises:
        ArgumentError: the block raised an error that isn't recurl's own.
    """
    try:
        yield
    except RecurlError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise ArgumentError(f"{what} can't be read, {type(error).__name__}: {error}") from error


def seal_folder(path: Path, facts: dict[str, Any]) -> None:
    """Save the checksums of all files under ``path``, and ``facts`` (plain values), in a file beside them."""
    files = {name: _checksum(path / name) for name in _names(path)}
    save_archive({"facts": facts, "files": files}, path / _CONTENTS)


def load_folder(path: Path) -> tuple[TensorDict, dict[str, Any]]:
    """Return the memory-mapped TensorDict in a folder, and the facts that :func:`seal_folder` saved with it.

    A folder without checksums, written by an earlier version, is read without checks; the facts are then empty.

    Raises:
        ArgumentError: the folder is missing, its files are damaged, or they hold anything but tensors.
    """
    facts: dict[str, Any] = {}
    if (path / _CONTENTS).exists():
        contents = load_archive(path / _CONTENTS)
        try:
            facts, files = dict(contents["facts"]), dict(contents["files"])
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(f"{path / _CONTENTS} must hold the checksums of the files beside it.") from error
        for name in sorted(files.keys() | _names(path)):
            if name not in files or not (path / name).is_file() or _checksum(path / name) != files[name]:
                raise ArgumentError(f"{path / name} is damaged: its checksum differs from the saved one.")
    try:
        data = TensorDict.load_memmap(path, allow_pickle=False)
    except Exception as error:  # tensordict raises many classes, depending on the contents of the folder
        raise ArgumentError(f"{path} must be a folder of memory-mapped tensors: {error}") from error
    if any(type(part) is not TensorDict for part in _parts(data)):
        raise ArgumentError(f"{path} must hold a TensorDict of tensors and nothing else.")
    return data, facts


def _parts(data: Any) -> Iterator[Any]:
    """Yield ``data`` and all values in it that are not tensors, at any depth."""
    yield data
    if type(data) is TensorDict:
        for value in data.values():
            if not isinstance(value, Tensor):
                yield from _parts(value)


def _names(path: Path) -> set[str]:
    files = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    return files - {_CONTENTS}


def _checksum(path: Path) -> list[int]:
    """Return length and CRC32 of a file."""
    length = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            length, crc = length + len(chunk), zlib.crc32(chunk, crc)
    return [length, crc]

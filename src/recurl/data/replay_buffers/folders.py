"""Folders of memory-mapped tensors, written with checksums and read without executing code."""

from __future__ import annotations

import json
import math
import mmap
import os
import shutil
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, cast
from urllib.parse import unquote

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from recurl.core.archive import load_archive, save_archive
from recurl.core.errors import ArgumentError, RecurlError, UsageError
from recurl.core.keys import NestedKey
from recurl.core.untrusted import check_folder, open_regular

__all__ = ["flat_tensordict", "fresh_folder", "load_folder", "map_tensors", "readable", "seal_folder", "tensor_leaves"]

Entries: TypeAlias = dict[NestedKey, Tensor]
_CONTENTS = "contents.pt"
_METADATA, _SUFFIX = "meta.json", ".memmap"
_TYPE = "<class 'tensordict._td.TensorDict'>"
_CHUNK = 1 << 22
_LONGEST = 1 << 24
_DEPTH = 50
_DIMENSIONS = 64


def tensor_leaves(data: TensorDictBase) -> Entries:
    """Return the tensors of a TensorDict by key."""
    return cast(Entries, dict(data.items(True, True)))


def flat_tensordict(entries: Entries, batch_size: torch.Size) -> TensorDict:
    """Return a TensorDict of ``entries``, which may have nested keys."""
    result = TensorDict({}, batch_size)
    for key, value in entries.items():
        result.set(key, value)
    return result


def map_tensors(items: Entries, batch_size: torch.Size, path: Path) -> Entries:
    """Create memory-mapped zeros in files under ``path``, readable by ``TensorDict.load_memmap``.

    Args:
        items: an example item of each entry, for shapes and dtypes.
        batch_size: number of items, followed by the batch size of one item.
        path: folder of the files; created if missing.
    """
    likes = {key: item.cpu().expand(batch_size[0], *item.shape) for key, item in items.items()}
    mapped = flat_tensordict(likes, batch_size).memmap_like(path)
    # Plain tensors over the same memory: the class of memory-mapped tensors slows down every operation.
    return {key: value.as_subclass(Tensor) for key, value in tensor_leaves(mapped).items()}


@contextmanager
def fresh_folder(path: Path) -> Generator[Path]:
    """Yield an empty folder, which replaces ``path`` when the block ends without an error.

    Raises:
        UsageError: ``path`` is a link or a file.
    """
    new, old = path.with_name(path.name + ".new"), path.with_name(path.name + ".old")
    for folder in (path, new, old):
        try:
            check_folder(folder)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UsageError(f"{folder} can't be replaced ({error.strerror}): use another folder.") from error
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
        ArgumentError: the block raised an error other than a :class:`~recurl.core.errors.RecurlError`.
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
    """Save the checksums of all files under ``path``, and ``facts`` (plain values), in an additional file there."""
    files = {name: _checksum(path / name) for name in _names(path)}
    save_archive({"facts": facts, "files": files}, path / _CONTENTS)


def load_folder(path: Path) -> tuple[TensorDict, dict[str, Any]]:
    """Return the memory-mapped TensorDict in a folder, and the facts saved with it by :func:`seal_folder`.

    A folder without checksums, from an earlier version, is read without checks; the facts are then empty.

    Raises:
        ArgumentError: the folder is missing, its files are damaged, or they contain anything but tensors.
    """
    facts: dict[str, Any] = {}
    names = _names(path)
    if _CONTENTS in names:
        contents = load_archive(path / _CONTENTS)
        names.remove(_CONTENTS)
        try:
            facts, files = dict(contents["facts"]), dict(contents["files"])
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(f"{path / _CONTENTS} must hold the checksums of the other files there.") from error
        for name in sorted({*map(str, files), *names}):
            if name not in files or name not in names or not _has_checksum(path / name, files[name]):
                raise ArgumentError(f"{path / name} is damaged: its checksum differs from the saved one.")
    return _read_tensordict(path, 0), facts


def _read_tensordict(path: Path, depth: int) -> TensorDict:
    """Read a TensorDict written by ``memmap``, in memory private to this process: files are never changed."""
    about = _read_metadata(path / _METADATA)
    if about.get("_type") != _TYPE or depth > _DEPTH:
        raise ArgumentError(
            f"{path} must hold a TensorDict of tensors and nothing else, got {str(about.get('_type'))[:80]}."
        )
    data = TensorDict({}, _shape(about.get("shape"), path))
    folders, files = _by_key(path)
    for key, entry in about.items():
        if not isinstance(entry, dict):
            continue
        if "type" not in entry:
            data.set(key, _mapped(files.get(key), f"{path} ({key[:80]})", cast(dict[str, Any], entry)))
        elif key in folders:
            data.set(key, _read_tensordict(folders[key], depth + 1))
    return data


def _by_key(path: Path) -> tuple[dict[str, Path], dict[str, Path]]:
    """Return subfolders and tensor files by key; names are percent-encoded."""
    folders: dict[str, Path] = {}
    files: dict[str, Path] = {}
    for found in path.iterdir():
        table = files if found.suffix == _SUFFIX else folders
        name = found.name.removesuffix(_SUFFIX)
        table.setdefault(name, found)  # unencoded, as written by earlier versions of tensordict
        table["" if name == "%" else unquote(name)] = found
    return folders, files


def _read_metadata(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as file:
            about = json.loads(file.read(_LONGEST))
    except OSError as error:
        raise ArgumentError(
            f"{path.parent} must be a folder of memory-mapped tensors, but {path.name} can't be read: {error.strerror}."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{path} must hold the shapes of memory-mapped tensors: it is not JSON.") from error
    if not isinstance(about, dict):
        raise ArgumentError(f"{path} must hold the shapes of memory-mapped tensors, got {type(about).__name__}.")
    return cast(dict[str, Any], about)


def _mapped(file: Path | None, what: str, entry: dict[str, Any]) -> Tensor:
    """Return the tensor in a file, whose length must match its shape."""
    name = str(entry.get("dtype"))
    dtype = getattr(torch, name.removeprefix("torch."), None) if name.startswith("torch.") else None
    if not isinstance(dtype, torch.dtype) or entry.get("is_nested"):
        raise ArgumentError(f"{what} must be a dense tensor of a dtype of torch, not of {name[:80]}.")
    shape = _shape(entry.get("shape"), what)
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    if file is None:
        raise ArgumentError(f"The file of {what} is missing.")
    try:
        with open_regular(file) as opened:
            length = os.fstat(opened.fileno()).st_size
            if length != size:
                raise ArgumentError(f"{file} must have {size:,} bytes for {dtype} {list(shape)}, but has {length:,}.")
            memory = mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ArgumentError(f"{file} can't be read: {error.strerror}.") from error
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _shape(value: Any, what: Path | str) -> torch.Size:
    sizes: list[Any] = cast(list[Any], value) if isinstance(value, list) else [None]
    if len(sizes) > _DIMENSIONS or any(type(size) is not int or not 0 <= size < 1 << 48 for size in sizes):
        raise ArgumentError(f"{what} must have a shape of natural numbers, got {str(value)[:80]}.")
    return torch.Size(sizes)


def _names(path: Path) -> set[str]:
    """Return the names of all files under a folder, and raise for anything but files and folders."""
    names: set[str] = set()
    left = [path]
    while left:
        folder = left.pop()
        try:
            check_folder(folder)
            entries = list(os.scandir(folder))
        except OSError as error:
            raise ArgumentError(f"{folder} must be a folder of memory-mapped tensors: {error.strerror}.") from error
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                left.append(Path(entry.path))
            elif entry.is_file(follow_symlinks=False):
                names.add(Path(entry.path).relative_to(path).as_posix())
            else:
                raise ArgumentError(f"{entry.path} must be a file or a folder, but is a link or something else.")
    return names


def _has_checksum(path: Path, expected: Any) -> bool:
    """Return whether a file has a length and CRC32; length is compared first, as a long file may be slow to read."""
    return path.lstat().st_size == expected[0] and _checksum(path) == expected


def _checksum(path: Path) -> list[int]:
    """Return the length and CRC32 of a file."""
    length = crc = 0
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK):
            length, crc = length + len(chunk), zlib.crc32(chunk, crc)
    return [length, crc]

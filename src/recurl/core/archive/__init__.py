"""Files of tensors and plain Python values, verified when read and loaded without executing code.

The format is that of ``torch.save``. The files are read by recurl's own interpreter, whose time and memory are
proportional to the size of the file, regardless of its contents.
"""

from __future__ import annotations

import zlib
from io import BytesIO
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.serialization import get_crc32_options, set_crc32_options

from recurl.core.archive.container import DamageError, Member, check_crc, read_directory, read_member, verify_member
from recurl.core.archive.pickles import ContentError, read_values
from recurl.core.archive.values import savable
from recurl.core.devices import total_memory
from recurl.core.errors import ArgumentError
from recurl.core.untrusted import open_regular

__all__ = ["ContentError", "DamageError", "damage", "load_archive", "read_archive", "savable", "save_archive"]

_PICKLE, _ORDER = "data.pkl", "byteorder"


def save_archive(value: Any, file: Path | IO[bytes]) -> None:
    """Write ``value`` with ``torch.save``, always with checksums (torch's setting is ignored and kept).

    Args:
        value: dense tensors and plain Python values, nested in dicts, lists, tuples and sets.
        file: destination, a path or a binary file open for writing.

    Raises:
        ArgumentTypeError: ``value`` contains anything else, which :func:`load_archive` would reject.
        ArgumentError: ``value`` is nested too deeply, or contains itself.
    """
    value = savable(value)
    before = get_crc32_options()
    set_crc32_options(True)
    try:
        torch.save(value, file)
    finally:
        set_crc32_options(before)


def load_archive(path: Path) -> Any:
    """Load a file written by :func:`save_archive` to the CPU.

    Checksums are verified before any data is used. Only tensors and plain values are read.

    Raises:
        ArgumentError: the file is missing, can't be read, is damaged, or contains anything else.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from recurl.core.archive import save_archive
        >>> with tempfile.TemporaryDirectory() as name:
        ...     path = Path(name) / "weights.pt"
        ...     save_archive({"weights": torch.ones(2)}, path)
        ...     load_archive(path)
        {'weights': tensor([1., 1.])}
    """
    try:
        with open_regular(path) as file:
            return read_archive(file)
    except FileNotFoundError as error:
        raise ArgumentError(f"There is no file {path}.") from error
    except OSError as error:
        raise ArgumentError(f"{path} can't be read: {error.strerror or error}.") from error
    except DamageError as error:
        raise ArgumentError(f"{path} is damaged, or is not a file of recurl: {error}.") from error
    except ContentError as error:
        raise ArgumentError(
            f"{path} must hold tensors and plain values written by recurl, and anything else is refused: {error}."
        ) from error


def read_archive(file: IO[bytes]) -> Any:
    """Read an archive from an open file; see :func:`load_archive`.

    Raises:
        DamageError: the file is damaged, or is not a container.
        ContentError: it contains anything but tensors and plain values.
        OSError: it can't be read.
    """
    members = read_directory(file)
    length = file.seek(0, 2)
    if length > (most := total_memory("cpu")):
        raise DamageError(f"it has {length:,} bytes, more than the {most:,} bytes of memory")
    found = [member for member in members if member.name.endswith(f"/{_PICKLE}")]
    if len(found) != 1:
        raise DamageError("it has no data.pkl")
    (pickle,) = found
    prefix = pickle.name.removesuffix(_PICKLE)
    named = {member.name: member for member in members}
    order = named.get(prefix + _ORDER)
    if order is not None and read_member(file, order) != b"little":
        raise ContentError("its byte order is not little-endian")
    read = {pickle.name}

    def read_storage(key: str) -> Tensor:
        member = named.get(f"{prefix}data/{key}")
        if member is None:
            raise ContentError(f"it lacks data/{key[:20]}")
        read.add(member.name)
        return _read_tensor(file, member)

    value = read_values(read_member(file, pickle), length, read_storage)
    for member in members:
        if member.name not in read:
            verify_member(file, member)
    return value


def _read_tensor(file: IO[bytes], member: Member) -> Tensor:
    """Return the bytes of a member as uint8 ``[N]``."""
    data = torch.empty(member.size, dtype=torch.uint8)
    view = memoryview(cast(Any, data.numpy()))
    file.seek(member.start)
    done = 0
    while done < member.size:
        count = cast(Any, file).readinto(view[done:])
        if not count:
            raise DamageError(f"{member.name!r} is truncated")
        done += count
    check_crc(member, zlib.crc32(view))
    return data


def damage(file: bytes | IO[bytes]) -> str | None:
    """Return a description of the damage to a container, or None if every checksum matches.

    Args:
        file: the bytes of the container, or a file open for reading.

    Raises:
        OSError: the file can't be read.

    Example:
        >>> damage(b"something else")
        'File is not a zip file'
    """
    file = BytesIO(file) if isinstance(file, bytes) else file
    try:
        for member in read_directory(file):
            verify_member(file, member)
    except DamageError as error:
        return str(error)
    return None

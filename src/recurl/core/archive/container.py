"""Strict reader of the zip containers written by ``torch.save``, ``torch.export`` and ``numpy.savez``.

Members must be stored uncompressed, one after another. Other zip features are rejected before any member is read:
compressed or overlapping members, duplicate names, and directories with contradictory descriptions. Every zip reader
therefore finds the same members in an accepted container, and they have no more bytes in total than the file.
"""

from __future__ import annotations

import os
import struct
import zlib
from typing import IO, Any, NamedTuple

from recurl.core.errors import ArgumentError

__all__ = ["DamageError", "Member", "read_directory", "read_member", "verify_member"]

_END, _END_64, _LOCATOR, _ENTRY, _LOCAL = b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\1\2", b"PK\3\4"
_END_FORMAT = struct.Struct("<4s4H2LH")
_END_64_FORMAT = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_FORMAT = struct.Struct("<4sLQL")
_ENTRY_FORMAT = struct.Struct("<4s6H3L5H2L")
_LOCAL_FORMAT = struct.Struct("<4s5H3L2H")
_ENCRYPTED, _FOLDER = 0x1, 0x10
_SIZES_64 = 1
_MANY_16, _MANY_32 = 0xFFFF, 0xFFFFFFFF
_CHUNK = 1 << 20


class DamageError(ArgumentError):
    """A file is damaged or is not a valid container."""


class Member(NamedTuple):
    """Member of a container."""

    name: str
    start: int
    """Offset of the first byte."""
    size: int
    crc: int


def read_directory(file: IO[bytes]) -> list[Member]:
    """Return the members of a container, ordered by offset.

    Raises:
        DamageError: the container is damaged or uses rejected features; see the module.
        OSError: the file can't be read.
    """
    length = file.seek(0, os.SEEK_END)
    start, size, count = _directory(file, length)
    file.seek(start)
    entries, offsets = _entries(file.read(size), count)
    if len({entry.name.lower() for entry in entries}) != len(entries):  # torch's lookup is case-insensitive
        raise DamageError("two members have the same name")
    members: list[Member] = []
    end = 0
    for offset, entry in sorted(zip(offsets, entries, strict=True)):
        if offset < end:
            raise DamageError(f"{entry.name!r} overlaps another member")
        members.append(entry._replace(start=_data_start(file, offset, entry.name)))
        end = members[-1].start + entry.size
        if end > start:
            raise DamageError(f"{entry.name!r} overlaps the directory")
    return members


def read_member(file: IO[bytes], member: Member) -> bytes:
    """Return the bytes of a member.

    Raises:
        DamageError: its checksum is wrong.
        OSError: the file can't be read.
    """
    file.seek(member.start)
    data = file.read(member.size)
    check_crc(member, zlib.crc32(data))
    return data


def verify_member(file: IO[bytes], member: Member) -> None:
    """Verify the checksum of a member.

    Raises:
        DamageError: the checksum is wrong.
        OSError: the file can't be read.
    """
    file.seek(member.start)
    crc = 0
    for left in range(member.size, 0, -_CHUNK):
        crc = zlib.crc32(file.read(min(left, _CHUNK)), crc)
    check_crc(member, crc)


def check_crc(member: Member, crc: int) -> None:
    """Compare a computed CRC32 with that of a member.

    Raises:
        DamageError: they differ.
    """
    if crc != member.crc:
        raise DamageError(f"the checksum of {member.name!r} is wrong")


def _directory(file: IO[bytes], length: int) -> tuple[int, int, int]:
    """Return the start, the length and the number of entries of the directory."""
    end = length - _END_FORMAT.size
    found = _unpacked(file, end, _END_FORMAT)
    if found is None or found[0] != _END or found[-1]:
        raise DamageError("File is not a zip file")
    *_, here, count, size, start, _ = found
    locator = _unpacked(file, end - _LOCATOR_FORMAT.size, _LOCATOR_FORMAT)
    if locator is not None and locator[0] == _LOCATOR:
        end -= _LOCATOR_FORMAT.size + _END_64_FORMAT.size
        found = _unpacked(file, end, _END_64_FORMAT)
        if found is None or found[0] != _END_64 or locator[2] != end:
            raise DamageError("the end of its directory is damaged")
        *_, here_64, count_64, size_64, start_64 = found
        pairs = ((here, here_64, _MANY_16), (count, count_64, _MANY_16), (size, size_64, _MANY_32))
        if any(small != min(large, most) for small, large, most in (*pairs, (start, start_64, _MANY_32))):
            raise DamageError("its directory has two contradictory descriptions")
        here, count, size, start = here_64, count_64, size_64, start_64
    if here != count or start + size != end:
        raise DamageError("its directory is misplaced")
    return start, size, count


def _unpacked(file: IO[bytes], start: int, form: struct.Struct) -> tuple[Any, ...] | None:
    if start < 0:
        return None
    file.seek(start)
    data = file.read(form.size)
    return form.unpack(data) if len(data) == form.size else None


def _entries(data: bytes, count: int) -> tuple[list[Member], list[int]]:
    """Return the members of a directory, and the offsets of their headers."""
    members: list[Member] = []
    offsets: list[int] = []
    place = 0
    while place < len(data):
        if len(data) - place < _ENTRY_FORMAT.size:
            raise DamageError("its directory is truncated")
        (kind, _, _, flags, method, _, _, crc, packed, size, *lengths, disk, _, outer, offset) = (
            _ENTRY_FORMAT.unpack_from(data, place)
        )
        if kind != _ENTRY:
            raise DamageError("its directory is damaged")
        place += _ENTRY_FORMAT.size
        named, extra, comment = lengths
        name = data[place : place + named].decode(errors="backslashreplace")
        extra_field = data[place + named : place + named + extra]
        place += named + extra + comment
        if method or flags & _ENCRYPTED:
            raise DamageError(f"{name!r} is compressed or encrypted, which recurl never writes")
        if outer & _FOLDER:  # torch would read nothing and return uninitialized memory
            raise DamageError(f"{name!r} is marked as a folder")
        size, packed, offset = _zip64_numbers(extra_field, [size, packed, offset])
        if packed != size:
            raise DamageError(f"{name!r} has two sizes")
        if disk or "\0" in name:
            raise DamageError(f"{name!r} has an invalid description")
        members.append(Member(name, 0, size, crc))
        offsets.append(offset)
    if place != len(data) or len(members) != count:
        raise DamageError("its directory has a wrong number of entries")
    return members, offsets


def _zip64_numbers(extra: bytes, numbers: list[int]) -> list[int]:
    """Return the sizes and offset of an entry; those that exceed 32 bits are read from its extra field."""
    wanted = [place for place, number in enumerate(numbers) if number == _MANY_32]
    place = 0
    while wanted and place + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, place)
        place += 4
        if kind == _SIZES_64 and length >= 8 * len(wanted) and place + length <= len(extra):
            for position, number in zip(wanted, struct.unpack_from(f"<{len(wanted)}Q", extra, place), strict=True):
                numbers[position] = number
            return numbers
        place += length
    return numbers


def _data_start(file: IO[bytes], offset: int, name: str) -> int:
    header = _unpacked(file, offset, _LOCAL_FORMAT)
    if header is None or header[0] != _LOCAL or header[3]:
        raise DamageError(f"{name!r} has no header")
    named, extra = header[-2:]
    if file.read(named).decode(errors="backslashreplace") != name:
        raise DamageError(f"{name!r} has another name in its header")
    return offset + _LOCAL_FORMAT.size + named + extra

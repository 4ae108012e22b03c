"""Zip containers, as ``torch.save`` and ``torch.export.save`` write them: every byte that counts is verified."""

from __future__ import annotations

import zipfile
from io import BytesIO
from typing import IO

__all__ = ["damage"]

_FOLDER = 0x10


def damage(file: bytes | IO[bytes]) -> str | None:
    """Say what is wrong with a container, None if every checksum holds: then torch reads from it what was written.

    Args:
        file: its bytes, or a file open for reading.

    Raises:
        OSError: the file can't be read.

    Example:
        >>> damage(b"something else")
        'File is not a zip file'
    """
    try:
        with zipfile.ZipFile(BytesIO(file) if isinstance(file, bytes) else file) as container:
            for member in container.infolist():
                if member.compress_type == zipfile.ZIP_STORED and member.compress_size != member.file_size:
                    return f"{member.filename!r} has two sizes"
                if member.external_attr & _FOLDER:  # torch would read nothing, and take what its memory held before
                    return f"{member.filename!r} is marked as a folder"
            broken = container.testzip()
    except (OSError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - zipfile raises more than BadZipFile at damaged bytes, undocumented
        return str(error) or type(error).__name__
    return None if broken is None else f"the checksum of {broken!r} is wrong"

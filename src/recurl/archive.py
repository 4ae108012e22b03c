"""Files of tensors and plain Python values: verified when read, and without execution of any code in them."""

from __future__ import annotations

import zipfile
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from recurl.errors import ArgumentError

__all__ = ["damage", "load_archive", "save_archive"]

_FOLDER = 0x10


def save_archive(value: Any, file: Path | IO[bytes]) -> None:
    """Write ``value`` with ``torch.save``, always with checksums (torch's setting is ignored and kept).

    Args:
        value: tensors and plain Python values, nested in dicts, lists and tuples.
        file: destination: a path, or a binary file that is open for writing.
    """
    before = get_crc32_options()
    set_crc32_options(True)
    try:
        torch.save(value, file)
    finally:
        set_crc32_options(before)


def load_archive(path: Path) -> Any:
    """Load a file written by :func:`save_archive`, onto the CPU.

    The CRC32 of each member of the zip container is verified before anything is unpickled; only tensors and plain
    values are unpickled.

    Raises:
        ArgumentError: the file is missing, can't be read, is damaged, or holds anything else.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as name:
        ...     path = Path(name) / "weights.pt"
        ...     save_archive({"weights": torch.ones(2)}, path)
        ...     load_archive(path)
        {'weights': tensor([1., 1.])}
    """
    try:
        with path.open("rb") as file:
            wrong = damage(file)
            if wrong is not None:
                raise ArgumentError(f"{path} is damaged, or is not a file of recurl: {wrong}.")
            file.seek(0)
            return _load(file, path)
    except FileNotFoundError as error:
        raise ArgumentError(f"There is no file {path}.") from error
    except OSError as error:
        raise ArgumentError(f"{path} can't be read: {error.strerror or error}.") from error


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
    try:
        with zipfile.ZipFile(BytesIO(file) if isinstance(file, bytes) else file) as container:
            for member in container.infolist():
                if member.compress_type == zipfile.ZIP_STORED and member.compress_size != member.file_size:
                    return f"{member.filename!r} has two sizes"
                if member.external_attr & _FOLDER:  # torch would read nothing and return uninitialised memory
                    return f"{member.filename!r} is marked as a folder"
            broken = container.testzip()
    except (OSError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - zipfile raises more than BadZipFile at damaged bytes, undocumented
        return str(error) or type(error).__name__
    return None if broken is None else f"the checksum of {broken!r} is wrong"


def _load(file: IO[bytes], path: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # an unpickler may raise anything
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ArgumentError(
            f"{path} must hold tensors and plain values written by recurl, and anything else is refused: {reason[0]}"
        ) from error

"""Untrusted files are opened only if they are regular files, and opening never blocks."""

import os
import socket
from pathlib import Path

import pytest

from recurl.core.untrusted import open_regular, open_regular_descriptor


def _link(path: Path) -> None:
    path.with_name("target").write_bytes(b"precious")
    path.symlink_to(path.with_name("target"))


def _dangling_link(path: Path) -> None:
    path.symlink_to(path.with_name("nothing"))


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


@pytest.mark.parametrize(
    "make", [_link, _dangling_link, os.mkfifo, Path.mkdir, _socket, lambda p: p.symlink_to("/dev/zero")]
)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR | os.O_CREAT | os.O_TRUNC, os.O_WRONLY | os.O_CREAT])
def test_anything_but_a_regular_file_is_refused_at_once(tmp_path: Path, make, flags: int):
    path = tmp_path / "it"
    make(path)
    with pytest.raises(OSError, match=r"it is (a symbolic link|a folder|not a regular file)") as caught:
        open_regular_descriptor(path, flags)
    assert caught.value.filename == str(path)
    target = tmp_path / "target"
    assert not target.exists() or target.read_bytes() == b"precious"
    assert not (tmp_path / "nothing").exists()


def test_regular_files_are_read_written_and_made(tmp_path: Path):
    path = tmp_path / "it"
    with pytest.raises(FileNotFoundError):
        open_regular(path)
    os.close(open_regular_descriptor(path, os.O_WRONLY | os.O_CREAT))
    path.write_bytes(b"abc")
    with open_regular(path, "r+b") as file:
        file.write(b"x")
    with open_regular(path) as file:
        assert file.read() == b"xbc"
    os.close(open_regular_descriptor(path, os.O_WRONLY | os.O_TRUNC))
    assert path.read_bytes() == b""

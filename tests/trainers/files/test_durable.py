import errno
import os
import resource
from pathlib import Path

import pytest

from recurl.core.errors import StorageError
from recurl.trainers.files.durable import (
    is_partial,
    make_folder,
    remove_partials,
    replacing,
    sync_folder,
    write_all,
    write_atomic,
    writing,
)


@pytest.fixture
def small_files():
    """Limit file sizes to 1,000 bytes: the system refuses larger writes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "file"
    for text in (b"first", b"", b"third" * 100_000):
        write_atomic(path, text)
        assert path.read_bytes() == text
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_in_the_block_leaves_the_existing_file(tmp_path):
    path = tmp_path / "file"
    write_atomic(path, b"before")

    def fail():
        with replacing(path) as file:
            file.write(b"half")
            assert any(is_partial(other) for other in tmp_path.iterdir())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_existing_file(tmp_path, small_files):
    path = tmp_path / "file"
    write_atomic(path, b"x" * 1000)
    with pytest.raises(
        StorageError, match=r"Can't write .*/file \(File too large\): raise the file size limit .*ulimit -f"
    ):
        write_atomic(path, b"y" * 1001)
    assert path.read_bytes() == b"x" * 1000
    assert list(tmp_path.iterdir()) == [path]

    def go_on():
        with replacing(path) as file:
            for _ in range(5):  # torch would swallow the error
                file.write(b"y" * 400)

    with pytest.raises(StorageError, match="File too large"):
        go_on()
    assert path.read_bytes() == b"x" * 1000


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "No space left on device): free some space, or use another folder"),
        (errno.EROFS, "Read-only file system): use a folder that you can write to"),
        (errno.EACCES, "Permission denied): use a folder that you can write to"),
        (errno.EIO, "Input/output error): use another folder"),
    ],
)
@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
def test_every_system_error_names_the_path_and_a_remedy(tmp_path, monkeypatch, number, advice, call):
    path = tmp_path / "file"
    write_atomic(path, b"before")

    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    owner = Path if call == "replace" else os
    with monkeypatch.context() as patched:
        patched.setattr(owner, call, fail)
        with pytest.raises(StorageError) as caught:
            write_atomic(path, b"after")
    assert str(caught.value) == f"Can't write {path} ({advice}."
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_without_a_number():
    with pytest.raises(StorageError, match=r"Can't write x \(odd\): use another folder"), writing(Path("x")):
        raise OSError("odd")


def test_short_writes_are_completed(tmp_path, monkeypatch):
    write, path = os.write, tmp_path / "file"
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    write_atomic(path, b"0123456789")
    assert path.read_bytes() == b"0123456789"
    descriptor = os.open(path, os.O_WRONLY)
    write_all(descriptor, memoryview(b"abcdefgh").cast("H"))
    os.close(descriptor)
    assert path.read_bytes() == b"abcdefgh89"


def test_folders(tmp_path):
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"Can't write .*file/c \(Not a directory\)"):
        make_folder(tmp_path / "file" / "c")


@pytest.mark.parametrize(("number", "raises"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_file_systems_that_cannot_sync_folders(tmp_path, monkeypatch, number, raises):
    def fail(descriptor):
        raise OSError(number, "no")

    monkeypatch.setattr(os, "fsync", fail)
    if raises:
        with pytest.raises(StorageError, match="Can't write"):
            sync_folder(tmp_path)
    else:
        sync_folder(tmp_path)


def test_partial_files_are_removed_by_name(tmp_path):
    for name in ("a.csv.12.partial", "b.csv.12.partial", "a.csv"):
        (tmp_path / name).write_text("")
    remove_partials(tmp_path, "a.csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "b.csv.12.partial"]
    remove_partials(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]

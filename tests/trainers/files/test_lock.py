import errno
import fcntl
import json
import os
import subprocess
import sys
import time

import pytest

from recurl.core.errors import LockedError, StorageError
from recurl.trainers.files.lock import LOCK_FILES, FolderLock

pytestmark = pytest.mark.slow

HOLD = """
import sys, time
from pathlib import Path
from recurl.trainers.files.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]), print)
with lock.hold():
    {more}
    print("held", flush=True)
    time.sleep(60)
"""


def holder(programs, folder, more=""):
    """A process that holds the lock of the folder."""
    words = [sys.executable, "-c", HOLD.format(more=more), str(folder)]
    process = programs.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def is_free(folder):
    try:
        with FolderLock(folder, pytest.fail).hold():
            return True
    except LockedError:
        return False


def test_one_at_a_time(tmp_path):
    first, second = (FolderLock(tmp_path, pytest.fail) for _ in range(2))
    with first.hold():
        with first.hold():
            pass
        said = rf"Another process \(pid {os.getpid()} on .*\) is using {tmp_path}: wait until it ends, stop it"
        with pytest.raises(LockedError, match=said), second.hold():
            pass
    with second.hold():
        assert not is_free(tmp_path)
    assert is_free(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILES[0]]


CHILDREN = """
    import multiprocessing, os, subprocess
    os.fork() or time.sleep(8) or os._exit(0)
    subprocess.Popen(["sleep", "8"], close_fds=False)
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(8,)).start()
"""


@pytest.mark.parametrize("more", ["", CHILDREN], ids=["alone", "with children"])
def test_death_frees_it_at_once_and_children_do_not_inherit_it(tmp_path, programs, more):
    process = holder(programs, tmp_path, more)
    with pytest.raises(LockedError, match=rf"pid {process.pid} on"), FolderLock(tmp_path, print).hold():
        pass
    process.kill()
    process.wait()
    deadline = time.monotonic() + 4  # a child that was just forked closes its copy of the descriptor first
    while not is_free(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.stdout.close()


def test_a_child_that_ends_the_block_leaves_the_lock_to_its_parent(tmp_path, programs):
    more = """
    if os.fork() == 0:
        raise SystemExit  # through the end of the block
    os.wait()
    """
    process = holder(programs, tmp_path, "import os" + more)
    assert not is_free(tmp_path)
    process.kill()
    process.wait()
    process.stdout.close()


def test_whoever_copies_the_folder_does_not_free_it(tmp_path):
    with FolderLock(tmp_path, print).hold():
        for name in LOCK_FILES[:1]:
            (tmp_path / name).read_bytes()
        assert not is_free(tmp_path)


def test_a_recreated_folder_is_another_one(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with FolderLock(folder, print).hold():
        folder.rename(tmp_path / "old")
        folder.mkdir()
        assert is_free(folder)
    assert is_free(tmp_path / "old")


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(StorageError, match=r"Can't write .*file \(Not a directory\)"),
        FolderLock(tmp_path / "file", print).hold(),
    ):
        pass
    with (
        pytest.raises(StorageError, match=r"Can't write .*none \(No such file or directory\)"),
        FolderLock(tmp_path / "none", print).hold(),
    ):
        pass


def test_the_name_of_a_holder_that_is_just_writing_it(tmp_path):
    with FolderLock(tmp_path, print).hold():
        (tmp_path / LOCK_FILES[0]).write_text('{"pid": 3')
        with pytest.raises(LockedError, match=r"Another process is using"), FolderLock(tmp_path, print).hold():
            pass


@pytest.fixture(params=[errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def no_locks(request, monkeypatch):
    """A file system without locks, except for temporary files."""
    flock = fcntl.flock

    def refuse(descriptor, operation):
        if "recurl-" not in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(request.param, os.strerror(request.param))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_without_locks_a_file_names_the_owner(tmp_path, no_locks):
    notices = []
    first, second = (FolderLock(tmp_path, notices.append) for _ in range(2))
    with first.hold(), first.hold():
        (notice,) = notices
        assert notice.startswith(
            f"The file system of {tmp_path} doesn't support locks: the file .owner in it names the process"
        )
        with (
            pytest.raises(LockedError, match=rf"\.owner, process {os.getpid()} on .* is using this folder: wait"),
            second.hold(),
        ):
            pass
    with second.hold():
        assert json.loads((tmp_path / ".owner").read_text())["pid"] == os.getpid()
    assert not (tmp_path / ".owner").exists()


def dead_owner(folder, **other):
    """Leave behind the owner file of a dead process."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with FolderLock(folder, lambda text: None).hold():
        owner = json.loads((folder / ".owner").read_text())
    (folder / ".owner").write_text(json.dumps({**owner, "pid": ended.pid, **other}))


def test_without_locks_a_dead_owner_is_succeeded(tmp_path, no_locks):
    dead_owner(tmp_path)
    with FolderLock(tmp_path, lambda text: None).hold():
        assert json.loads((tmp_path / ".owner").read_text())["pid"] == os.getpid()
    dead_owner(tmp_path, pid=os.getpid(), start="1")  # another process has reused its pid
    with FolderLock(tmp_path, lambda text: None).hold():
        pass


@pytest.mark.parametrize(
    "other", [{"host": "elsewhere"}, {"boot": "another"}, {"namespace": "pid:[1]"}, {"boot": None, "namespace": None}]
)
def test_without_locks_other_owners_are_not_presumed_dead(tmp_path, no_locks, other):
    dead_owner(tmp_path, **other)
    with (
        pytest.raises(LockedError, match=r"if that process no longer exists, remove the file"),
        FolderLock(tmp_path, lambda text: None).hold(),
    ):
        pass
    assert (tmp_path / ".owner").exists()


def test_without_locks_an_unreadable_owner_file(tmp_path, no_locks):
    (tmp_path / ".owner").write_text("{")
    with (
        pytest.raises(LockedError, match=r"another process is using this folder"),
        FolderLock(tmp_path, lambda text: None).hold(),
    ):
        pass


MANY = """
import os, select, sys, time
from pathlib import Path
from recurl.core.errors import LockedError
from recurl.trainers.files.lock import FolderLock

def contend(start, end):
    while time.monotonic() < start:
        pass
    try:
        with FolderLock(Path(sys.argv[1]), print).hold():
            select.select([end], [], [], 30)  # until all others have tried
            os._exit(0)
    except LockedError:
        os._exit(1)

for _ in range(3):
    start, (end, others) = time.monotonic() + 0.2, os.pipe()
    children = [os.fork() or contend(start, end) for _ in range(20)]
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(19)]
    os.write(others, b"x")
    print(sorted([*codes, os.waitstatus_to_exitcode(os.wait()[1])]))
"""


def test_of_many_at_once_one_gets_it(tmp_path, programs):
    said = programs.run([sys.executable, "-c", MANY, str(tmp_path)], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == [str([0, *[1] * 19])] * 3

"""No room, at every point of a run: it says where and what to do, and what was saved stays good."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recurl.trainers import RunFolder
from recurl.trainers.checkpoint import latest_checkpoint, load_checkpoint
from torture_kinds.forks import Broken, Command
from torture_kinds.small_runs import ALGORITHMS, difference, whole

COUNT = 96
WHAT = ("a call of the system fails", "a limit on the size of files", "a full file system")
UPDATES = 16
_LOG = 2500  # bytes of what a command prints at most, which is in a file too


def attack(number: int, place: Path) -> tuple[str, str]:
    what, algorithm = WHAT[number % 3], list(ALGORITHMS)[number // 3 % 4]
    draw = random.Random(number)
    expected, _ = whole(place, algorithm, every=UPDATES // 2, updates=UPDATES)
    disk = place / "disk"
    disk.mkdir()
    folder = RunFolder(disk / "run")
    full = what == WHAT[2]
    if full:
        mount(disk, 1 << 30)
    try:
        shutil.copytree(expected.path, folder.path)
        newest = latest_checkpoint(folder.checkpoints)
        size = newest.stat().st_size
        newest.unlink()  # so that half of the run is left to do
        make_often(folder)
        if full:
            subprocess.run(
                ["mount", "-o", f"remount,size={used(disk) + draw.randrange(8_000, 2 * size)}", disk], check=True
            )
        before = load_checkpoint(latest_checkpoint(folder.checkpoints))["rows"]
        attack_once(what, folder, draw, place)
        if load_checkpoint(latest_checkpoint(folder.checkpoints))["rows"] < before:
            raise Broken(what, "a checkpoint is lost")
        if list(folder.path.rglob("*.partial")):
            raise Broken(what, "half a file is left")
        if full:  # somewhere with room
            shutil.copytree(folder.path, place / "elsewhere")
            folder = RunFolder(place / "elsewhere")
        end = Command(["train", "--resume", folder.path], place / "end")
        if end.wait() != 0:
            raise Broken(what, f"can't go on: {end.err[-300:]}")
        found = difference(folder, expected)
    finally:
        if full:
            unmount(disk)
    if found is not None:
        raise Broken(what, found)
    return what, "said so, and went on when there was room"


def make_often(folder: RunFolder) -> None:
    """Let the rest of the run write a checkpoint after every update."""
    options = json.loads(folder.config.read_text())
    folder.config.write_text(json.dumps({**options, "checkpoint_every": 1}))


def used(disk: Path) -> int:
    info = os.statvfs(disk)
    return (info.f_blocks - info.f_bfree) * info.f_frsize


def attack_once(what: str, folder: RunFolder, draw: random.Random, place: Path) -> None:
    """Resume until there is no room, which must be within the run."""
    sizes = [path.stat().st_size for path in folder.path.rglob("*") if path.is_file()]
    if what == WHAT[0]:
        before: Callable[[], None] = failing(draw.randrange(60))
    elif what == WHAT[1]:
        before = limited(draw.randrange(_LOG, max(sizes) - 1))
    else:
        before = do_nothing
    command = Command(["train", "--resume", folder.path], place / "log", before)
    if command.wait() == 0:
        raise Broken(what, "there was room")
    wrong = command.refusal()
    if wrong is not None:
        raise Broken(what, wrong)
    advice = "raise the file size limit" if what == WHAT[1] else "free some space"
    if f"Can't write {folder.path}" not in command.err or advice not in command.err:
        raise Broken(what, f"no path, or no advice: {command.err}")


def do_nothing() -> None:
    """The file system is full as it is."""


def limited(size: int) -> Callable[[], None]:
    """Return what lets no file grow beyond a size."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return limit


def failing(count: int) -> Callable[[], None]:
    """Return what lets all calls that write fail after a number of them."""

    def begin() -> None:
        left = iter(range(count))

        def full(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                if next(left, None) is None:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return function(*arguments, **options)

            return call

        write = os.write
        os.write = full(write)
        os.fsync, os.replace, os.mkdir = full(os.fsync), full(os.replace), full(os.mkdir)

    return begin


def mount(place: Path, size: int) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], check=True)


def unmount(place: Path) -> None:
    for _ in range(50):
        if subprocess.run(["umount", str(place)], check=False, capture_output=True).returncode == 0:
            return
        time.sleep(0.1)

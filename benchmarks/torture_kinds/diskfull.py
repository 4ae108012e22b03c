"""No space left at any point of a run: the error names the path and the remedy, and saved files stay intact."""

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
WHAT = ("a failing system call", "a limit on the size of files", "a full file system")
UPDATES = 16
_LOG = 2500  # upper bound in bytes on the output of a command, which is also written to a file


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
        newest.unlink()  # half of the run remains to be done
        make_often(folder)
        if full:
            subprocess.run(
                ["mount", "-o", f"remount,size={used(disk) + draw.randrange(8_000, 2 * size)}", disk], check=True
            )
        before = load_checkpoint(latest_checkpoint(folder.checkpoints))["rows"]
        attack_once(what, folder, draw, place)
        if load_checkpoint(latest_checkpoint(folder.checkpoints))["rows"] < before:
            raise Broken(what, "a checkpoint was lost")
        if list(folder.path.rglob("*.partial")):
            raise Broken(what, "a partial file was left")
        if full:  # a file system with space
            shutil.copytree(folder.path, place / "elsewhere")
            folder = RunFolder(place / "elsewhere")
        end = Command(["train", "--resume", folder.path], place / "end")
        if end.wait() != 0:
            raise Broken(what, f"resuming fails: {end.err[-300:]}")
        found = difference(folder, expected)
    finally:
        if full:
            unmount(disk)
    if found is not None:
        raise Broken(what, found)
    return what, "refused, and resumed once there was space"


def make_often(folder: RunFolder) -> None:
    """Configure the rest of the run to write a checkpoint after every update."""
    options = json.loads(folder.config.read_text())
    folder.config.write_text(json.dumps({**options, "checkpoint_every": 1}))


def used(disk: Path) -> int:
    info = os.statvfs(disk)
    return (info.f_blocks - info.f_bfree) * info.f_frsize


def attack_once(what: str, folder: RunFolder, draw: random.Random, place: Path) -> None:
    """Resume the run, which must run out of space before its end."""
    sizes = [path.stat().st_size for path in folder.path.rglob("*") if path.is_file()]
    if what == WHAT[0]:
        before: Callable[[], None] = failing(draw.randrange(60))
    elif what == WHAT[1]:
        before = limited(draw.randrange(_LOG, max(sizes) - 1))
    else:
        before = do_nothing
    command = Command(["train", "--resume", folder.path], place / "log", before)
    if command.wait() == 0:
        raise Broken(what, "didn't run out of space")
    wrong = command.refusal()
    if wrong is not None:
        raise Broken(what, wrong)
    advice = "raise the file size limit" if what == WHAT[1] else "free some space"
    if f"Can't write {folder.path}" not in command.err or advice not in command.err:
        raise Broken(what, f"error without path or remedy: {command.err}")


def do_nothing() -> None:
    """Do nothing: the file system is already full."""


def limited(size: int) -> Callable[[], None]:
    """Return a function that limits the file size of the calling process."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return limit


def failing(count: int) -> Callable[[], None]:
    """Return a function that makes every writing system call fail after the first ``count``."""

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

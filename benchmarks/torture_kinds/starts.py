"""Twenty processes starting in the same folder at once: one gets it, the others refuse, nothing is damaged."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from recurl.trainers import RunFolder
from torture_kinds.forks import Broken, Command
from torture_kinds.small_runs import difference, whole, words

COUNT = 12
PROCESSES = 20
WHAT = (
    "train",
    "train, with and without --overwrite",
    "train --resume",
    "train --overwrite and --resume",
    "the winner killed",
)


def attack(number: int, place: Path) -> tuple[str, str]:
    what, draw = WHAT[number % len(WHAT)], random.Random(number)
    expected, seconds = whole(place, "ppo")
    folder = RunFolder(place / "run")
    train, overwrite = words("ppo", folder.path), words("ppo", folder.path, "--overwrite")
    resume = ["train", "--resume", str(folder.path)]
    if "resume" in what:
        begin(folder, train, seconds, place)
    chosen = {
        "train": [train],
        "train, with and without --overwrite": [train, overwrite],
        "train --resume": [resume],
        "train --overwrite and --resume": [overwrite, resume],
        "the winner killed": [train],
    }[what]
    at = time.monotonic() + 2.0
    all_of_them = [Command(draw.choice(chosen), place / f"{n}", waiting(at)) for n in range(PROCESSES)]
    if what == "the winner killed":
        kill_the_winner(folder, all_of_them, seconds, what)
    codes = [command.wait() for command in all_of_them]
    winners = codes.count(0)
    if winners != 1 and chosen == [train] and "killed" not in what:
        raise Broken(what, f"{winners} processes ended with status 0, expected one")
    for command in all_of_them:
        wrong = command.refusal() if command.code not in (0, -9) else None
        if wrong is not None:
            raise Broken(what, wrong)
    end = Command(resume, place / "end")
    if end.wait() != 0:
        raise Broken(what, f"the folder is damaged: {end.err[-300:]}")
    found = difference(folder, expected)
    if found is not None:
        raise Broken(what, found)
    return what, "unharmed"


def begin(folder: RunFolder, train: list[str], seconds: float, place: Path) -> None:
    """Create an unfinished run by killing it."""
    while not any(folder.checkpoints.glob("*.pt")):
        shutil.rmtree(folder.path, ignore_errors=True)
        command = Command(train, place / "begin")
        time.sleep(seconds / 3)
        command.kill()


def waiting(at: float) -> Callable[[], None]:
    """Return a function that busy-waits until a time of the monotonic clock."""

    def wait() -> None:
        while time.monotonic() < at:
            pass

    return wait


def kill_the_winner(folder: RunFolder, commands: list[Command], seconds: float, what: str) -> None:
    """Kill the process that got the folder once it has a checkpoint; this must free the folder at once."""
    deadline = time.monotonic() + 60
    while not any(folder.checkpoints.glob("*.pt")):
        if time.monotonic() > deadline:
            raise Broken(what, "no process started")
        time.sleep(0.01)
    left = [command for command in commands if not command.has_ended()]
    while len(left) > 1:
        time.sleep(0.01)
        left = [command for command in commands if not command.has_ended()]
    for command in left:
        command.kill()

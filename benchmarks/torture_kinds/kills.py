"""SIGKILL at random moments of a run and its resumptions: the finished run equals an uninterrupted one."""

from __future__ import annotations

import random
import time
from pathlib import Path

from recurl.trainers import RunFolder
from torture_kinds.forks import Broken, Command
from torture_kinds.small_runs import ALGORITHMS, difference, whole, words

COUNT = 240
_TRAINING = 1.5  # seconds of a run without the startup of workers


def attack(number: int, place: Path) -> tuple[str, str]:
    what, every = list(ALGORITHMS)[number % 4], (1, 3)[number // 4 % 2]
    draw = random.Random(number)
    expected, seconds = whole(place, what, every)
    folder = RunFolder(place / "run")
    kills, begun = 0, False
    while kills == 0 or draw.random() < 0.3:
        command = Command(resume_or_restart(folder, what, every), place / f"{kills}")
        wait(folder, command, draw, seconds)
        if command.has_ended():  # before it could be killed
            if command.code != 0:
                raise Broken(what, f"ends with {command.code}: {command.err[-300:]}")
            continue
        command.kill()
        kills += 1
        begun = begun or any(folder.checkpoints.glob("*.pt"))
        if command.orphans():
            raise Broken(what, f"processes {command.orphans()} outlive a kill")
    command = Command(resume_or_restart(folder, what, every), place / "end")
    if command.wait() != 0:
        raise Broken(what, f"resuming fails after {kills} kills, {command.code}: {command.err[-300:]}")
    found = difference(folder, expected)
    if found is not None:
        raise Broken(what, f"{found}, after {kills} kills")
    if list(folder.path.rglob("*.partial")):
        raise Broken(what, "a partial file was left")
    return what, "resumed from a checkpoint" if begun else "restarted"


def wait(folder: RunFolder, command: Command, draw: random.Random, seconds: float) -> None:
    """Wait for a random time, usually until after the start of training."""
    if draw.random() < 0.2:
        time.sleep(draw.uniform(0.0, seconds))
        return
    while not (folder.metrics.exists() or command.has_ended()):
        time.sleep(0.002)
    time.sleep(draw.uniform(0.0, min(seconds, _TRAINING)))


def resume_or_restart(folder: RunFolder, algorithm: str, every: int) -> list[str]:
    """Return the command line a user would type: resume if there is a checkpoint, otherwise restart."""
    if any(folder.checkpoints.glob("*.pt")):
        return ["train", "--resume", str(folder.path)]
    return words(algorithm, folder.path, "--overwrite", every=every)

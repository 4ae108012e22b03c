"""Random command lines, each in a separate process: none ends with a traceback or more than three error lines."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from pathlib import Path

from torture_kinds.command_lines import commands
from torture_kinds.forks import MOST_LINES, Broken, Command

COUNT = 1000
_SECONDS = 20.0
"""Time limit after which a running command is told to stop with SIGTERM."""
_MEMORY = 8 << 30
_MODEL = (  # noqa: SIM905 - shown as typed in a shell
    "train ppo --env recurl/TMaze-v0 --hidden-size 4 --num-envs 2 --rollout-steps 8 --total-steps 16 --eval-episodes 1 "
    "--minibatches 1 --run-dir"
).split()
_ENDS = {0: "done", 1: "checks failed", 2: "refused in a few lines", 143: "stopped", -signal.SIGTERM: "stopped"}


def attack(number: int, place: Path) -> tuple[str, str]:
    shutil.copytree(_model(place.parent / "model"), place / "there")
    words = next(commands(1, number, place / "there"))
    what = f"recurl {words[0]}"

    def enter() -> None:
        os.chdir(place / "there")
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))

    command = Command(words, place / "log", enter)
    for _ in range(2):  # the first SIGTERM stops after the current update, the second at once
        if not command.ends_within(_SECONDS):
            os.kill(command.pid, signal.SIGTERM)
    if command.wait(_SECONDS) not in _ENDS or "Traceback" in command.err:
        raise Broken(what, f"{words}: exit status {command.code}: {command.err[-300:]}")
    if len(command.err.splitlines()) > MOST_LINES and command.code:
        raise Broken(what, f"{words}: {len(command.err.splitlines())} lines of errors")
    return what, _ENDS[command.wait()]


def _model(folder: Path) -> Path:
    """Create, once, a folder with a run and an unrelated file."""
    if not (folder / "file").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        command = Command([*_MODEL, folder / "run"], folder.with_suffix(".log"))
        if command.wait() != 0:
            raise Broken("a run", f"an undisturbed run ends with {command.code}: {command.err}")
        (folder / "file").write_text("mine")
    return folder

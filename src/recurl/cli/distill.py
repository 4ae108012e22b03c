"""``recurl distill TEACHER``: ``recurl train distill`` in the teacher's environment, unless another is named.

``recurl distill --episodes DIR`` is ``recurl train distill --episodes DIR``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recurl.cli import train
from recurl.cli.help import HELP, HELP_ALL
from recurl.core.errors import ArgumentError
from recurl.core.ranges import flag
from recurl.trainers import RunFolder
from recurl.trainers.trust import check_names

_OF_TEACHER = ("env", "env_kwargs")

run = train.run


def read(arguments: list[str]) -> Any:
    """Parse the arguments: a teacher's run, and options of ``recurl train distill``."""
    recorded = any(word.partition("=")[0] == "--episodes" for word in arguments)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in (*HELP, HELP_ALL) and not recorded):
        raise ArgumentError(
            "recurl distill needs the run folder of a teacher, recurl distill RUN ..., or recorded episodes, recurl "
            "distill --episodes DIR --env ID ..."
        )
    teacher, *options = arguments
    if teacher.startswith("-"):
        return train.read(["distill", *arguments])
    words = ["--teacher", teacher, *options]
    if not any(word.partition("=")[0] == "--env" for word in options):
        values = RunFolder(Path(teacher)).read_values()
        if "--trust-run" not in options:
            check_names({"env": values.get("env")}, Path(teacher) / "config.json")
        for name in _OF_TEACHER:
            given = values.get(name)
            words += [flag(name), *([given] if isinstance(given, str) else given)] if given else []
    return train.read(["distill", *words])

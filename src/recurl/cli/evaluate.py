"""``recurl evaluate``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from recurl.cli.arguments import parse_arguments
from recurl.ranges import Count, Seed
from recurl.trainers import RunFolder, evaluate_run


@dataclass(frozen=True)
class Evaluate:
    """Play greedy episodes with the newest checkpoint of a run."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of the run."""
    episodes: Count = 100
    """Episodes to play."""
    seed: Seed | None = None
    """Seed of the environments; by default one that training did not use."""


def evaluate_command(arguments: list[str]) -> int:
    """Evaluate a run."""
    wanted = parse_arguments(Evaluate, arguments, prog="recurl evaluate")
    print(evaluate_run(RunFolder(wanted.run), episodes=wanted.episodes, seed=wanted.seed))
    return 0

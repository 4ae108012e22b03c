"""``recurl evaluate``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from recurl.cli.arguments import parse_arguments
from recurl.cli.notices import notify
from recurl.ranges import Count, Seed
from recurl.trainers import RunFolder, evaluate_run


@dataclass(frozen=True)
class Evaluate:
    """Play greedy episodes with the newest checkpoint of a run."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of the run."""
    episodes: Count = 100
    """Number of episodes."""
    seed: Seed | None = None
    """Seed of the environments; by default one that training didn't use."""
    max_steps: Count | None = None
    """Step limit of an episode; by default --eval-max-steps of the training."""


def read(arguments: list[str]) -> Evaluate:
    """Parse the arguments."""
    return parse_arguments(Evaluate, arguments, prog="recurl evaluate")


def run(wanted: Evaluate) -> int:
    """Evaluate a run."""
    folder, aside = RunFolder(wanted.run, notify), Console(stderr=True)
    print(evaluate_run(folder, episodes=wanted.episodes, seed=wanted.seed, max_steps=wanted.max_steps, console=aside))
    return 0

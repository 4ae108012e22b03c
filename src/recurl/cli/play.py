"""``recurl play``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from recurl.cli.arguments import ReadsRun, parse_arguments
from recurl.cli.notices import notify
from recurl.ranges import Count, Seed
from recurl.trainers import RunFolder, play_run


@dataclass(frozen=True)
class Play(ReadsRun):
    """Show episodes of a trained policy: on the screen if the environment has a window, or in a video."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of the run."""
    video: Path | None = None
    """File to record to, such as out.mp4; several episodes go to out-1.mp4, out-2.mp4 and so on."""
    episodes: Count = 1
    """Number of episodes."""
    stochastic: bool = False
    """Act as in training, drawing or exploring, instead of taking the best actions."""
    seed: Seed | None = None
    """Seed of the environment and of drawn actions; by default one that training didn't use."""
    max_steps: Count | None = None
    """Step limit of an episode; by default --eval-max-steps of the training."""
    checkpoint: Literal["newest", "best"] = "newest"
    """Checkpoint: the newest, or the best one, which training keeps with --keep-best."""


def read(arguments: list[str]) -> Play:
    """Parse the arguments."""
    return parse_arguments(Play, arguments, prog="recurl play")


def run(wanted: Play) -> int:
    """Play a run."""
    found, files = play_run(
        RunFolder(wanted.run, notify, trust=wanted.trust_run),
        episodes=wanted.episodes,
        video=wanted.video,
        seed=wanted.seed,
        max_steps=wanted.max_steps,
        console=Console(stderr=True),
        checkpoint=wanted.checkpoint,
        deterministic=not wanted.stochastic,
    )
    for number, (value, length) in enumerate(zip(found.returns, found.lengths, strict=True)):
        print(f"Episode {number + 1}: return {value:.4g}, length {length}{f', {files[number]}' if files else ''}")
    if found.remark:
        print(found.remark)
    return 0

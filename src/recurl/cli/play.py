"""``recurl play``: episodes of a trained policy on screen or in a video."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from recurl.cli.arguments import ReadsRun, parse_arguments
from recurl.cli.notices import notify
from recurl.core.ranges import Count, Seed
from recurl.trainers import RunFolder, play_run


@dataclass(frozen=True)
class Play(ReadsRun):
    """Show episodes of a trained policy on screen, if the environment has a window, or record a video."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder."""
    video: Path | None = None
    """Video file, such as out.mp4; several episodes are written to out-1.mp4, out-2.mp4 and so on."""
    episodes: Count = 1
    """Number of episodes."""
    stochastic: bool = False
    """Act as in training, with sampling or exploration, instead of greedily."""
    seed: Seed | None = None
    """Seed of the environment and of sampled actions; by default one that training didn't use."""
    max_steps: Count | None = None
    """Step limit per episode; by default the --eval-max-steps of the training."""
    checkpoint: Literal["newest", "best"] = "newest"
    """Checkpoint: the newest, or the best one, which training keeps with --keep-best."""


def read(arguments: list[str]) -> Play:
    """Parse the arguments."""
    return parse_arguments(Play, arguments, prog="recurl play")


def run(args: Play) -> int:
    """Play episodes of a run."""
    found, files = play_run(
        RunFolder(args.run, notify, trust=args.trust_run),
        episodes=args.episodes,
        video=args.video,
        seed=args.seed,
        max_steps=args.max_steps,
        console=Console(stderr=True),
        checkpoint=args.checkpoint,
        deterministic=not args.stochastic,
    )
    for number, (value, length) in enumerate(zip(found.returns, found.lengths, strict=True)):
        print(f"Episode {number + 1}: return {value:.4g}, length {length}{f', {files[number]}' if files else ''}")
    if found.remark:
        print(found.remark)
    return 0

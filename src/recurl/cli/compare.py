"""``recurl compare``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from recurl.cli.arguments import parse_arguments
from recurl.errors import ArgumentError
from recurl.trainers.study.comparison import compare


@dataclass(frozen=True)
class Compare:
    """Compare runs of one task: interquartile means over seeds with 95 % bootstrap intervals, and learning curves."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs and of sweeps; runs that differ in the seed only are one group."""
    metric: Literal["auto", "training", "evaluation"] = "auto"
    """Returns of training episodes, or of evaluations during training; auto takes these where all runs have some."""
    out: Path = Path("comparison.png")
    """Picture of the curves (.png, .svg or .pdf); FILE.csv and FILE_scores.csv beside it hold the numbers."""


def read(arguments: list[str]) -> Compare:
    """Parse the arguments."""
    wanted = parse_arguments(Compare, arguments, prog="recurl compare")
    if not wanted.runs:
        raise ArgumentError("recurl compare takes folders of runs or sweeps, got none.")
    if not wanted.out.parent.is_dir():
        raise ArgumentError(f"There is no folder {wanted.out.parent}: create it, or name another file with --out.")
    return wanted


def run(wanted: Compare) -> int:
    """Print the scores, and write curves."""
    found = compare(wanted.runs, None if wanted.metric == "auto" else wanted.metric)
    written = found.write(wanted.out)
    print(found.table())
    print(f"Written: {', '.join(map(str, written))}")
    return 0

"""``recurl compare``: comparison of runs, with learning curves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from recurl.cli.arguments import parse_arguments
from recurl.core.errors import ArgumentError
from recurl.trainers.study.comparison import compare


@dataclass(frozen=True)
class Compare:
    """Compare runs: interquartile means over seeds with 95% bootstrap intervals, and learning curves."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs and sweeps; runs that differ only in the seed form one group."""
    metric: Literal["auto", "training", "evaluation"] = "auto"
    """Returns of training episodes, or of evaluations during training; auto uses evaluations if all runs have some."""
    out: Path = Path("comparison.png")
    """Figure of the curves (.png, .svg or .pdf); the data is written to FILE.csv and FILE_scores.csv next to it."""


def read(arguments: list[str]) -> Compare:
    """Parse the arguments."""
    args = parse_arguments(Compare, arguments, prog="recurl compare")
    if not args.runs:
        raise ArgumentError("recurl compare takes folders of runs or sweeps, got none.")
    if not args.out.parent.is_dir():
        raise ArgumentError(f"There is no folder {args.out.parent}: create it, or name another file with --out.")
    return args


def run(args: Compare) -> int:
    """Print the scores and write the curves."""
    found = compare(args.runs, None if args.metric == "auto" else args.metric)
    written = found.write(args.out)
    print(found.table())
    print(f"Written: {', '.join(map(str, written))}")
    return 0

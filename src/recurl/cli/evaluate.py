"""``recurl evaluate``: episodes of a trained policy, with statistics of their returns."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from recurl.cli.arguments import ReadsRun, parse_arguments
from recurl.cli.notices import notify
from recurl.core.ranges import Count, Seed
from recurl.trainers import Evaluation, RunFolder, evaluate_run


@dataclass(frozen=True)
class Evaluate(ReadsRun):
    """Play episodes with a trained policy."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder."""
    episodes: Count = 100
    """Number of episodes."""
    seed: Seed | None = None
    """Seed of the environments and of sampled actions; by default one that training didn't use."""
    max_steps: Count | None = None
    """Step limit per episode; by default the --eval-max-steps of the training."""
    stochastic: bool = False
    """Act as in training, with sampling or exploration, instead of greedily."""
    checkpoint: Literal["newest", "best"] = "newest"
    """Checkpoint: the newest, or the best one, which training keeps with --keep-best."""
    save_episodes: Path | None = None
    """New folder to save the episodes to, from which recurl distill --episodes learns."""
    json: bool = False
    """Print the results as one JSON object."""


def read(arguments: list[str]) -> Evaluate:
    """Parse the arguments."""
    return parse_arguments(Evaluate, arguments, prog="recurl evaluate")


def run(args: Evaluate) -> int:
    """Evaluate a run."""
    found = evaluate_run(
        RunFolder(args.run, notify, trust=args.trust_run),
        episodes=args.episodes,
        seed=args.seed,
        max_steps=args.max_steps,
        console=Console(stderr=True),
        checkpoint=args.checkpoint,
        deterministic=not args.stochastic,
        save_episodes=args.save_episodes,
    )
    if args.json:
        print(json.dumps({"run": str(args.run), "checkpoint": args.checkpoint, **found.to_dict()}, indent=2))
    else:
        show(found, Console())
    return 0


def show(evaluation: Evaluation, console: Console) -> None:
    """Print an evaluation as a table."""
    numbers = evaluation.to_dict()
    confidence = f"{numbers['interval']['confidence']:.0%}"
    console.print(evaluation.title, highlight=False)
    table = Table("")
    for name in ("mean", f"{confidence} interval", "std", "min", "max"):
        table.add_column(name, justify="right")
    for name in ("return", "length"):
        table.add_row(name, *_cells(numbers[name]))
    console.print(table)
    method, resamples = numbers["interval"]["method"], numbers["interval"]["resamples"]
    console.print(f"{confidence} interval: {method}, {resamples:,} resamples", highlight=False)
    if evaluation.remark:
        console.print(evaluation.remark, highlight=False)


def _cells(row: dict[str, Any]) -> list[str]:
    low, high = row["interval"]
    return [f"{row['mean']:.4g}", f"{low:.4g} to {high:.4g}", *(f"{row[name]:.4g}" for name in ("std", "min", "max"))]

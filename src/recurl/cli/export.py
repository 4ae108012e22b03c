"""``recurl export``: greedy policy of a run as a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from recurl.cli.arguments import ReadsRun, parse_arguments
from recurl.cli.notices import notify
from recurl.core.errors import ArgumentError
from recurl.trainers import RunFolder, export_run


@dataclass(frozen=True)
class Export(ReadsRun):
    """Export the greedy policy of a run to a file, as one function with hidden states as inputs and outputs."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder."""
    format: Literal["torch", "onnx", "compiled"] = "onnx"
    """Format: a torch.export program (.pt2) or ONNX (needs pip install 'recurl[export]'), which run without recurl; or
    a program of recurl's C++ library (.recurl), for steps of microseconds."""
    out: Path | None = None
    """File to write; by default policy.pt2, policy.onnx or policy.recurl in the run folder. A description is written to
    FILE.json."""
    checkpoint: Literal["newest", "best"] = "newest"
    """Checkpoint: the newest, or the best one, which training keeps with --keep-best."""


def read(arguments: list[str]) -> Export:
    """Parse the arguments."""
    return parse_arguments(Export, arguments, prog="recurl export")


def run(args: Export) -> int:
    """Export a run's policy."""
    if args.out is not None and not args.out.parent.is_dir():
        raise ArgumentError(f"There is no folder {args.out.parent}: create it, or name another file with --out.")
    path = export_run(
        RunFolder(args.run, notify, trust=args.trust_run), args.format, args.out, checkpoint=args.checkpoint
    )
    print(f"{path}: the greedy policy, verified against the run over 1,000 steps with resets; described in {path}.json")
    return 0

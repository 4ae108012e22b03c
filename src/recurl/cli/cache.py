"""``recurl cache``: what this machine has compiled or measured once."""

from __future__ import annotations

import shutil
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recurl.cli.arguments import parse_subcommand
from recurl.cli.sources import read_sources
from recurl.cli.train import read_run
from recurl.core.cache import cache_folder, compiled_folder, compiled_folders
from recurl.core.errors import ArgumentError
from recurl.core.precision import torch_matmul_precision
from recurl.trainers import ALGORITHMS, RunConfig
from recurl.trainers.algorithms.table import make_algorithm
from recurl.trainers.run.update_times import time_updates

_WARM_UP = 5
"""Updates, in which collectors and gradient steps compile and capture all they use."""
_TUNED = "kernels.json"
_MEBI = 2**20


@dataclass(frozen=True)
class Show:
    """Show the folder and the size of what is in it."""


@dataclass(frozen=True)
class Clear:
    """Delete compiled kernels and programs of all versions; the next runs compile again."""

    tuned: bool = False
    """Also forget the kernels that recurl bench rnn --tune has chosen."""


@dataclass(frozen=True, kw_only=True)
class Warm:
    """Compile what a run needs, without training: recurl cache warm ALGORITHM, with the options of recurl train."""

    preset: str | None = None
    """Use the tuned options of a preset; --config and command line options take precedence."""
    config: Path | None = None
    """Read options from a TOML file, or from the config.json of a run; command line options take precedence."""


KINDS: dict[str, type[Show | Clear]] = {"show": Show, "clear": Clear}


def read(arguments: list[str]) -> Any:
    """Parse the arguments."""
    if arguments[:1] == ["warm"]:
        rest = arguments[1:]
        args = read_run(rest, read_sources(rest), prog="recurl cache warm", extra=Warm) if rest else None
        if args is None:
            raise ArgumentError(f"recurl cache warm needs an algorithm ({', '.join(ALGORITHMS)}) and its options.")
        return args
    kinds: Any = {**KINDS, "warm": Warm}
    return parse_subcommand(kinds, arguments, prog="recurl cache", what="action", description=_DESCRIPTION)


_DESCRIPTION = "Look after what this machine has compiled or measured once."


def run(args: Any) -> int:
    """Show, clear or fill the folder."""
    if isinstance(args, Show):
        print("\n".join(_contents()))
    elif isinstance(args, Clear):
        print(_cleared(args.tuned))
    else:
        print(_warmed(args.options))
    return 0


def _contents() -> list[str]:
    lines, own = [str(cache_folder())], compiled_folder()
    folders = compiled_folders()
    for folder in sorted(folders.iterdir()) if folders.is_dir() else ():
        files, size = _size(folder)
        if files:
            used = " (in use)" if folder == own else ""
            lines.append(f"  compiled, {folder.name}{used}: {size / _MEBI:,.1f} MiB in {files:,} files")
    if (cache_folder() / _TUNED).exists():
        lines.append(f"  kernels chosen by recurl bench rnn --tune: {_TUNED}")
    return lines if len(lines) > 1 else [f"{lines[0]} is empty"]


def _size(folder: Path) -> tuple[int, int]:
    """Return the number of files and their bytes."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return len(sizes), sum(sizes)


def _cleared(tuned: bool) -> str:
    folders = compiled_folders()
    files, size = _size(folders)
    if folders.is_dir():
        shutil.rmtree(folders)
    if tuned:
        (cache_folder() / _TUNED).unlink(missing_ok=True)
    return f"Deleted {size / _MEBI:,.1f} MiB in {files:,} files: {folders}"


def _warmed(config: RunConfig) -> str:
    steps = (_WARM_UP + 3) * config.frames_per_batch + getattr(config, "learning_starts", 0)
    config, begin = replace(config, total_steps=max(config.total_steps, steps)), time.perf_counter()
    with torch_matmul_precision(config.torch_precision), closing(make_algorithm(config)) as learner:
        time_updates(learner, _WARM_UP, 1)
    return f"Compiled in {time.perf_counter() - begin:.1f} s; runs with these options find it in {compiled_folder()}"

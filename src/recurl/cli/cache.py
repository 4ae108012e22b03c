"""``recurl cache``: what this machine has compiled or measured once."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recurl.cli.arguments import parse_subcommand
from recurl.cli.place import SourceOptions
from recurl.cli.sources import read_sources
from recurl.cli.train import read_run
from recurl.core.cache import cache_folder, compiled_folder, compiled_folders
from recurl.core.errors import ArgumentError
from recurl.recurrence.cuda import tuned
from recurl.trainers import ALGORITHMS, RunConfig
from recurl.trainers.run.update_times import time_run

_WARM_UP = 5
"""Updates, in which collectors and gradient steps compile and capture all they use."""
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
class Warm(SourceOptions):
    """Compile what a run needs, without training: recurl cache warm ALGORITHM, with the options of recurl train."""


KINDS: dict[str, type[Any]] = {"show": Show, "clear": Clear, "warm": Warm}


def read(arguments: list[str]) -> Any:
    """Parse the arguments."""
    if arguments[:1] == ["warm"]:
        rest = arguments[1:]
        args = read_run(rest, read_sources(rest), prog="recurl cache warm", extra=Warm) if rest else None
        if args is None:
            raise ArgumentError(f"recurl cache warm needs an algorithm ({', '.join(ALGORITHMS)}) and its options.")
        return args
    return parse_subcommand(KINDS, arguments, prog="recurl cache", what="action", description=_DESCRIPTION)


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
    if tuned.path().exists():
        lines.append(f"  kernels chosen by recurl bench rnn --tune: {tuned.path().name}")
    return lines if len(lines) > 1 else [f"{lines[0]} is empty"]


def _size(folder: Path) -> tuple[int, int]:
    """Return the number of files and their bytes."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return len(sizes), sum(sizes)


def _cleared(also_tuned: bool) -> str:
    folders = compiled_folders()
    files, size = _size(folders)
    if folders.is_dir():
        shutil.rmtree(folders)
    if also_tuned:
        tuned.path().unlink(missing_ok=True)
    return f"Deleted {size / _MEBI:,.1f} MiB in {files:,} files: {folders}"


def _warmed(config: RunConfig) -> str:
    begin = time.perf_counter()
    time_run(config, _WARM_UP, 1)
    spent = time.perf_counter() - begin
    return f"Done in {spent:.1f} s: runs with these options find what could be compiled in {compiled_folder()}"

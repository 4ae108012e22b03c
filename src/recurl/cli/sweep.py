"""``recurl sweep``: runs over seeds and combinations of options."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from recurl.cli.arguments import parse_known_arguments, without_options
from recurl.cli.notices import notify
from recurl.cli.signals import StopOnSignal
from recurl.cli.sources import read_sources
from recurl.cli.speed import notify_if_slow
from recurl.cli.train import read_run
from recurl.core.errors import ArgumentError
from recurl.core.ranges import Count
from recurl.trainers import ALGORITHMS, RunConfig, find_algorithm
from recurl.trainers.study.grid import Job, make_jobs, parse_settings
from recurl.trainers.study.sweep import Sweep, options_of_sweep

_PROG = "recurl sweep"


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Train with several seeds and every combination of some options: recurl sweep ALGORITHM --env ID ...

    All other options are those of recurl train ALGORITHM. The same command continues a sweep that was stopped.
    """

    run_dir: Path
    """Folder of the sweep; each run is a folder in it."""
    seeds: Count = 1
    """Number of seeds of each combination, starting at --seed."""
    set: tuple[str, ...] = ()
    """Options to vary, as field=value,value, such as cell=lstm,gru learning_rate=1e-3,3e-4."""
    jobs: Count = 1
    """Number of parallel processes."""


class SweepArguments(NamedTuple):
    """Parsed arguments of ``recurl sweep``."""

    options: SweepOptions
    jobs: list[Job]


def read(arguments: list[str]) -> SweepArguments:
    """Parse the arguments of the sweep and of its runs."""
    options, rest = parse_known_arguments(SweepOptions, arguments, prog=_PROG)
    sources = read_sources(rest)
    named = bool(rest) and not rest[0].startswith("-")
    algorithm = rest[0] if named else sources.algorithm
    if algorithm is None:
        raise ArgumentError(f"recurl sweep needs an algorithm ({', '.join(ALGORITHMS)}), --preset or --config.")

    def read_options(more: list[str]) -> RunConfig:
        args = read_run([*without_options(rest, more), *more], sources, prog=_PROG)
        if args.overwrite or args.save_config is not None:
            raise ArgumentError("recurl sweep takes neither --overwrite nor --save-config.")
        return args.options

    kind = find_algorithm(algorithm).config
    earlier = options_of_sweep(options.run_dir)
    return SweepArguments(options, make_jobs(kind, parse_settings(options.set), options.seeds, read_options, earlier))


def run(args: SweepArguments) -> int:
    """Train all runs and report those that failed."""
    options = args.options
    notify_if_slow(args.jobs[0].config.device)
    sweep = Sweep(options.run_dir, args.jobs, notify)
    with sweep.hold(), StopOnSignal() as stop:
        sweep.run(options.jobs, report=lambda text: print(text, flush=True), should_stop=stop.requested)
    if stop.requested():
        print("Run the same command to continue.")
        return stop.exit_code
    if sweep.failed:
        failed = f"{len(sweep.failed)} of {len(args.jobs)} runs failed: {', '.join(sweep.failed)}"
        print(f"{failed}. The same command retries them.")
        return 1
    print(f"Compare them: recurl compare {shlex.quote(str(options.run_dir))}")
    return 0

"""``recurl train ALGORITHM`` and ``recurl train --resume``."""

from __future__ import annotations

import math
import re
import signal
import time
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from recurl.cli.arguments import ReadsRun, parse_arguments, parse_subcommand
from recurl.cli.faults import error_of_environment
from recurl.cli.help import HELP, HELP_ALL
from recurl.cli.notices import notify
from recurl.cli.place import DESCRIPTION, Place, with_place
from recurl.cli.signals import StopOnSignal
from recurl.cli.sources import Sources, plain, read_sources, with_defaults
from recurl.cli.speed import notify_if_slow
from recurl.distributed import broadcast, joined, on_any_rank, rank, restarted, said_once, speaks, world_size
from recurl.errors import ArgumentError, CallbackError, EnvError, NonFiniteError, StorageError, WorkerError
from recurl.ranges import Steps
from recurl.trainers import ALGORITHMS, Outcome, RunConfig, RunFolder, Trainer, evaluate_run, find_algorithm, make_env
from recurl.trainers.algorithms.options_file import write_options_file
from recurl.trainers.algorithms.programs_config import ProgramsConfig
from recurl.trainers.algorithms.table import make_agent
from recurl.trainers.checkpoint import latest_checkpoint
from recurl.trainers.networks.description import describe_agent
from recurl.trainers.run.memory import saying_what_fits
from recurl.trainers.trust import resume_command

_REMEDY = "Mend the environment, lower --learning-rate, or leave such data out (--on-nonfinite skip). "
_STATUS = {"solved": "Solved", "finished": "Finished", "stopped": "Stopped"}


@dataclass(frozen=True)
class Resume(ReadsRun):
    """Continue a run from its newest checkpoint; a new run begins with the name of its algorithm."""

    resume: Path
    """Folder of the run."""
    total_steps: Steps | None = None
    """Extend it to so many environment steps in all; schedules go on over these."""
    ray_address: str | None = None
    """Ray cluster of its actors, if it is another one now."""


def kinds(place: type[Any] = Place) -> dict[str, Any]:
    """Return the dataclasses of options of a new run, by algorithm, each with those of ``place``."""
    return {name: with_place(algorithm.config, place) for name, algorithm in ALGORITHMS.items()}


def read(arguments: list[str]) -> Any:
    """Parse the arguments: options of a new run, or a run to continue."""
    if not arguments:
        raise ArgumentError(f"recurl train takes an algorithm ({', '.join(ALGORITHMS)}), or --resume RUN.")
    return read_run(arguments, read_sources(arguments), prog="recurl train") or parse_arguments(
        Resume, arguments, prog="recurl train"
    )


def read_run(arguments: list[str], sources: Sources, *, prog: str, place: type[Any] = Place) -> Any:
    """Parse the options of a new run; None where the arguments name no algorithm, nor does a preset or a file.

    Args:
        arguments: the arguments.
        sources: files with options.
        prog: the command.
        place: dataclass of the options besides those of the algorithm.
    """
    first = arguments[0] if arguments else ""
    named = first in (*HELP, HELP_ALL) or not first.startswith("-")
    algorithm = first if named else sources.algorithm
    if algorithm is None:
        return None
    own: dict[str, Any] = {}
    if algorithm in ALGORITHMS or ":" in algorithm:
        config = find_algorithm(algorithm).config
        own = {algorithm: with_place(with_defaults(config, sources.values(config)), place)}
    words = arguments if named else [algorithm, *arguments]
    wanted: Any = parse_subcommand({**kinds(place), **own}, words, prog=prog, what="algorithm", description=DESCRIPTION)
    return replace(wanted, options=plain(find_algorithm(algorithm).config, wanted.options))


def run(wanted: Any) -> int:
    """Train."""
    if isinstance(wanted, Resume):
        return _resume(wanted)
    if wanted.save_config is not None:
        if not speaks():
            return 0
        write_options_file(wanted.save_config, wanted.options)
        print(f"Options written to {wanted.save_config}: recurl train --config {wanted.save_config}")
        return 0
    return _train_anew(wanted.options, wanted)


def _train_anew(config: RunConfig, place: Place) -> int:
    if place.print_model:
        if not speaks():
            return 0
        with make_env(config, 1) as env:
            _say(Console(), describe_agent(make_agent(config, env)))
        return 0
    env, cell = (re.split("[/:]", text)[-1] for text in (config.env_name, config.cell))
    name = f"{env}-{config.algorithm}-{cell}-seed{config.seed}"
    folder = RunFolder(place.run_dir or Path("runs") / name, notify, trust=True)  # it gets these options, or has them
    with ExitStack() as held:
        with joined(config.device):
            status = _begin(config, folder, place, held)
        return _evaluate(folder, config) if status is None else status


def _begin(config: RunConfig, folder: RunFolder, place: Place, held: ExitStack) -> int | None:
    """Train anew, or go on where torchrun has started the processes again; see :func:`_train`."""
    begun = broadcast(_begun(config, folder))
    overwrite = place.overwrite or begun is None
    if not begun and rank() == 0:
        folder.check_free(overwrite=overwrite)
    with saying_what_fits(config), closing(Trainer(config, folder, console=_console())) as trainer:
        if begun:
            trainer.resume()
        elif rank() == 0:
            held.enter_context(folder.hold())
            folder.create(config, overwrite=overwrite)
        return _train(trainer)


def _begun(config: RunConfig, folder: RunFolder) -> bool | None:
    """Return whether torchrun has started the processes of this run again; None if it has no checkpoint yet."""
    if not restarted() or not folder.config.exists() or not folder.holds(config):
        return False
    return True if folder.checkpoints.is_dir() and any(folder.checkpoints.iterdir()) else None


def _resume(wanted: Resume) -> int:
    folder = RunFolder(wanted.resume, notify, trust=wanted.trust_run)
    with said_once():
        given = () if wanted.ray_address is None else ("ray_address",)
        steps = wanted.total_steps
        config = folder.read_config(given=given) if steps is None else folder.extend(steps, given)
    if wanted.ray_address is not None:
        config = replace(config, ray_address=wanted.ray_address)
    with (
        joined(config.device),
        saying_what_fits(config),
        closing(Trainer(config, folder, console=_console())) as trainer,
    ):
        trainer.resume()
        if wanted.total_steps is not None and rank() == 0:
            folder.rewrite(config)
        status = _train(trainer)
    return _evaluate(folder, config) if status is None else status


def _train(trainer: Trainer) -> int | None:
    """Train, and return the exit code; None where the policy is to be evaluated, once the ranks have parted."""
    config, path, console = trainer.config, trainer.folder.path, trainer.console
    set_up = time.process_time()
    notify_if_slow(config.device)
    how = f"by {config.algorithm} with {config.cell} on {config.device}, seed {config.seed}"
    over = f", over {world_size()} ranks" if world_size() > 1 else ""
    _say(console, f"Training {config.env} {how}, into {path}{over}")
    if isinstance(config, ProgramsConfig) and (config.compile or config.cuda_graph):
        _say(console, "The first updates compile programs and record graphs, which takes some seconds.")
    with StopOnSignal() as stop, _saying_how_to_go_on(trainer.folder, config):
        outcome = trainer.run(stop.requested)
    trainer.close()
    _say(console, _summary(outcome, set_up))
    if on_any_rank(stop.requested()):
        _say(console, f"Go on with: {resume_command(trainer.folder.path, config.to_dict())}")
        return stop.exit_code or 128 + signal.SIGTERM
    return None if rank() == 0 else 0


def _evaluate(folder: RunFolder, config: RunConfig) -> int:
    console = _console()
    _say(console, str(evaluate_run(folder, episodes=config.eval_episodes, console=console)))
    return 0


def _console() -> Console:
    return Console(quiet=rank() > 0)


@contextmanager
def _saying_how_to_go_on(folder: RunFolder, config: RunConfig) -> Generator[None]:
    """Add to an error that ends a run how to continue."""
    try:
        yield
    except Exception as raised:
        error = error_of_environment(raised) or raised
        if not isinstance(error, CallbackError | EnvError | NonFiniteError | StorageError | WorkerError):
            raise
        try:
            newest = latest_checkpoint(folder.checkpoints)
        except ArgumentError:
            advice = "The run has no checkpoint yet: begin it anew."
        else:
            how = resume_command(folder.path, config.to_dict())
            advice = f"Its newest checkpoint, of {int(newest.stem):,} steps, is good: {how}"
        remedy = _REMEDY if isinstance(error, NonFiniteError) else ""
        stop = "" if str(error).endswith(".") else "."
        raise type(error)(f"{error}{stop} {remedy}{advice}") from error.__cause__ or error


def _summary(outcome: Outcome, set_up: float) -> str:
    returns = f"mean return of the last 20 training episodes {outcome.return_mean:.4g}"
    if math.isnan(outcome.return_mean):
        returns = "no training episode ended"
    return (
        f"{_STATUS[outcome.status]} after {outcome.env_steps:,} steps: {returns}; training took "
        f"{outcome.cpu_s:.1f} s of CPU time ({outcome.wall_s:.1f} s wall), "
        f"set-up {set_up:.1f} s of CPU time"
    )


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, markup=False, highlight=False)

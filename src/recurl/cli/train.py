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

from recurl.cli.arguments import ReadsRun, parse_known_arguments, parse_subcommand
from recurl.cli.faults import error_of_environment
from recurl.cli.help import HELP, HELP_ALL
from recurl.cli.notices import notify
from recurl.cli.place import DESCRIPTION, NewRunOptions, with_run_options
from recurl.cli.signals import StopOnSignal
from recurl.cli.sources import Sources, plain, read_sources, with_defaults
from recurl.cli.speed import notify_if_slow
from recurl.collectors import Collector
from recurl.core.errors import ArgumentError, CallbackError, EnvError, NonFiniteError, StorageError, WorkerError
from recurl.core.ranges import Steps, fields_of, flag
from recurl.distributed import (
    broadcast,
    is_local_main_process,
    joined,
    on_any_rank,
    raise_once,
    rank,
    restarted,
    world_size,
)
from recurl.trainers import ALGORITHMS, Outcome, RunConfig, RunFolder, Trainer, evaluate_run, find_algorithm, make_env
from recurl.trainers.algorithms.options_file import write_options_file
from recurl.trainers.algorithms.table import make_agent
from recurl.trainers.checkpoint import latest_checkpoint
from recurl.trainers.machine import describe
from recurl.trainers.networks.agent import collecting
from recurl.trainers.networks.description import describe_agent
from recurl.trainers.run.memory import out_of_memory_advice
from recurl.trainers.trust import resume_command

_REMEDY = "Fix the environment, lower --learning-rate, or skip such data (--on-nonfinite skip). "
_STATUS = {"solved": "Solved", "finished": "Finished", "stopped": "Stopped"}


@dataclass(frozen=True)
class Resume(ReadsRun):
    """Resume a run from its newest checkpoint. To start a new run, name an algorithm first."""

    resume: Path
    """Run folder."""
    total_steps: Steps | None = None
    """Extend the run to this total number of environment steps; schedules continue over these."""
    ray_address: str | None = None
    """Address of the actors' Ray cluster, if it has changed."""


def kinds(extra: type[Any] = NewRunOptions) -> dict[str, Any]:
    """Return the option dataclasses of a new run by algorithm, each with the options of ``extra``."""
    return {name: with_run_options(algorithm.config, extra) for name, algorithm in ALGORITHMS.items()}


def read(arguments: list[str]) -> Any:
    """Parse the arguments: options of a new run, or a run to resume."""
    if any(word.partition("=")[0] == "--resume" for word in arguments):
        return _read_resume(arguments)
    args = read_run(arguments, read_sources(arguments), prog="recurl train") if arguments else None
    if args is None:
        raise ArgumentError(f"recurl train needs an algorithm ({', '.join(ALGORITHMS)}), or --resume RUN.")
    return args


def _read_resume(arguments: list[str]) -> Resume:
    args, others = parse_known_arguments(Resume, arguments, prog="recurl train")
    if others:
        raise ArgumentError(
            f"A resumed run keeps its algorithm and options, so that recurl train --resume takes only "
            f"{', '.join(flag(field.name) for field in fields_of(Resume))}; got {' '.join(others)}: leave it out, or "
            f"start another run with the networks of this one (--init-from {args.resume})."
        )
    return args


def read_run(arguments: list[str], sources: Sources, *, prog: str, extra: type[Any] = NewRunOptions) -> Any:
    """Parse the options of a new run; None if neither the arguments nor a preset or file names an algorithm.

    Args:
        arguments: the arguments.
        sources: option files.
        prog: the command.
        extra: dataclass of the options that don't belong to the algorithm.
    """
    first = arguments[0] if arguments else ""
    named = first in (*HELP, HELP_ALL) or not first.startswith("-")
    algorithm = first if named else sources.algorithm
    if algorithm is None:
        return None
    own: dict[str, Any] = {}
    if algorithm in ALGORITHMS or ":" in algorithm:
        config = find_algorithm(algorithm).config
        own = {algorithm: with_run_options(with_defaults(config, sources.values(config)), extra)}
    words = arguments if named else [algorithm, *arguments]
    about = DESCRIPTION if extra is NewRunOptions else (extra.__doc__ or "").partition("\n")[0]
    args: Any = parse_subcommand({**kinds(extra), **own}, words, prog=prog, what="algorithm", description=about)
    return replace(args, options=plain(find_algorithm(algorithm).config, args.options))


def run(args: Any) -> int:
    """Train, or resume a run."""
    if isinstance(args, Resume):
        return _resume(args)
    if args.save_config is not None:
        if not is_local_main_process():
            return 0
        write_options_file(args.save_config, args.options, chosen=False)
        print(f"Options written to {args.save_config}: recurl train --config {args.save_config}")
        return 0
    return _train_new(args.options, args)


def _train_new(config: RunConfig, extra: NewRunOptions) -> int:
    if extra.print_model:
        if not is_local_main_process():
            return 0
        with make_env(config, 1) as env:
            agent = make_agent(config, env)
            steps = Collector(env, collecting(agent.policy), frames_per_batch=1).explain()  # of one environment
            _print(Console(), f"{describe_agent(agent)}\n{steps}")
        return 0
    named = config.env_name.removesuffix(":parallel_env"), config.cell  # a name that all games of PettingZoo share
    env, cell = (re.split("[/:]", text)[-1] for text in named)
    name = f"{env}-{config.algorithm}-{cell}-seed{config.seed}"
    folder = RunFolder(extra.run_dir or Path("runs") / name, notify, trust=True)  # it has, or gets, these options
    with ExitStack() as held:
        with joined(config.device):
            status = _begin(config, folder, extra, held)
        return _evaluate(folder, config) if status is None else status


def _begin(config: RunConfig, folder: RunFolder, extra: NewRunOptions, held: ExitStack) -> int | None:
    """Start a new run, or resume it if torchrun has restarted the processes; see :func:`_train`."""
    resuming = broadcast(_is_restart(config, folder))
    overwrite = extra.overwrite or resuming is None
    if not resuming and rank() == 0:
        folder.check_free(overwrite=overwrite)
    with out_of_memory_advice(config), closing(Trainer(config, folder, console=_console())) as trainer:
        if resuming:
            trainer.resume()
        else:
            trainer.begin()
        if not resuming and rank() == 0:
            held.enter_context(folder.hold())
            folder.create(config, overwrite=overwrite)
        return _train(trainer)


def _is_restart(config: RunConfig, folder: RunFolder) -> bool | None:
    """Return whether torchrun has restarted the processes of this run; None if the run has no checkpoint yet."""
    if not restarted() or not folder.config.exists() or not folder.holds(config):
        return False
    return True if folder.checkpoints.is_dir() and any(folder.checkpoints.iterdir()) else None


def _resume(args: Resume) -> int:
    folder = RunFolder(args.resume, notify, trust=args.trust_run)
    with raise_once():
        given = () if args.ray_address is None else ("ray_address",)
        steps = args.total_steps
        config = folder.read_config(given=given) if steps is None else folder.extend(steps, given)
    if args.ray_address is not None:
        config = replace(config, ray_address=args.ray_address)
    with (
        joined(config.device),
        out_of_memory_advice(config),
        closing(Trainer(config, folder, console=_console())) as trainer,
    ):
        trainer.resume()
        if args.total_steps is not None and rank() == 0:
            folder.rewrite(config)
        status = _train(trainer)
    return _evaluate(folder, config) if status is None else status


def _train(trainer: Trainer) -> int | None:
    """Train and return the exit code, or None if this rank is to evaluate the policy after the ranks have shut down."""
    config, path, console = trainer.config, trainer.folder.path, trainer.console
    set_up = time.process_time()
    notify_if_slow(config.device)
    how = f"with {config.algorithm} ({config.cell}) on {config.device}, seed {config.seed}"
    over = f", over {world_size()} ranks" if world_size() > 1 else ""
    _print(console, f"Training {config.env} {how}, in {path}{over}")
    chosen = None if trainer.algorithm.env_steps else describe(config)
    words = {"compile": "compile programs", "cuda_graph": "capture CUDA graphs"}
    first = [text for name, text in words.items() if getattr(config, name, False)]
    if chosen is not None:
        _print(console, chosen)
    elif first:
        _print(console, f"The first updates {' and '.join(first)}, which takes some seconds.")
    with StopOnSignal() as stop, _resume_hint(trainer.folder, config):
        outcome = trainer.run(stop.requested)
    trainer.close()
    _print(console, _summary(outcome, set_up))
    if on_any_rank(stop.requested()):
        _print(console, f"Continue with: {resume_command(trainer.folder.path, config.to_dict())}")
        return stop.exit_code or 128 + signal.SIGTERM
    return None if rank() == 0 else 0


def _evaluate(folder: RunFolder, config: RunConfig) -> int:
    console = _console()
    _print(console, str(evaluate_run(folder, episodes=config.eval_episodes, console=console)))
    return 0


def _console() -> Console:
    return Console(quiet=rank() > 0)


@contextmanager
def _resume_hint(folder: RunFolder, config: RunConfig) -> Generator[None]:
    """Extend errors that end a run with the command to continue it."""
    try:
        yield
    except Exception as raised:
        error = error_of_environment(raised) or raised
        if not isinstance(error, CallbackError | EnvError | NonFiniteError | StorageError | WorkerError):
            raise
        try:
            newest = latest_checkpoint(folder.checkpoints)
        except ArgumentError:
            advice = "The run has no checkpoint yet: start it again."
        else:
            how = resume_command(folder.path, config.to_dict())
            advice = f"Resume from the newest checkpoint, at {int(newest.stem):,} steps: {how}"
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
        f"setup {set_up:.1f} s of CPU time"
    )


def _print(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, markup=False, highlight=False)

"""``recurl train ppo``, ``recurl train dqn``, ``recurl train r2d2`` and ``recurl train --resume``."""

from __future__ import annotations

import re
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from recurl.cli.arguments import parse_arguments
from recurl.cli.notices import notify
from recurl.cli.signals import StopOnSignal
from recurl.errors import ArgumentError, NonFiniteError, StorageError
from recurl.trainers import DQNConfig, Outcome, PPOConfig, R2D2Config, RunConfig, RunFolder, Trainer, evaluate_run
from recurl.trainers.checkpoint import latest_checkpoint

_REMEDY = "Mend the environment, lower --learning-rate, or leave such data out (--on-nonfinite skip). "
_STATUS = {"solved": "Solved", "finished": "Finished", "stopped": "Stopped"}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a run goes."""

    run_dir: Path | None = None
    """Folder of the run; runs/<environment>-<algorithm>-<cell>-seed<seed> by default."""
    overwrite: bool = False
    """Replace a run that is in the folder already."""


@dataclass(frozen=True, kw_only=True)
class TrainPPO(Place):
    """Train a policy with (recurrent) PPO."""

    config: tyro.conf.OmitArgPrefixes[PPOConfig]


@dataclass(frozen=True, kw_only=True)
class TrainDQN(Place):
    """Train a policy with (recurrent) DQN, from a replay buffer."""

    config: tyro.conf.OmitArgPrefixes[DQNConfig]


@dataclass(frozen=True, kw_only=True)
class TrainR2D2(Place):
    """Train a policy with R2D2: DQN with prioritised slices, burn-in, longer returns and rescaled values."""

    config: tyro.conf.OmitArgPrefixes[R2D2Config]


@dataclass(frozen=True)
class Resume:
    """Go on with a run from its newest checkpoint (a new run: recurl train ppo, dqn or r2d2)."""

    resume: Path
    """Folder of the run."""


def train_ppo_command(arguments: list[str]) -> int:
    """Train a new run."""
    wanted = parse_arguments(TrainPPO, arguments, prog="recurl train ppo")
    return _train_anew(wanted.config, wanted)


def train_dqn_command(arguments: list[str]) -> int:
    """Train a new run."""
    wanted = parse_arguments(TrainDQN, arguments, prog="recurl train dqn")
    return _train_anew(wanted.config, wanted)


def train_r2d2_command(arguments: list[str]) -> int:
    """Train a new run."""
    wanted = parse_arguments(TrainR2D2, arguments, prog="recurl train r2d2")
    return _train_anew(wanted.config, wanted)


def _train_anew(config: RunConfig, place: Place) -> int:
    env, cell = re.split("[/:]", config.env)[-1], config.cell.rpartition(":")[2]
    name = f"{env}-{config.algorithm}-{cell}-seed{config.seed}"
    folder = RunFolder(place.run_dir or Path("runs") / name, notify)
    folder.check_free(overwrite=place.overwrite)
    with closing(Trainer(config, folder, console=Console())) as trainer, folder.hold():
        folder.create(config, overwrite=place.overwrite)
        return _train(trainer)


def resume_command(arguments: list[str]) -> int:
    """Go on with a run."""
    folder = RunFolder(parse_arguments(Resume, arguments, prog="recurl train").resume, notify)
    with closing(Trainer(folder.read_config(), folder, console=Console())) as trainer:
        trainer.resume()
        return _train(trainer)


def _train(trainer: Trainer) -> int:
    config, path, console = trainer.config, trainer.folder.path, trainer.console
    set_up = time.process_time()
    how = f"by {config.algorithm} with {config.cell} on {config.device}, seed {config.seed}"
    _say(console, f"Training {config.env} {how}, into {path}")
    with StopOnSignal() as stop, _saying_how_to_go_on(trainer.folder):
        outcome = trainer.run(stop.requested)
    trainer.close()
    _say(console, _summary(outcome, set_up))
    if stop.requested():
        _say(console, f"Go on with: recurl train --resume {path}")
        return stop.exit_code
    _say(console, str(evaluate_run(trainer.folder, episodes=config.eval_episodes, console=console)))
    return 0


@contextmanager
def _saying_how_to_go_on(folder: RunFolder) -> Generator[None]:
    """Add to an error that ends a run what it has left."""
    try:
        yield
    except (NonFiniteError, StorageError) as error:
        try:
            newest = latest_checkpoint(folder.checkpoints)
        except ArgumentError:
            advice = "The run has no checkpoint yet: begin it anew."
        else:
            advice = (
                f"Its newest checkpoint, of {int(newest.stem):,} steps, is good: recurl train --resume {folder.path}"
            )
        remedy = _REMEDY if isinstance(error, NonFiniteError) else ""
        raise type(error)(f"{error} {remedy}{advice}") from error


def _summary(outcome: Outcome, set_up: float) -> str:
    return (
        f"{_STATUS[outcome.status]} after {outcome.env_steps:,} steps: mean return of the last 20 training episodes "
        f"{outcome.return_mean:.4g}; training took {outcome.cpu_s:.1f} s of CPU time ({outcome.wall_s:.1f} s wall), "
        f"set-up {set_up:.1f} s of CPU time"
    )


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, markup=False, highlight=False)

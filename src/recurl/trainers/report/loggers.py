"""Registry of optional loggers, in addition to the CSV files and the terminal."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from recurl.core.errors import MissingDependencyError
from recurl.trainers.report.events import Events
from recurl.trainers.report.tensorboard_logger import TensorBoardLogger
from recurl.trainers.report.wandb_logger import WandbLogger


class LoggerContext(NamedTuple):
    """Arguments for constructing a logger."""

    folder: Path
    """Run folder."""
    tensorboard: Path
    """Folder of the TensorBoard events."""
    options: Mapping[str, Any]
    """Options of the run."""
    since: int | None
    """Environment step from which a run is resumed; None for a new run."""


Maker: TypeAlias = Callable[[LoggerContext], object]


def _tensorboard(place: LoggerContext) -> TensorBoardLogger:
    return TensorBoardLogger(Events(place.tensorboard, purge_step=None if place.since is None else place.since + 1))


LOGGERS: dict[str, tuple[Maker, str, str] | None] = {
    "tensorboard": (_tensorboard, "tensorboard", "train"),
    "wandb": (lambda place: WandbLogger(place.folder, place.options), "wandb", "wandb"),
    "none": None,
}
"""Factory, required package, and extra that installs the package, by logger name."""


def check_packages(logger: str) -> None:
    """Check that the packages of a logger and of the plots are installed.

    Args:
        logger: name of the logger.

    Raises:
        MissingDependencyError: one of the packages is not installed.
    """
    entry = LOGGERS[logger]
    needed = [("matplotlib", "train"), *([] if entry is None else [entry[1:]])]
    for package, extra in needed:
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(f"{package} is not installed: pip install 'recurl[{extra}]'")


def make_loggers(logger: str, place: LoggerContext) -> list[object]:
    """Return a list with the named logger, empty for ``"none"``."""
    entry = LOGGERS[logger]
    return [] if entry is None else [entry[0](place)]

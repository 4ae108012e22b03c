"""Options of a new run besides those of its algorithm."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any

import tyro

from recurl.trainers.config import RunConfig

DESCRIPTION = "Train a policy by one of these algorithms. Continue a run that was stopped: recurl train --resume RUN"


@dataclass(frozen=True, kw_only=True)
class Place:
    """The folder of a new run."""

    run_dir: Path | None = None
    """Folder of the run; by default runs/<environment>-<algorithm>-<cell>-seed<seed>."""
    overwrite: bool = False
    """Replace a run that is in the folder already."""
    print_model: bool = False
    """Show what is observed and the networks, and train nothing."""
    preset: str | None = None
    """Take options that were tuned and measured; --config and options of the command line come first."""
    config: Path | None = None
    """Take options from a TOML file, or from the config.json of a run; options of the command line come first."""
    save_config: Path | None = None
    """Write the options to this TOML file, for --config, instead of training."""
    trust_run: bool = False
    """Import what --config names outside of recurl: an environment, a cell, a wrapper, a callback or an algorithm."""


def with_place(config: type[RunConfig], place: type[Any] = Place) -> type[Any]:
    """Return a dataclass of the options of an algorithm, in its field ``options``, and those of ``place``."""
    about = (config.__doc__ or "").partition("\n")[0]
    options = [("options", tyro.conf.OmitArgPrefixes[config])]
    return make_dataclass("Train", options, bases=(place,), namespace={"__doc__": about}, frozen=True, kw_only=True)

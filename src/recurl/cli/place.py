"""Options of a new run in addition to those of its algorithm."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any

import tyro

from recurl.trainers.config import RunConfig

DESCRIPTION = "Train a policy with one of these algorithms. Continue a stopped run: recurl train --resume RUN"


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Where to read options of an algorithm that aren't on the command line."""

    preset: str | None = None
    """Use the tuned options of a preset; --config and command line options take precedence."""
    config: Path | None = None
    """Read options from a TOML file, or from the config.json of a run; command line options take precedence."""


@dataclass(frozen=True, kw_only=True)
class NewRunOptions(SourceOptions):
    """Options of a new run that don't belong to its algorithm."""

    run_dir: Path | None = None
    """Run folder; by default runs/<environment>-<algorithm>-<cell>-seed<seed>."""
    overwrite: bool = False
    """Replace an existing run in the folder."""
    print_model: bool = False
    """Show the observations and the networks without training."""
    save_config: Path | None = None
    """Write the options to this TOML file, for --config, instead of training."""
    trust_run: bool = False
    """Import what --config names outside of recurl: an environment, a cell, a wrapper, a callback or an algorithm."""


def with_run_options(config: type[RunConfig], extra: type[Any] = NewRunOptions) -> type[Any]:
    """Return a dataclass with an algorithm's options, in the field ``options``, and those of ``extra``."""
    about = (config.__doc__ or "").partition("\n")[0]
    options = [("options", tyro.conf.OmitArgPrefixes[config])]
    return make_dataclass("Train", options, bases=(extra,), namespace={"__doc__": about}, frozen=True, kw_only=True)

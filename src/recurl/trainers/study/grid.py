"""Grid of a sweep: every combination of options with every seed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

from recurl.core.errors import ArgumentError
from recurl.core.messages import nearest
from recurl.core.ranges import Field, fields_of, flag
from recurl.trainers.config import RunConfig

_DIVIDED = frozenset({"num_envs", "env_groups"})  # by worker processes
_WORKERS = ("env_workers", "env_groups")
_BETWEEN = re.compile(r",(?![^()]*\))")  # commas outside of parentheses, which hold the options of a cell


class Job(NamedTuple):
    """One run of a sweep."""

    name: str
    """Folder name, such as ``cell=lstm,seed=0``."""
    settings: dict[str, str]
    """Options set by the sweep, as written."""
    config: RunConfig


def parse_settings(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Parse options and their values from texts of the form ``field=a,b``; commas in parentheses divide nothing.

    Raises:
        ArgumentError: a text is malformed, or an option or one of its values is repeated.

    Example:
        >>> parse_settings(["cell=lstm,gru", "learning_rate=1e-3"])
        {'cell': ('lstm', 'gru'), 'learning_rate': ('1e-3',)}
        >>> parse_settings(["cell=gtrxl(window=8,heads=2),gru"])
        {'cell': ('gtrxl(window=8,heads=2)', 'gru')}
    """
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        name = name.removeprefix("--").replace("-", "_")
        parts = tuple(_BETWEEN.split(values))
        if not (equals and name and all(parts)):
            raise ArgumentError(f"--set takes field=value,value such as cell=lstm,gru, got {text!r}.")
        if name in found:
            raise ArgumentError(f"--set got {name} twice.")
        found[name] = parts
        if len(set(parts)) < len(parts):
            raise ArgumentError(f"--set {name} has a value twice: {values}.")
    return found


def check_option_names(kind: type[RunConfig], settings: Mapping[str, Sequence[str]]) -> None:
    """Check that an algorithm has all options and that the seed, which ``--seeds`` sets, is not among them.

    Raises:
        ArgumentError: an option is unknown or the seed.
    """
    names = [field.name for field in fields_of(kind) if field.name != "seed"]
    for name in settings:
        if name == "seed":
            raise ArgumentError("--set can't set seed: --seeds N trains with N seeds, from --seed on.")
        if name not in names:
            raise ArgumentError(f"--set: {kind.algorithm} has no option {name!r}.{nearest(name, names)}")


def arguments(field: Field, value: str) -> list[str]:
    """Return the command line arguments that set an option to a value.

    Raises:
        ArgumentError: the option is boolean and the value is neither ``true`` nor ``false``.
    """
    if field.kind is not bool:
        return [flag(field.name), value]
    if value not in ("true", "false"):
        raise ArgumentError(f"--set {field.name} must be true or false, got {value!r}.")
    return [flag(field.name if value == "true" else f"no_{field.name}")]


def make_jobs(
    kind: type[RunConfig],
    settings: Mapping[str, Sequence[str]],
    seeds: int,
    read: Callable[[list[str]], RunConfig],
    earlier: Mapping[str, Any] = MappingProxyType({}),
) -> list[Job]:
    """Return the jobs of a sweep, ordered by seed first.

    What suits this machine is chosen for the first combination, and all others get the same, so that runs differ in
    what the sweep varies. There are no worker processes where they might not divide the environments of all.

    Args:
        kind: option class of the algorithm.
        settings: options and their values; see :func:`parse_settings`.
        seeds: number of seeds.
        read: parses the options of a run, given the arguments that a combination adds to the command line.
        earlier: options with which the sweep was started, if it is continued: nothing is chosen again.

    Raises:
        ArgumentError: an option or a combination of options can't be used.
    """
    check_option_names(kind, settings)
    fields = {field.name: field for field in fields_of(kind)}
    combinations = [dict(zip(settings, values, strict=True)) for values in product(*settings.values())]
    words = [[word for name, value in one.items() for word in arguments(fields[name], value)] for one in combinations]
    chosen = {name: value for name, value in read(words[0]).choice.values.items() if name not in settings}
    if not _DIVIDED.isdisjoint(settings):
        chosen.update({name: value for name, value in kind.settled().items() if name in _WORKERS and name in chosen})
    same = [f"{flag(name)}={earlier.get(name, value)}" for name, value in chosen.items()]
    configs = [read([*same, *more]) for more in words]
    jobs = [
        Job(_name(one, config.seed + seed), one, replace(config, seed=config.seed + seed))
        for seed in range(seeds)
        for one, config in zip(combinations, configs, strict=True)
    ]
    names = [job.name for job in jobs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ArgumentError(f"--set has values that give two runs the folder name {twice!r}: write them differently.")
    return jobs


def _name(settings: Mapping[str, str], seed: int) -> str:
    parts = [f"{name}={re.split('[/:]', value)[-1]}" for name, value in (*settings.items(), ("seed", str(seed)))]
    return re.sub(r"[^\w.=,+-]", "-", ",".join(parts))

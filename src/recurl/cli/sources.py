"""Where options come from besides the command line: ``--config`` and ``--preset``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, fields, make_dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

from recurl.ranges import flag
from recurl.trainers import RunConfig
from recurl.trainers.algorithms.options_file import OptionsFile, options_for, read_options_file, read_preset
from recurl.trainers.trust import check_names

_C = TypeVar("_C", bound=RunConfig)


class Sources(NamedTuple):
    """Files whose options are the defaults of a command line, the preset first."""

    files: tuple[OptionsFile, ...]

    @property
    def algorithm(self) -> str | None:
        """The algorithm that the last of them names, or None."""
        return next((file.algorithm for file in reversed(self.files) if file.algorithm), None)

    def values(self, kind: type[RunConfig]) -> dict[str, Any]:
        """Return their options; those of a later file come before those of an earlier one.

        Raises:
            ArgumentError: a file has options of another algorithm, or some that aren't there.
        """
        return {name: value for file in self.files for name, value in options_for(kind, file).items()}


def read_sources(arguments: Sequence[str]) -> Sources:
    """Read the files that ``--preset`` and ``--config`` name.

    Raises:
        ArgumentError: there is no such preset, or a file can't be read.
        MissingDependencyError: a package that a preset needs isn't installed.
    """
    preset, config = (_value_of(arguments, option) for option in ("--preset", "--config"))
    files = (preset and read_preset(preset), config and _read_config(Path(config), arguments))
    return Sources(tuple(file for file in files if isinstance(file, OptionsFile)))


def _read_config(path: Path, arguments: Sequence[str]) -> OptionsFile:
    """Read a file of options, which names code only with ``--trust-run``, or where the command line gives the name."""
    file = read_options_file(path)
    if "--trust-run" not in arguments:
        given = {word.partition("=")[0] for word in arguments}
        values = {name: value for name, value in file.values.items() if flag(name) not in given}
        named = {"algorithm": file.algorithm} if file.algorithm not in arguments[:1] else {}
        check_names({**named, **values}, file.source)
    return file


def _value_of(arguments: Sequence[str], option: str) -> str | None:
    """Return the last value of an option, as the command line's parser takes it."""
    found = None
    for place, word in enumerate(arguments):
        if word == option and place + 1 < len(arguments) and not arguments[place + 1].startswith("--"):
            found = arguments[place + 1]
        elif word.startswith(f"{option}="):
            found = word.partition("=")[2]
    return found


def with_defaults(kind: type[_C], values: Mapping[str, Any]) -> type[_C]:
    """Return a class of the same options with other defaults, which its help shows.

    Example:
        >>> from recurl.trainers import PPOConfig
        >>> with_defaults(PPOConfig, {"env": "recurl/TMaze-v0", "gamma": 0.9})(gamma=0.5).env
        'recurl/TMaze-v0'
    """
    hints = get_type_hints(kind, include_extras=True)
    changed = [(name, hints[name], field(default=value)) for name, value in values.items()]
    own = {"__doc__": kind.__doc__, "__module__": kind.__module__}
    return make_dataclass(kind.__name__, changed, bases=(kind,), namespace=own, frozen=True, kw_only=True)


def plain(kind: type[_C], options: RunConfig) -> _C:
    """Return options of a class of :func:`with_defaults` as those of ``kind``."""
    return kind(**{each.name: getattr(options, each.name) for each in fields(kind)})

"""Option sources besides the command line: ``--config`` and ``--preset``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, fields, make_dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

from recurl.core.ranges import flag
from recurl.trainers import RunConfig
from recurl.trainers.algorithms.options_file import OptionsFile, options_for, read_options_file, read_preset
from recurl.trainers.trust import check_names

_C = TypeVar("_C", bound=RunConfig)


class Sources(NamedTuple):
    """Option files that provide the defaults of a command line, the preset first."""

    files: tuple[OptionsFile, ...]

    @property
    def algorithm(self) -> str | None:
        """The algorithm named by the last file that names one, or None."""
        return next((file.algorithm for file in reversed(self.files) if file.algorithm), None)

    def values(self, kind: type[RunConfig]) -> dict[str, Any]:
        """Return the merged options; later files take precedence.

        Raises:
            ArgumentError: a file has options of another algorithm, or unknown ones.
        """
        return {name: value for file in self.files for name, value in options_for(kind, file).items()}


def read_sources(arguments: Sequence[str]) -> Sources:
    """Read the files named by ``--preset`` and ``--config``.

    Raises:
        ArgumentError: the preset is unknown, or a file can't be read.
        MissingDependencyError: a package required by the preset isn't installed.
    """
    preset, config = (_value_of(arguments, option) for option in ("--preset", "--config"))
    files = (preset and read_preset(preset), config and _read_config(Path(config), arguments))
    return Sources(tuple(file for file in files if isinstance(file, OptionsFile)))


def _read_config(path: Path, arguments: Sequence[str]) -> OptionsFile:
    """Read an options file; it may name code only with ``--trust-run`` or where the command line overrides the name."""
    file = read_options_file(path)
    if "--trust-run" not in arguments:
        given = {word.partition("=")[0] for word in arguments}
        values = {name: value for name, value in file.values.items() if flag(name) not in given}
        named = {"algorithm": file.algorithm} if file.algorithm not in arguments[:1] else {}
        check_names({**named, **values}, file.source)
    return file


def _value_of(arguments: Sequence[str], option: str) -> str | None:
    """Return the last value of an option, as the command-line parser does."""
    found = None
    for place, word in enumerate(arguments):
        if word == option and place + 1 < len(arguments) and not arguments[place + 1].startswith("--"):
            found = arguments[place + 1]
        elif word.startswith(f"{option}="):
            found = word.partition("=")[2]
    return found


def with_defaults(kind: type[_C], values: Mapping[str, Any]) -> type[_C]:
    """Return a subclass of an option class with different defaults, which the help shows.

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
    """Convert options of a class made by :func:`with_defaults` back to ``kind``."""
    made = kind(**{each.name: getattr(options, each.name) for each in fields(kind)})
    object.__setattr__(made, "choice", options.choice)  # made for the values that were left open, which are now given
    return made

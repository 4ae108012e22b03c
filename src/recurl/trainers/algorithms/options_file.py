"""Option files: TOML, the ``config.json`` of a run, and the built-in presets."""

from __future__ import annotations

import importlib.metadata
import json
import math
import tomllib
from pathlib import Path
from typing import Any, NamedTuple, cast

from recurl.core.errors import ArgumentError, MissingDependencyError
from recurl.core.messages import nearest
from recurl.core.ranges import Field, fields_of
from recurl.core.untrusted import read_json
from recurl.trainers.algorithms.table import find_algorithm
from recurl.trainers.config import RunConfig
from recurl.trainers.files.durable import write_atomic

PRESETS = Path(__file__).parents[2] / "presets"
"""Folder of the built-in presets."""


class OptionsFile(NamedTuple):
    """Options read from a file; only those that the file sets are in ``values``."""

    source: str
    """Name of the file in error messages."""
    algorithm: str | None
    values: dict[str, Any]
    """Options by name."""
    about: dict[str, Any]
    """Metadata of a preset: its ``title``, and the required ``packages``."""


def read_options_file(path: Path, source: str | None = None) -> OptionsFile:
    """Read options from a TOML file or from the JSON file of a run.

    Args:
        path: the file.
        source: name of the file in error messages; by default its path.

    Raises:
        ArgumentError: if it can't be read.
    """
    source = str(path) if source is None else source
    try:
        values: Any = read_json(path) if path.suffix == ".json" else tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"{source} can't be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ArgumentError(f"{source} is not {kind}: {error}.") from error
    if not isinstance(values, dict):
        raise ArgumentError(f"{source} must contain options by name, got {type(cast(object, values)).__name__}.")
    options = dict(cast(dict[str, Any], values))
    algorithm, about = options.pop("algorithm", None), options.pop("about", {})
    if algorithm is not None and not isinstance(algorithm, str):
        raise ArgumentError(f"{source}: algorithm must be a name such as 'ppo', got {algorithm!r}.")
    if not isinstance(about, dict):
        raise ArgumentError(f"{source}: about must be a table of notes, got {about!r}.")
    return OptionsFile(source, algorithm, options, cast(dict[str, Any], about))


def preset_names() -> list[str]:
    """Return the names of the presets."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def read_preset(name: str) -> OptionsFile:
    """Read a built-in preset and check that its packages are installed.

    Raises:
        ArgumentError: if there is no such preset.
        MissingDependencyError: if a package that it needs isn't installed.
    """
    names = preset_names()
    if name not in names:
        raise ArgumentError(f"There is no preset {name!r}: choose from {', '.join(names)}.{nearest(name, names)}")
    preset = read_options_file(PRESETS / f"{name}.toml", f"The preset {name}")
    missing = [package for package in preset.about.get("packages", []) if not _installed(package)]
    if missing:
        raise MissingDependencyError(
            f"The preset {name} needs {', '.join(missing)}, which isn't installed: pip install {' '.join(missing)}"
        )
    return preset


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def options_for(kind: type[RunConfig], file: OptionsFile) -> dict[str, Any]:
    """Convert the options of a file to field values of an algorithm's options.

    Args:
        kind: option dataclass of the algorithm.
        file: the file's options.

    Raises:
        ArgumentError: if the file is for another algorithm, or an option is unknown or invalid.
    """
    if file.algorithm is not None and find_algorithm(file.algorithm).config is not kind:
        raise ArgumentError(
            f"{file.source} has options of {file.algorithm}, not of {kind.algorithm}: recurl train {file.algorithm}."
        )
    known = {field.name: field for field in fields_of(kind)}
    for name in file.values:
        if name not in known:
            raise ArgumentError(f"{file.source}: {kind.algorithm} has no option {name!r}.{nearest(name, known)}")
    return {name: _value(known[name], value, file.source) for name, value in file.values.items()}


def _value(field: Field, value: Any, source: str) -> Any:
    value = field.read(value)
    try:
        field.check(value)
    except ArgumentError as error:
        raise ArgumentError(f"{source}: {error}") from error
    return float(value) if field.kind is float and value is not None else value


def write_options_file(path: Path, config: RunConfig, *, chosen: bool = True) -> None:
    """Write the options of a run as TOML for ``--config``, without those that are None.

    Args:
        path: the file.
        config: the options.
        chosen: False to write those that recurl chose for this machine as comments, so that another chooses its own.

    Raises:
        StorageError: if the file can't be written.
    """
    left = () if chosen else config.choice.left
    lines = [
        f"# {name} = {_toml(value)}  # chosen by recurl" if name in left else f"{name} = {_toml(value)}"
        for name, value in config.to_dict().items()
        if value is not None
    ]
    write_atomic(path, ("\n".join(lines) + "\n").encode())


def _toml(value: bool | float | str | list[Any]) -> str:
    """Format a value as TOML.

    Example:
        >>> [_toml(value) for value in (True, 3, 1e-05, math.inf, "k=8", ["a", "b"])]
        ['true', '3', '1e-05', 'inf', '"k=8"', '["a", "b"]']
    """
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    return str(value).lower() if isinstance(value, bool) else repr(value)

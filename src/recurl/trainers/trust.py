"""Names of code in untrusted files, which need the user's permission.

A run folder is data. An option in its ``config.json`` may name code, ``module:Class``, and importing that module runs
it. A name from a file is therefore refused unless it is harmless: it is part of recurl, it belongs to an installed
environment package that recurl knows, or its module has already been imported by the program and the named object is
checked before it is called. The user allows other names with ``--trust-run`` (``trust=True`` in Python), or by setting
the option explicitly.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, cast

from recurl.core.errors import ArgumentError
from recurl.core.ranges import flag

__all__ = ["check_names", "names_of_code"]

_PACKAGES = frozenset({"ale_py", "memory_maze", "minigrid", "popgym"})
_JAX_PACKAGES = {"brax": "brax", "craftax": "craftax", "gymnax": "gymnax", "playground": "mujoco_playground"}
_GAMES, _GAME_PACKAGES, _GAME_FUNCTION = "pettingzoo/", frozenset({"mpe2"}), "parallel_env"
_ENVS = ("env", "eval_env")
_OF_PACKAGES = (*_ENVS, "wrapper")
_CHECKED = (
    *_ENVS,
    "wrapper",
    "cell",
    "algorithm",
    "symmetry",
)  # only a registered environment, a wrapper class ... is called
_WITH_ARGUMENTS = ("cell", "wrapper")  # in parentheses, which never name code
_CLUSTER, _OWN_CLUSTER = "ray_address", "auto"
_DATA, _DATA_PACKAGE = "episodes", "minari"  # minari:ID reads data; any other value is a folder
_NEVER = frozenset({"device", "collectors", "env_kwargs", "eval_env_kwargs", "init_from"})
"""Options in which a colon has another meaning. In all others, including those of custom algorithms, it names a
module."""
_ADAPTERS = "GymV2"  # Gymnasium environments that import code named by an argument
_RECORDERS = "RecordVideo"  # Gymnasium wrappers that write files to a path given by an argument
_MODULE = re.compile(r"[A-Za-z_][\w.]*", re.ASCII)
_SHOWN = 80


def check_names(values: Mapping[str, Any], source: str | Path) -> None:
    """Check that options from a file name no code that needs the user's permission.

    Args:
        values: the options read from the file.
        source: the file, for the error message.

    Raises:
        ArgumentError: if one does. The message says which, what it would import, and how to allow it.

    Example:
        >>> check_names({"cell": "lstm", "env": "CartPole-v1"}, "config.json")
        >>> check_names({"cell": "my_file:MyCell"}, "config.json")
        Traceback (most recent call last):
        recurl.core.errors.ArgumentError: config.json names code: --cell my_file:MyCell would use ...
    """
    found = names_of_code(values)
    if not found:
        return
    option, text = found[0]
    effect = _effect(option, text)
    more = f" (one of {len(found)} such names)" if len(found) > 1 else ""
    raise ArgumentError(
        f"{source} names code: {flag(option)} {_short(text)} {effect}{more}. No code from a file is run without your "
        "permission: if you trust its author, add --trust-run (in Python, trust=True)."
    )


def names_of_code(values: Mapping[str, Any], imported: Container[str] = sys.modules) -> list[tuple[str, str]]:
    """Return the options, with the names in them, that need the user's permission.

    Args:
        values: the options read from the file.
        imported: names of the modules that the program has already imported.
    """
    texts = [(option, text) for option, value in values.items() if option not in _NEVER for text in _texts(value)]
    return [(option, text) for option, text in texts if not _is_harmless(option, text, imported)]


def _texts(value: Any) -> Iterator[str]:
    for part in cast("list[Any]", value) if isinstance(value, list | tuple) else (value,):
        if isinstance(part, str):
            yield part


def _is_harmless(option: str, text: str, imported: Container[str]) -> bool:
    if option == _CLUSTER:
        return text == _OWN_CLUSTER
    if option == _DATA:
        named = text.startswith(f"{_DATA_PACKAGE}:") and _origin(_DATA_PACKAGE) is not None
        return not named or _DATA_PACKAGE in imported or _is_installed(_DATA_PACKAGE)
    name = text.partition("(")[0] if option in _WITH_ARGUMENTS else text
    module, colon, rest = name.partition(":")
    if (rest if colon else name).startswith(_ADAPTERS if option in _ENVS else _RECORDERS):
        return False
    if not colon:
        return True
    if option in _ENVS and module.startswith(_GAMES):
        return rest == _GAME_FUNCTION and _is_of_games(module.removeprefix(_GAMES))
    if option not in _CHECKED or ":" in rest or not _MODULE.fullmatch(module):
        return False
    if option in _ENVS and module == "jax":
        family = rest.partition("/")[0]
        return all(map(_is_installed, ("jax", _JAX_PACKAGES[family]))) if family in _JAX_PACKAGES else False
    package = module.partition(".")[0]
    return (
        package == "recurl"
        or module in imported
        or (option in _OF_PACKAGES and package in _PACKAGES and _is_installed(package))
    )


def _is_of_games(module: str) -> bool:
    """Return whether a module belongs to an installed package of games; an imported one may have any function."""
    package = module.partition(".")[0]
    return bool(_MODULE.fullmatch(module)) and package in _GAME_PACKAGES and _is_installed(package)


def _is_installed(package: str) -> bool:
    """Return whether a package would be imported from outside the working directory."""
    origin = _origin(package)
    return origin is not None and Path.cwd().resolve() not in (origin.parent, origin.parent.parent)


def _origin(package: str, path: Sequence[str] | None = None) -> Path | None:
    """Return the file that importing ``package`` would run, or None if unknown. Nothing is imported."""
    spec = PathFinder.find_spec(package, path)
    return None if spec is None or spec.origin is None else Path(spec.origin).resolve()


def _effect(option: str, text: str) -> str:
    """Describe what using a name would do."""
    if option == _CLUSTER:
        return "would join the Ray cluster there, whose processes send code"
    module = text.partition("(")[0].rpartition(":")[0].removeprefix(_GAMES)
    return f"would use the module {_short(module)}, {_place(module)}" if module else "imports what its arguments name"


def resume_command(path: Path, values: Mapping[str, Any]) -> str:
    """Return the command that resumes a run in a new process, where nothing has been imported yet.

    Args:
        path: folder of the run.
        values: its options.
    """
    trust = " --trust-run" if names_of_code(values, imported=()) else ""
    return f"recurl train --resume {shlex.quote(str(path))}{trust}"


def _place(module: str) -> str:
    package = module.partition(".")[0]
    with_here = [*sys.path, str(Path.cwd())]  # trusted modules may also be in the working directory
    origin = _origin(package, with_here) if _MODULE.fullmatch(package) else None
    return "which isn't installed here" if origin is None else f"found at {origin}"


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."

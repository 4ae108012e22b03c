"""Objects that an option names as ``module:name``."""

from __future__ import annotations

import importlib
from typing import Any

from recurl.errors import ArgumentError, MissingDependencyError
from recurl.nearest import nearest

__all__ = ["load_object", "pip_line"]

_PACKAGES = {"ale_py": "ale-py", "Box2D": "'gymnasium[box2d]'", "mujoco": "'gymnasium[mujoco]'"}


def load_object(option: str, text: str, kind: str = "name") -> Any:
    """Import what ``module:name`` names. The ``recurl`` command finds modules in the working directory too.

    Args:
        option: name of the option, for messages.
        text: the module and a name in it.
        kind: what the name stands for, for messages.

    Raises:
        ArgumentError: ``text`` is written otherwise, the module can't be imported, or it lacks the name.
        MissingDependencyError: the module is not installed.

    Example:
        >>> load_object("--wrapper", "fractions:Fraction")(1, 2)
        Fraction(1, 2)
        >>> load_object("--wrapper", "fractions:Fracton", "Class")
        Traceback (most recent call last):
        recurl.errors.ArgumentError: --wrapper: the module 'fractions' has no 'Fracton'. Did you mean Fraction?
    """
    module_name, colon, name = text.partition(":")
    if not (module_name and colon and name):
        raise ArgumentError(f"{option} takes module:{kind}, got {text!r}.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module_name.partition(".")[0]:
            raise ArgumentError(f"{option}: the module {module_name!r} can't be imported: {error}.") from error
        raise MissingDependencyError(
            f"{option}: there is no module {module_name!r}: install it ({pip_line(module_name)}), or name a file in "
            "the working directory or in a folder on PYTHONPATH."
        ) from error
    except (ImportError, SyntaxError, TypeError, ValueError) as error:
        raise ArgumentError(f"{option}: the module {module_name!r} can't be imported: {error}.") from error
    found = getattr(module, name, None)
    if found is None:
        raise ArgumentError(f"{option}: the module {module_name!r} has no {name!r}.{nearest(name, vars(module))}")
    return found


def pip_line(module: str) -> str:
    """Return the command that installs the package of a module.

    Example:
        >>> pip_line("ale_py"), pip_line("popgym.envs")
        ('pip install ale-py', 'pip install popgym')
    """
    top = module.partition(".")[0]
    return f"pip install {_PACKAGES.get(top, top)}"

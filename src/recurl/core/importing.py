"""Import of objects given as ``module:name`` or ``module:name(argument=value)`` in an option."""

from __future__ import annotations

import ast
import importlib
from typing import Any

from recurl.core.errors import ArgumentError, MissingDependencyError
from recurl.core.messages import nearest

__all__ = ["how_to_install", "load_object", "with_arguments"]

_PACKAGES = {
    "ale_py": "ale-py",
    "Box2D": "'gymnasium[box2d]'",
    "brax": "brax",
    "craftax": "craftax",
    "cv2": "opencv-python",
    "dm_control": "dm-control",
    "gymnasium_robotics": "gymnasium-robotics",
    "gymnax": "gymnax",
    "highway_env": "highway-env",
    "jumanji": "jumanji",
    "memory_maze": "memory-maze",
    "minigrid": "minigrid",
    "mpe2": "mpe2",
    "mujoco": "'gymnasium[mujoco]'",
    "mujoco_playground": "playground",
    "navix": "navix",
    "pettingzoo": "pettingzoo",
    "pobax": "pobax",
    "popgym": "popgym",
    "popgym_arcade": "popgym-arcade",
    "pygame": "'gymnasium[classic-control]'",
    "vizdoom": "vizdoom",
    "vmas": "vmas",
    "xminigrid": "xminigrid",
}
"""Package names, by top-level module. Others aren't guessed: an unrelated package may have the module's name."""
_LONGEST = 10_000  # characters of a name with its arguments


def load_object(option: str, text: str, kind: str = "name") -> Any:
    """Import the object ``module:name``. The ``recurl`` command also finds modules in the working directory.

    Args:
        option: name of the option, for messages.
        text: the module and the name of an attribute.
        kind: what the name refers to, for messages.

    Raises:
        ArgumentError: ``text`` is malformed, the module can't be imported, or it lacks the name.
        MissingDependencyError: the module is not installed.

    Example:
        >>> load_object("--wrapper", "fractions:Fraction")(1, 2)
        Fraction(1, 2)
        >>> load_object("--wrapper", "fractions:Fracton", "Class")
        Traceback (most recent call last):
        recurl.core.errors.ArgumentError: --wrapper: the module 'fractions' has no 'Fracton'. Did you mean Fraction?
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
            f"{option}: there is no module {module_name!r}: {how_to_install(module_name)}, or name a file in the "
            "working directory or in a folder on PYTHONPATH."
        ) from error
    except (ImportError, SyntaxError, TypeError, ValueError) as error:
        raise ArgumentError(f"{option}: the module {module_name!r} can't be imported: {error}.") from error
    found = getattr(module, name, None)
    if found is None:
        raise ArgumentError(f"{option}: the module {module_name!r} has no {name!r}.{nearest(name, vars(module))}")
    return found


def with_arguments(text: str) -> tuple[str, dict[str, Any]]:
    """Split a name from the keyword arguments that follow it in parentheses: literals, which are not executed.

    Args:
        text: ``name`` or ``name(argument=value)``.

    Raises:
        ValueError: ``text`` is malformed, or too long or too deeply nested to be parsed.

    Example:
        >>> with_arguments("s5(state_size=64)"), with_arguments("lstm")
        (('s5', {'state_size': 64}), ('lstm', {}))
    """
    name, bracket, rest = text.partition("(")
    if not bracket:
        return text, {}
    if len(text) > _LONGEST:
        raise ValueError(f"more than {_LONGEST:,} characters")
    try:
        call = ast.parse(f"f({rest}", mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args:
            words = {word.arg: word.value for word in call.keywords}
            if None not in words and len(words) == len(call.keywords):
                return name, {str(word): ast.literal_eval(value) for word, value in words.items()}
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:  # the last two: nested too deeply
        raise ValueError(str(error) or type(error).__name__) from error
    raise ValueError("other than keyword arguments, each given once")


def how_to_install(module: str) -> str:
    """Return instructions for installing the package that provides a module.

    Example:
        >>> how_to_install("ale_py"), how_to_install("popgym.envs")
        ('pip install ale-py', 'pip install popgym')
        >>> how_to_install("my_module")
        "install the package that provides the module 'my_module'"
    """
    top = module.partition(".")[0]
    if top in _PACKAGES:
        return f"pip install {_PACKAGES[top]}"
    return f"install the package that provides the module {top!r}"

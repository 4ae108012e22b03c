"""Gymnasium ids: lookup of registered specs, and clear errors for missing ones."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TypeVar

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv

from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingDependencyError
from recurl.core.importing import how_to_install

__all__ = ["check_id", "spec_of", "with_clear_errors"]

_T = TypeVar("_T")
_MODULE_HINT = (
    " Write an environment that a module registers as module:id, such as ale_py:ALE/Pong-v5 or my_module:My-v0."
)


def check_id(name: object) -> None:
    """Check that ``name`` is an id or ``module:id``.

    Raises:
        ArgumentTypeError: ``name`` is an environment, or another object that isn't a string.
        ArgumentError: ``name`` has more than one module.
    """
    if isinstance(name, str):
        if name.count(":") > 1:
            near = ":".join(name.split(":")[-2:])
            raise ArgumentError(f"An environment name is an id or module:id, got {name!r}: write {near!r}.")
        return
    hint = " Wrap an environment with GymWrapper(env)." if isinstance(name, gym.Env | VectorEnv) else ""
    raise ArgumentTypeError(f"GymEnv takes the id of an environment, such as 'CartPole-v1', got {name!r}.{hint}")


def spec_of(name: str) -> EnvSpec:
    """Return the spec registered under an id, after importing the module in front of it.

    Example:
        >>> spec_of("CartPole-v1").max_episode_steps
        500
    """
    module, _, identifier = name.rpartition(":")
    if module:
        importlib.import_module(module)
    return gym.spec(identifier)


def with_clear_errors(name: str, build: Callable[[], _T]) -> _T:
    """Return ``build()``, and convert errors about ids and packages to recurl's.

    Raises:
        ArgumentError: the id is unknown, or the environment can't be created.
        MissingDependencyError: the environment needs a package that is not installed.
    """
    try:
        return build()
    except gym.error.DependencyNotInstalled as error:
        raise MissingDependencyError(f"The environment {name!r} needs a package that is missing: {error}") from error
    except ModuleNotFoundError as error:
        raise _missing_module(name, error) from error
    except (gym.error.NameNotFound, gym.error.NamespaceNotFound) as error:
        hint = "" if "Did you mean" in str(error) else _MODULE_HINT
        raise ArgumentError(f"Gymnasium can't create {name!r}: {error}{hint}") from error
    except (gym.error.Error, ImportError) as error:
        raise ArgumentError(f"Gymnasium can't create {name!r}: {error}") from error


def _missing_module(name: str, error: ModuleNotFoundError) -> Exception:
    module = name.rpartition(":")[0]
    if error.name is not None and error.name.partition(".")[0] != module.partition(".")[0]:
        return MissingDependencyError(
            f"The environment {name!r} needs the module {error.name!r}, which is not installed: "
            f"{how_to_install(error.name)}."
        )
    return ArgumentError(
        f"Gymnasium can't create {name!r}: there is no module {module!r}: {how_to_install(module)}, or name a file in "
        "the working directory or in a folder on PYTHONPATH."
    )

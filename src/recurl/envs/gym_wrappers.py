"""Environments by id, and the wrappers that options name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv

from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingDependencyError
from recurl.core.importing import how_to_install, load_object, with_arguments
from recurl.core.ranges import shown

__all__ = ["NamedWrapper", "SelectEntries", "Wrap", "check_id", "spec_of", "with_clear_errors", "wrapped"]

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
        hint = "" if "Did you mean" in str(error) else _with_namespace(name) or _MODULE_HINT
        raise ArgumentError(f"Gymnasium can't create {name!r}: {error}{hint}") from error
    except (gym.error.Error, ImportError) as error:
        raise ArgumentError(f"Gymnasium can't create {name!r}: {error}") from error


def _with_namespace(name: str) -> str:
    """Return a suggestion of the ids that are this name in a namespace, or an empty string if there are none."""
    found = [known for known in gym.registry if known.partition("/")[2] == name]
    return f" Did you mean {' or '.join(found)}?" if found else ""


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


Wrap: TypeAlias = Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]

"""Function that wraps an environment, such as a ``gymnasium.Wrapper`` class."""


class NamedWrapper:
    """Wrapper class given by name, ``module:Class`` or ``module:Class(name=value)``.

    Args:
        text: the name; the values are Python literals.

    Raises:
        ArgumentError: the wrapper doesn't exist, or the text has another format; or (when called) the arguments don't
            match.
        MissingDependencyError: its module is not installed.

    Example:
        >>> NamedWrapper("gymnasium.wrappers:TimeLimit(max_episode_steps=5)")(gym.make("CartPole-v1"))
        <TimeLimit<TimeLimit<OrderEnforcing<PassiveEnvChecker<CartPoleEnv<CartPole-v1>>>>>>
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            name, self._options = with_arguments(text)
        except ValueError as error:
            raise ArgumentError(
                f"--wrapper takes module:Class or module:Class(name=value), got {shown(text)}."
            ) from error
        found = load_object("--wrapper", name, "Class")
        if not (isinstance(found, type) and issubclass(found, gym.Wrapper)):
            kind = "a wrapper of vector environments" if _is_vector(found) else repr(found)
            raise ArgumentError(f"--wrapper {name} must be a subclass of gymnasium.Wrapper, got {kind}.")
        self._kind = found

    def __call__(self, env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
        """Return ``env`` wrapped."""
        try:
            return self._kind(env, **self._options)  # pyright: ignore[reportCallIssue] - a subclass has its own
        except TypeError as error:
            raise ArgumentError(
                f"--wrapper {self.text} can't wrap {env} ({error}): write its arguments as in "
                "'gymnasium.wrappers:TimeLimit(max_episode_steps=200)'."
            ) from error


class SelectEntries(gym.ObservationWrapper[Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Observation wrapper that keeps a range of a vector observation, such as positions without velocities.

    Args:
        env: an environment with a one-dimensional ``Box`` observation.
        start: index of the first entry.
        stop: index after the last entry.

    Raises:
        ArgumentError: the observation isn't a vector, or the range is invalid.

    Example:
        >>> SelectEntries(gym.make("Pendulum-v1"), start=0, stop=2).observation_space.shape
        (2,)
    """

    def __init__(self, env: gym.Env[Any, Any], start: int, stop: int) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, start=start, stop=stop)
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
            raise ArgumentError(f"SelectEntries needs a vector observation, a one-dimensional Box, got {space}.")
        if not 0 <= start < stop <= space.shape[0]:
            raise ArgumentError(
                f"start and stop must select some of the {space.shape[0]} entries of the observation, 0 <= start < "
                f"stop <= {space.shape[0]}, got {start} and {stop}."
            )
        self._kept = slice(start, stop)
        low, high = space.low[self._kept], space.high[self._kept]
        self.observation_space = gym.spaces.Box(low, high, dtype=cast(Any, space.dtype))

    def observation(self, observation: Any) -> Any:
        """Return the selected entries."""
        return observation[self._kept]


class FirstActions(gym.ActionWrapper[Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Action wrapper that keeps the first actions of a ``Discrete`` space, such as the turns and moves of a MiniGrid.

    Args:
        env: an environment with ``Discrete`` actions.
        count: number of actions to keep.

    Raises:
        ArgumentError: the actions aren't ``Discrete``, or there are fewer of them.

    Example:
        >>> FirstActions(gym.make("Acrobot-v1"), count=2).action_space
        Discrete(2)
    """

    def __init__(self, env: gym.Env[Any, Any], count: int) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, count=count)
        super().__init__(env)
        space = env.action_space
        if not isinstance(space, gym.spaces.Discrete):
            raise ArgumentError(f"FirstActions needs a Discrete action space, got {space}.")
        if not 1 <= count <= space.n:
            raise ArgumentError(f"count must be between 1 and {space.n}, the number of actions, got {count}.")
        self.action_space = gym.spaces.Discrete(count, start=int(space.start))

    def action(self, action: Any) -> Any:
        """Return the action unchanged."""
        return action


def wrapped(env: gym.Env[Any, Any], wrappers: Sequence[Wrap]) -> gym.Env[Any, Any]:
    """Return ``env`` wrapped in ``wrappers``, the first innermost.

    Raises:
        ArgumentTypeError: a wrapper doesn't return an environment.
    """
    for wrap in wrappers:
        env = wrap(env)
        if not isinstance(env, gym.Env):  # pyright: ignore[reportUnnecessaryIsInstance] - users
            raise ArgumentTypeError(f"A wrapper must return a gymnasium.Env, got {env!r} from {wrap!r}.")
    return env


def _is_vector(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, gym.vector.VectorWrapper)

"""Environments written in JAX, by name: those of known packages, and a user's function."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from recurl.core.devices import checked_device
from recurl.core.errors import ArgumentError, MissingDependencyError
from recurl.core.importing import how_to_install, load_object
from recurl.core.messages import nearest
from recurl.envs.jax_env import JaxEnv
from recurl.envs.jax_protocols import import_jax, jax_default

__all__ = ["named_jax_env"]

_PREFIX = "jax:"
_EPISODE = 1000  # steps of an episode of Brax, as of its own create()
_LIMITED = ("navix", "xland")  # rewards depend on the limit
_POBAX_WRAPPERS = (
    *("VecEnv", "NormalizeVecReward", "GeneralObservationWrapper", "BattleShipObservationWrapper", "LogWrapper"),
)
"""Wrappers of pobax.envs.get_env() that serve its own trainer, or that take the action mask out of observations."""
_CRAFTAX = ("Craftax-Symbolic-v1", "Craftax-Pixels-v1", "Craftax-Classic-Symbolic-v1", "Craftax-Classic-Pixels-v1")


def named_jax_env(
    name: str,
    num_envs: int,
    *,
    device: Any = None,
    drop_observations: Any = (),
    max_steps: int | None = None,
    reset_ratio: int = 1,
    **arguments: Any,
) -> JaxEnv:
    """Return a batch of an environment by name: ``jax:PACKAGE/NAME`` or ``jax:module:function``.

    Args:
        name: the name; the package is ``gymnax``, ``craftax``, ``popgym-arcade``, ``pobax``, ``navix``, ``xland``,
            ``jumanji``, ``brax`` or ``playground``. A function returns the environment, or the environment and its
            parameters.
        num_envs: number of rows.
        device: see :class:`JaxEnv`, as for the next arguments.
        drop_observations: likewise.
        max_steps: likewise; by default 1,000 for Brax, and what its configuration says for Playground. For navix and
            xland, it is the environment's own ``max_steps``.
        reset_ratio: likewise.
        **arguments: parameters of the environment, or arguments of what creates it.

    Raises:
        ArgumentError: there is no such package, environment or function.
        MissingDependencyError: a package is not installed.
        TypeError: the environment doesn't take the arguments.
    """
    text = name.removeprefix(_PREFIX)
    package, slash, given = text.partition("/")
    limit = None
    device = checked_device(device)
    with jax_default(device):  # packages compute at their import
        if ":" in text:
            found: Any = load_object("--env", text, "function")(**arguments)
            env, params = found if isinstance(found, tuple) else (found, None)
        elif package in _MAKERS and slash and given:
            if package in _LIMITED and max_steps is not None:
                arguments["max_steps"] = max_steps
            env, params, limit = _MAKERS[package](given, arguments)
        else:
            raise ArgumentError(
                f"An environment written in JAX is named jax:PACKAGE/NAME or jax:module:function, got {name!r}."
                f"{nearest(package, _MAKERS)} Packages are {', '.join(_MAKERS)}."
            )
    return JaxEnv(
        env,
        params,
        num_envs,
        device=device,
        max_steps=limit if max_steps is None else max_steps,
        reset_ratio=reset_ratio,
        drop_observations=drop_observations,
    )


_Made = tuple[Any, Any, int | None]
"""Environment, its parameters, and the number of steps after which episodes are truncated."""


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        raise MissingDependencyError(f"the module {missing!r} is not installed: {how_to_install(missing)}") from error


def _check_name(package: str, name: str, names: Any) -> None:
    if name not in names:
        hint = nearest(name, names) or f" There are {', '.join(names)}."
        raise ArgumentError(f"{package} has no environment {name!r}.{hint}")


def _with_params(env: Any, arguments: Mapping[str, Any]) -> _Made:
    """Return an environment whose default parameters are replaced by these."""
    params = env.default_params
    names = [field.name for field in dataclasses.fields(params)]
    for name in arguments:
        if name not in names:
            raise TypeError(f"there is no parameter {name!r}.{nearest(name, names) or f' There are {names}.'}")
    return env, dataclasses.replace(params, **arguments), None


def _gymnax(name: str, arguments: Mapping[str, Any]) -> _Made:
    gymnax = _module("gymnax")
    _check_name("gymnax", name, gymnax.registered_envs)
    env, params = gymnax.make(name)
    names = {field.name for field in dataclasses.fields(params)}
    creating = inspect.signature(type(env)).parameters.keys() & arguments.keys() - names
    env = gymnax.make(name, **{key: arguments[key] for key in creating})[0] if creating else env
    return _with_params(env, {key: value for key, value in arguments.items() if key not in creating})


def _craftax(name: str, arguments: Mapping[str, Any]) -> _Made:
    _check_name("Craftax", name, _CRAFTAX)
    return _with_params(_module("craftax.craftax_env").make_craftax_env_from_name(name, auto_reset=False), arguments)


def _brax(name: str, arguments: Mapping[str, Any]) -> _Made:
    envs = _module("brax.envs")
    try:
        return envs.get_environment(name, **arguments), None, _EPISODE
    except KeyError as error:
        modules = [key for key, value in vars(envs).items() if getattr(value, "__package__", "") == envs.__name__]
        raise ArgumentError(f"Brax has no environment {name!r}.{nearest(name, modules)}") from error


def _playground(name: str, arguments: Mapping[str, Any]) -> _Made:
    registry = _module("mujoco_playground").registry
    _check_name("MuJoCo Playground", name, registry.ALL_ENVS)
    config = registry.get_default_config(name)
    return registry.load(name, config_overrides=dict(arguments)), None, config.episode_length


def _popgym_arcade(name: str, arguments: Mapping[str, Any]) -> _Made:
    registration = _module("popgym_arcade.registration")
    _check_name("POPGym Arcade", name, registration.REGISTERED_ENVIRONMENTS)
    return *registration.make(name, **arguments), None


def _pobax(name: str, arguments: Mapping[str, Any]) -> _Made:
    pobax, jax = _module("pobax.envs"), import_jax()
    try:
        env, params = pobax.get_env(name, jax.random.PRNGKey(0), 1, **arguments)
    except ValueError as error:
        raise ArgumentError(
            f"pobax has no environment {name!r}.{nearest(name, pobax.masked_gymnax_env_map)}"
        ) from error
    while type(env).__name__ in _POBAX_WRAPPERS:
        env = vars(env)["_env"]
    return env, params, None


def _navix(name: str, arguments: Mapping[str, Any]) -> _Made:
    navix = _module("navix")
    _check_name("navix", name, navix.registry())
    observe = arguments.get("observation_fn")
    if isinstance(observe, str):
        _check_name("navix.observations", observe, vars(navix.observations))
        arguments = {**arguments, "observation_fn": getattr(navix.observations, observe)}
    return navix.make(name, **arguments), None, None


def _xland(name: str, arguments: Mapping[str, Any]) -> _Made:
    xminigrid = _module("xminigrid")
    _check_name("xland-minigrid", name, xminigrid.registered_environments())
    return *xminigrid.make(name, **arguments), None


def _jumanji(name: str, arguments: Mapping[str, Any]) -> _Made:
    jumanji = _module("jumanji")
    _check_name("Jumanji", name, jumanji.registered_environments())
    return jumanji.make(name, **arguments), None, None


_MAKERS: dict[str, Callable[[str, Mapping[str, Any]], _Made]] = {
    "gymnax": _gymnax,
    "craftax": _craftax,
    "popgym-arcade": _popgym_arcade,
    "pobax": _pobax,
    "navix": _navix,
    "xland": _xland,
    "jumanji": _jumanji,
    "brax": _brax,
    "playground": _playground,
}

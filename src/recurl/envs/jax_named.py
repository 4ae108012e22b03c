"""Environments written in JAX, by name: those of gymnax, Craftax, Brax and MuJoCo Playground, and a user's function."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from recurl.core.errors import ArgumentError, MissingDependencyError
from recurl.core.importing import how_to_install, load_object
from recurl.core.messages import nearest
from recurl.envs.jax_env import JaxEnv
from recurl.envs.jax_protocols import import_jax

__all__ = ["named_jax_env"]

_PREFIX = "jax:"
_EPISODE = 1000  # steps of an episode of Brax, as of its own create()
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
        name: the name; the package is ``gymnax``, ``craftax``, ``brax`` or ``playground``. A function returns the
            environment, or the environment and its parameters.
        num_envs: number of rows.
        device: see :class:`JaxEnv`, as for the next arguments.
        drop_observations: likewise.
        max_steps: likewise; by default 1,000 for Brax, and what its configuration says for Playground.
        reset_ratio: likewise.
        **arguments: parameters of the environment, or arguments of what creates it.

    Raises:
        ArgumentError: there is no such package, environment or function.
        MissingDependencyError: a package is not installed.
        TypeError: the environment doesn't take the arguments.
    """
    import_jax()
    text = name.removeprefix(_PREFIX)
    package, slash, given = text.partition("/")
    limit = None
    if ":" in text:
        found: Any = load_object("--env", text, "function")(**arguments)
        env, params = found if isinstance(found, tuple) else (found, None)
    elif package in _MAKERS and slash and given:
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


_MAKERS: dict[str, Callable[[str, Mapping[str, Any]], _Made]] = {
    "gymnax": _gymnax,
    "craftax": _craftax,
    "brax": _brax,
    "playground": _playground,
}

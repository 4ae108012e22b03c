"""Protocols of environments written in JAX: gymnax's and Brax's. JAX is imported where it is used."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingDependencyError, UnsupportedError

__all__ = ["Protocol", "graph_options", "import_jax", "jax_device", "protocol_of", "value_in"]

_LIMITS = ("max_steps_in_episode", "max_timesteps")  # names of the time limit in the parameters of gymnax and Craftax
_UNLIMITED = np.iinfo(np.int32).max
_GRAPHS = {
    "xla_gpu_graph_min_graph_size": 1,
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,WHILE,CONDITIONAL,DYNAMIC_SLICE_FUSION"
    ),
    "xla_gpu_command_buffer_unroll_loops": True,
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
}
"""Options with which XLA puts whatever it can into CUDA graphs: loops too, with independent kernels side by side."""
_AUTORESET = ("first_obs", "first_pipeline_state", "first_state")  # entries that Brax's autoreset adds to info


class Protocol(NamedTuple):
    """Functions of one environment, and its spaces.

    Attributes:
        begin: maps a key to a state and its observation.
        advance: maps a key, a state and an action to the next state, its observation, the reward, ``terminated`` and
            ``truncated``.
        observation_space: Gymnasium space of the observations.
        action_space: Gymnasium space of the actions.
        name: name of the environment, for messages.
    """

    begin: Callable[[Any], tuple[Any, Any]]
    advance: Callable[[Any, Any, Any], tuple[Any, Any, Any, Any, Any]]
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    name: str


def import_jax() -> Any:
    """Import JAX, which then takes GPU memory only as needed, unless XLA_PYTHON_CLIENT_PREALLOCATE says otherwise.

    Raises:
        MissingDependencyError: JAX is not installed.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        return importlib.import_module("jax")
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"An environment written in JAX needs JAX, but the module {error.name} is not installed: "
            "pip install 'recurl[jax]'"
        ) from error


def jax_device(device: torch.device) -> Any:
    """Return JAX's object for a device of torch.

    Raises:
        MissingDependencyError: JAX is not installed.
        UnsupportedError: JAX can't use the device.
    """
    jax = import_jax()
    if device.type == "cpu":
        return jax.devices("cpu")[0]
    try:
        found = [one for one in jax.devices("gpu") if one.local_hardware_id == (device.index or 0)]
    except RuntimeError:  # JAX has no backend for GPUs
        found = []
    if device.type != "cuda" or not found:
        cuda = (torch.version.cuda or "13").partition(".")[0]
        raise UnsupportedError(
            f"JAX finds no device {device} on this machine: pip install 'jax[cuda{cuda}]', or choose --device cpu"
        )
    return found[0]


@functools.cache
def graph_options(device: Any) -> Mapping[str, Any]:
    """Return the options for compiling into CUDA graphs that this version of XLA knows; none unless on a GPU."""
    jax, known = import_jax(), dict[str, Any]()
    for name, value in _GRAPHS.items() if device.platform == "gpu" else ():
        try:
            jax.jit(lambda x: x + 1, compiler_options={name: value}).lower(1.0).compile()
        except jax.errors.JaxRuntimeError:
            continue
        known[name] = value
    return known


def protocol_of(env: Any, params: Any = None) -> Protocol:
    """Return the protocol of an environment: gymnax's (``step_env``, ``reset_env``) or Brax's (``step``, ``reset``).

    Args:
        env: the environment, not batched and without autoreset.
        params: parameters of gymnax's protocol; the environment's ``default_params`` when None.

    Raises:
        ArgumentTypeError: the environment has neither protocol.
        ArgumentError: parameters for Brax's protocol, or a Brax environment with its autoreset.
        UnsupportedError: a space has no tensor equivalent.
    """
    if hasattr(env, "step_env") and hasattr(env, "reset_env"):
        return _gymnax(env, env.default_params if params is None else params)
    if not all(hasattr(env, name) for name in ("reset", "step", "action_size")):
        raise ArgumentTypeError(
            f"{type(env).__name__} has neither gymnax's protocol (step_env and reset_env) nor Brax's (reset, step and "
            "action_size): pass the environment itself, without wrappers for logging, batches or autoreset."
        )
    if params is not None:
        raise ArgumentError(f"{type(env).__name__} has Brax's protocol, which has no params: leave them out.")
    return _brax(env)


def _gymnax(env: Any, params: Any) -> Protocol:
    name = str(getattr(env, "name", type(env).__name__))
    is_natural = _natural_end(env, params)

    def begin(key: Any) -> tuple[Any, Any]:
        observation, state = env.reset_env(key, params)
        return state, observation

    def advance(key: Any, state: Any, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        observation, state, reward, done, _ = env.step_env(key, state, action, params)
        if hasattr(env, "is_truncated"):  # gymnax 1.0: done has no time limit
            return state, observation, reward, done, env.is_truncated(state, params)
        natural = done if is_natural is None else is_natural(state)
        return state, observation, reward, done & natural, done & ~natural

    observations = _space(env.observation_space(params), f"the observation space of {name}")
    return Protocol(begin, advance, observations, _space(env.action_space(params), f"the action space of {name}"), name)


def _natural_end(env: Any, params: Any) -> Callable[[Any], Any] | None:
    """Return a function that tells whether a state would be terminal without the time limit; None if it can't be told.

    Before gymnax 1.0, and in Craftax, ``done`` includes the time limit.
    """
    names = {field.name for field in dataclasses.fields(params)} if dataclasses.is_dataclass(params) else set[str]()
    limits = [name for name in _LIMITS if name in names]
    if not limits or not hasattr(env, "is_terminal"):
        return None
    unlimited = dataclasses.replace(params, **dict.fromkeys(limits, _UNLIMITED))  # type: ignore[type-var] # checked
    return lambda state: import_jax().numpy.asarray(env.is_terminal(state, unlimited), bool)


def _brax(env: Any) -> Protocol:
    jax, name = import_jax(), type(env).__name__
    initial = jax.eval_shape(env.reset, jax.random.PRNGKey(0))
    if any(entry in initial.info for entry in _AUTORESET):
        raise ArgumentError(
            f"{name} resets itself, which hides the last observation of an episode: create it without, such as "
            "brax.envs.create(name, auto_reset=False)."
        )

    def begin(key: Any) -> tuple[Any, Any]:
        state = env.reset(key)
        return state, state.obs

    def advance(_: Any, state: Any, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        state = env.step(state, action)
        done = state.done.astype(bool)
        over = done & state.info["truncation"].astype(bool) if "truncation" in state.info else done & False
        return state, state.obs, state.reward, done & ~over, over

    actuator = getattr(getattr(env, "sys", None), "actuator", None)
    limits = np.array([[-1, 1]] * env.action_size if actuator is None else actuator.ctrl_range, np.float32)
    action_space = spaces.Box(limits[:, 0], limits[:, 1], dtype=np.float32)
    return Protocol(begin, advance, _unbounded(initial.obs), action_space, name)


def _unbounded(shapes: Any) -> gym.Space[Any]:
    """Return the space of observations of these shapes and dtypes, arrays or a nested mapping of them."""
    if isinstance(shapes, Mapping):
        return spaces.Dict({str(name): _unbounded(child) for name, child in shapes.items()})
    return _box(-np.inf, np.inf, shapes.shape, shapes.dtype)


def _box(low: Any, high: Any, shape: Any, dtype: Any) -> gym.Space[Any]:
    dtype, shape = np.dtype(dtype), tuple(np.atleast_1d(shape).tolist()) if np.size(shape) else ()
    if dtype.kind == "b":
        return spaces.MultiBinary(shape)
    if dtype.kind not in "iuf":  # bfloat16 and smaller ones
        dtype = np.dtype(np.float32)
    limits = np.iinfo(dtype) if dtype.kind in "iu" else np.finfo(dtype)
    if dtype.kind in "iu":
        low, high = (np.clip(np.asarray(bound, np.float64), limits.min, limits.max) for bound in (low, high))
    low, high = (np.broadcast_to(np.asarray(bound).astype(dtype), shape) for bound in (low, high))
    return spaces.Box(low, high, shape, dtype.type)


def _space(space: Any, owner: str) -> gym.Space[Any]:
    """Return a space of gymnax, or of a package with its own copy of gymnax's spaces, as one of Gymnasium."""
    if isinstance(space, gym.Space):
        return space
    children = getattr(space, "spaces", None)
    if isinstance(children, Mapping):
        return spaces.Dict({str(name): _space(child, owner) for name, child in children.items()})
    if isinstance(children, list | tuple):
        return spaces.Tuple([_space(child, owner) for child in children])
    if all(hasattr(space, name) for name in ("low", "high", "shape", "dtype")):
        return _box(space.low, space.high, space.shape, space.dtype)
    counts = next((getattr(space, name) for name in ("nvec", "n", "num_categories") if hasattr(space, name)), None)
    if counts is None:
        raise UnsupportedError(
            f"{type(space).__name__} in {owner} has no tensor equivalent: the environment must have spaces like "
            "gymnax's Box, Discrete, Dict and Tuple, or Gymnasium's."
        )
    return spaces.MultiDiscrete(np.asarray(counts)) if np.ndim(counts) else spaces.Discrete(int(counts))


def value_in(observation: Any, path: tuple[str | int, ...]) -> Any:
    """Return an entry of an observation: of nested mappings, tuples, or objects with attributes."""
    for name in path:
        is_attribute = hasattr(observation, str(name)) and not isinstance(observation, Mapping)
        observation = getattr(observation, str(name)) if is_attribute else observation[name]
    return observation

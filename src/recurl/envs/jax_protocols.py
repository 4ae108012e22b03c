"""Protocols of environments written in JAX, as one. JAX is imported where it is used."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingDependencyError, UnsupportedError

__all__ = ["Protocol", "graph_options", "import_jax", "jax_default", "jax_device", "on_gpu", "protocol_of", "value_in"]

_LIMITS = ("max_steps_in_episode", "max_timesteps")  # names of the time limit in the parameters of gymnax and Craftax
_BOUNDS = (("low", "high"), ("minimum", "maximum"))  # names of the bounds of a space of numbers
_COUNTS = ("nvec", "num_values", "n", "num_categories")  # names of the number of a discrete space's values
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
_GYMNAX = "gymnax.environments.environment"  # the module of the class that gymnax's environments inherit from
_ROWS = 1009  # traced to tell arrays of each row from those that all rows share, which have another size
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


def on_gpu(device: torch.device | None) -> AbstractContextManager[Any]:
    """Return a context for calls of JAX: JAX leaves its GPU as the thread's current one, which is torch's, too.

    Args:
        device: JAX's device.
    """
    gpu = device is not None and device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.device(device) if gpu else nullcontext()


@contextmanager
def jax_default(device: torch.device) -> Generator[Any]:
    """Make a device JAX's default one and return JAX's object for it; see :func:`jax_device` and :func:`on_gpu`."""
    with on_gpu(device):
        found = jax_device(device)
        with import_jax().default_device(found):
            yield found


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
        with on_gpu(device):
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
    """Return the options for compiling into CUDA graphs that this version of XLA knows; none unless on a GPU.

    Args:
        device: JAX's default device.
    """
    jax, known = import_jax(), dict[str, Any]()
    for name, value in _GRAPHS.items() if device.platform == "gpu" else ():
        try:
            jax.jit(lambda x: x + 1, compiler_options={name: value}).lower(1.0).compile()
        except jax.errors.JaxRuntimeError:
            continue
        known[name] = value
    return known


def protocol_of(env: Any, params: Any = None) -> Protocol:
    """Return the protocol of an environment: that of gymnax, xland-minigrid, navix, Jumanji or Brax.

    Args:
        env: the environment, not batched and without autoreset.
        params: parameters of the protocol of gymnax or xland-minigrid; the environment's default ones when None.

    Raises:
        ArgumentTypeError: the environment has none of these protocols.
        ArgumentError: the environment has a wrapper that resets it or that its protocol would bypass, or parameters
            that its protocol doesn't have.
        UnsupportedError: a space has no tensor equivalent, or the reward is not a number.
    """
    *wrappers, _ = _wrappers(env)
    if any("AutoReset" in name for name in wrappers):
        raise _resets_itself(wrappers[0], "pass the environment inside the wrapper")
    if hasattr(env, "step_env") and hasattr(env, "reset_env"):
        return _gymnax(env, env.default_params if params is None else params)
    if all(hasattr(env, name) for name in ("reset", "step", "num_actions", "observation_shape")):
        return _xland(env, env.default_params() if params is None else params)
    found = next((protocol for names, protocol in _WITHOUT_PARAMS if all(hasattr(env, name) for name in names)), None)
    if found is None:
        raise ArgumentTypeError(
            f"{type(env).__name__} has neither gymnax's protocol (step_env and reset_env) nor Brax's (reset, step and "
            "action_size), nor that of xland-minigrid, navix or Jumanji: pass the environment itself, without wrappers "
            "for logging, batches or autoreset."
        )
    if params is not None:
        raise ArgumentError(f"The protocol of {type(env).__name__} has no params: leave them out.")
    return found(env)


def _wrappers(env: Any) -> list[str]:
    """Return the names of the classes of an environment and of those that it wraps, from the outside inwards."""
    names = list[str]()
    while env is not None:
        names.append(type(env).__name__)
        env = vars(env).get("_env") if hasattr(env, "__dict__") else None
    return names


def _resets_itself(name: str, remedy: str) -> ArgumentError:
    return ArgumentError(f"{name} resets itself, which hides the last observation of an episode: {remedy}.")


def _gymnax(env: Any, params: Any) -> Protocol:
    if not hasattr(type(env), "step_env") and hasattr(env, "_env"):  # taken from the environment inside
        raise ArgumentError(
            f"{type(env).__name__} is a wrapper without a step_env of its own, which would be bypassed: pass the "
            "environment inside, and use recurl's transforms."
        )
    name = str(getattr(env, "name", type(env).__name__))
    jnp = import_jax().numpy
    is_natural = _natural_end(env, params)

    def begin(key: Any) -> tuple[Any, Any]:
        observation, state = env.reset_env(key, params)
        return state, observation

    def advance(key: Any, state: Any, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        observation, state, reward, done, info = env.step_env(key, state, action, params)
        if "truncated" in info:  # popgym-arcade, whose info["terminated"] may include the time limit
            over = done & jnp.asarray(info["truncated"], bool)
        elif is_natural is not None:
            over = done & ~is_natural(state)
        elif _defines(env, "is_truncated") or (hasattr(env, "is_truncated") and hasattr(state, "time")):
            return state, observation, reward, done, env.is_truncated(state, params)  # gymnax 1.0
        else:
            over = done & False
        return state, observation, reward, done & ~over, over

    observations = _space(env.observation_space(params), f"the observation space of {name}")
    return Protocol(begin, advance, observations, _space(env.action_space(params), f"the action space of {name}"), name)


def _natural_end(env: Any, params: Any) -> Callable[[Any], Any] | None:
    """Return a function that tells whether a state would be terminal without the time limit; None if it can't be told.

    Before gymnax 1.0, and in Craftax, ``done`` includes the time limit, as ``is_terminal`` does; environments of gymnax
    1.0 only inherit this method.
    """
    if _defines(env, "is_truncated") or not _defines(env, "is_terminal"):
        return None
    names = {field.name for field in dataclasses.fields(params)} if dataclasses.is_dataclass(params) else set[str]()
    limits = [name for name in _LIMITS if name in names]
    if not limits:
        return None
    unlimited = dataclasses.replace(params, **dict.fromkeys(limits, _UNLIMITED))  # type: ignore[type-var] # checked
    return lambda state: import_jax().numpy.asarray(env.is_terminal(state, unlimited), bool)


def _defines(env: Any, name: str) -> bool:
    """Return whether an environment has a method that is not just inherited from gymnax's base class."""
    return any(name in vars(base) for base in type(env).__mro__ if base.__module__ != _GYMNAX)


def _xland(env: Any, params: Any) -> Protocol:
    def begin(key: Any) -> tuple[Any, Any]:
        timestep = env.reset(params, key)
        return timestep, timestep.observation

    def advance(_: Any, timestep: Any, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        timestep = env.step(params, timestep, action)
        return timestep, timestep.observation, timestep.reward, *_ends(timestep)

    return Protocol(begin, advance, _observed(begin), spaces.Discrete(env.num_actions(params)), type(env).__name__)


def _navix(env: Any) -> Protocol:
    name = type(env).__name__

    def begin(key: Any) -> tuple[Any, Any]:
        timestep = env.reset(key)
        return timestep, timestep.observation

    def advance(_: Any, timestep: Any, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        # A constant step type leaves the environment's own autoreset out of the compiled program.
        running = timestep.replace(step_type=import_jax().numpy.zeros_like(timestep.step_type))
        timestep = env.step(running, action)
        ends = timestep.is_termination(), timestep.is_truncation()
        return timestep, timestep.observation, timestep.reward, *ends

    action_space = _space(env.action_space, f"the action space of {name}")
    return Protocol(begin, advance, _observed(begin), action_space, name)  # observations exceed navix's own bounds


def _jumanji(env: Any) -> Protocol:
    name = type(env).__name__
    if env.reward_spec.shape:
        raise UnsupportedError(f"{name} has rewards of shape {env.reward_spec.shape}, but JaxEnv takes one number.")

    def begin(key: Any) -> tuple[Any, Any]:
        state, timestep = env.reset(key)
        return state, timestep.observation

    def advance(_: Any, state: Any, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        state, timestep = env.step(state, action)
        return state, timestep.observation, timestep.reward, *_ends(timestep)

    action_space = _space(env.action_spec, f"the action space of {name}")
    return Protocol(begin, advance, _observed(begin), action_space, name)


def _ends(timestep: Any) -> tuple[Any, Any]:
    """Return ``terminated`` and ``truncated`` of a time step like dm_env's, whose discount is 0 if it terminates."""
    last, natural = timestep.last(), timestep.discount == 0
    return last & natural, last & ~natural


def _brax(env: Any) -> Protocol:
    jax, name = import_jax(), type(env).__name__
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.PRNGKey(0), _ROWS))
    initial = jax.eval_shape(jax.vmap(env.reset), keys)
    if any(entry in initial.info for entry in _AUTORESET):
        raise _resets_itself(name, "create it without, such as brax.envs.create(name, auto_reset=False)")
    shapes, tree = jax.tree.flatten(initial)
    shared = {index for index, leaf in enumerate(shapes) if leaf.shape[:1] != (_ROWS,)}

    def own(state: Any) -> Any:
        """Leave out the arrays that all rows share, such as MuJoCo Warp's contacts, which each step computes anew."""
        leaves, kind = jax.tree.flatten(state)
        return jax.tree.unflatten(kind, [None if index in shared else leaf for index, leaf in enumerate(leaves)])

    def whole(state: Any) -> Any:
        leaves = iter(jax.tree.leaves(state))
        zeros = {index: jax.numpy.zeros(shapes[index].shape, shapes[index].dtype) for index in shared}
        return jax.tree.unflatten(tree, [zeros[i] if i in shared else next(leaves) for i in range(len(shapes))])

    def begin(key: Any) -> tuple[Any, Any]:
        state = env.reset(key)
        return own(state), state.obs

    def advance(_: Any, state: Any, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        state = env.step(whole(state), action)
        done = state.done.astype(bool)
        over = done & state.info["truncation"].astype(bool) if "truncation" in state.info else done & False
        return own(state), state.obs, state.reward, done & ~over, over

    actuator = getattr(getattr(env, "sys", None), "actuator", None)
    limits = np.array([[-1, 1]] * env.action_size if actuator is None else actuator.ctrl_range, np.float32)
    action_space = spaces.Box(limits[:, 0], limits[:, 1], dtype=np.float32)
    rows = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), initial.obs)
    return Protocol(begin, advance, _unbounded(rows), action_space, name)


_WITHOUT_PARAMS: tuple[tuple[tuple[str, ...], Callable[[Any], Protocol]], ...] = (
    (("reset", "step", "observation_space", "action_space", "reward_space"), _navix),
    (("reset", "step", "observation_spec", "action_spec", "reward_spec"), _jumanji),
    (("reset", "step", "action_size"), _brax),
)
"""Names that tell a protocol, and what makes it one."""


def _observed(begin: Callable[[Any], tuple[Any, Any]]) -> gym.Space[Any]:
    jax = import_jax()
    return _unbounded(jax.eval_shape(begin, jax.random.PRNGKey(0))[1])


def _unbounded(shapes: Any) -> gym.Space[Any]:
    """Return the space of observations of these shapes and dtypes: arrays, or nested mappings or objects of them."""
    if dataclasses.is_dataclass(shapes):
        shapes = {field.name: getattr(shapes, field.name) for field in dataclasses.fields(shapes)}
    elif hasattr(shapes, "_asdict"):  # a named tuple
        shapes = shapes._asdict()
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
    counts = next((getattr(space, name) for name in _COUNTS if hasattr(space, name)), None)
    bounds = next((pair for pair in _BOUNDS if all(hasattr(space, name) for name in (*pair, "shape", "dtype"))), None)
    if bounds and counts is None:
        return _box(getattr(space, bounds[0]), getattr(space, bounds[1]), space.shape, space.dtype)
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

"""Environments written in JAX, stepped as a batch on the policy's device."""

from __future__ import annotations

import secrets
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from recurl.core.devices import checked_device
from recurl.core.errors import ArgumentError, UnsupportedError, UsageError
from recurl.core.keys import ACTION, DONE, RESET, REWARD, TERMINATED, TRUNCATED, NestedKey
from recurl.core.specs import Categorical, OneHot, TensorSpec
from recurl.envs.base import EnvBase
from recurl.envs.device_actions import read_on_device
from recurl.envs.gym_spaces import ActionReader, ObservationReader, brief, kept_leaves
from recurl.envs.jax_protocols import graph_options, import_jax, jax_default, on_gpu, protocol_of, value_in
from recurl.envs.tasks.dynamics import check_count, check_state
from recurl.sequences.entries import Step, like, takes_entries
from recurl.transforms import makes_memory

__all__ = ["JaxEnv"]

_DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
)
_Tree = Any  # nested containers of JAX arrays


class JaxEnv(EnvBase):
    """Batched environment around one written in JAX: of gymnax, Craftax, navix, xland-minigrid, Jumanji, Brax, ...

    Steps and resets are compiled for all rows at once. Tensors and JAX's arrays share memory (DLPack); on a GPU, the
    streams of torch and JAX wait for each other through events, and the host waits for neither.

    Every step also resets the rows that it finishes. ``next`` holds the true last observation, and the reset that
    follows returns the first one of the new episode. A reset of other rows is computed when it is asked for.

    ``terminated`` and ``truncated`` are told apart as well as the environment tells them: by gymnax 1.0's
    ``is_truncated``; in earlier versions and in Craftax, by ``is_terminal`` without the time limit of the parameters;
    in Brax, by ``info["truncation"]``; in navix, xland-minigrid and Jumanji, by the step's type or discount. Any other
    end counts as terminated.

    All rows derive their keys from one, which the seed determines: a full reset splits it in two and each step in
    three, of which the first is kept; the others, split into one key per row, go to the step and to the reset. With a
    ``reset_ratio`` above 1, each step and each preparation of new episodes splits it in two. navix, xland-minigrid and
    Jumanji draw a step from keys in their state.

    On a GPU, the programs are compiled such that XLA launches each as few CUDA graphs (see ``compiler_options``): a
    step of a large environment consists of thousands of small kernels, whose launches would take longer than they do.

    Args:
        env: the environment, for one row and without autoreset or other wrappers.
        params: parameters of gymnax's protocol; the environment's ``default_params`` when None.
        num_envs: number of rows (batch size ``[num_envs]``).
        device: device of all tensors; torch's default when None.
        max_steps: number of steps after which episodes are truncated; None for no limit but the environment's own.
        reset_ratio: steps for which new episodes are prepared at once, where resets are costly. With 1, every step
            prepares one for each row. With 16, one for each row is prepared every 16 steps, and the rows that finish
            take them in turn; only if more finish before the next 16 steps do rows share one.
        drop_observations: entries to drop, with the parts of nested keys joined by dots.
        categorical_action_encoding: use the spec ``Categorical`` for a discrete action, as trainers need it, instead of
            ``OneHot``. Integers ``[num_envs]`` and one-hot vectors ``[num_envs, n]`` are accepted in either case.
        compiler_options: options of XLA for the programs, as of ``jax.jit``; when None, XLA's own on a CPU, and on a
            GPU those for CUDA graphs that this version of XLA knows. ``{}`` for XLA's own.

    Attributes:
        env: the environment.
        params: its parameters, as given.
        readers: converters from NumPy observations to tensors and from action tensors to NumPy.
        mask_path: always None: there is no action mask.

    Raises:
        MissingDependencyError: JAX is not installed.
        ArgumentTypeError: ``env`` has neither protocol.
        ArgumentError: a number is out of range, the device doesn't exist, or the environment violates its spaces or its
            protocol; or, at a step, the actions have the wrong shape or dtype.
        UnsupportedError: a space has no tensor equivalent, or JAX can't use the device.
        UsageError: the environment is stepped, partially reset, or saved before the first reset of all rows.

    Example:
        >>> import gymnax
        >>> env = JaxEnv(*gymnax.make("CartPole-v1"), 1024)
        >>> env.reset(seed=0)["observation"].shape
        torch.Size([1024, 4])
    """

    never_waits = True
    mask_path: tuple[str, ...] | None = None

    def __init__(
        self,
        env: Any,
        params: Any = None,
        num_envs: int = 1,
        *,
        device: torch.device | str | None = None,
        max_steps: int | None = None,
        reset_ratio: int = 1,
        drop_observations: Sequence[NestedKey] = (),
        categorical_action_encoding: bool = True,
        compiler_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_count("num_envs", num_envs, minimum=1)
        check_count("reset_ratio", reset_ratio, minimum=1)
        if max_steps is not None:
            check_count("max_steps", max_steps, minimum=1)
        device = checked_device(device)
        self._jax = import_jax()
        self.env = env
        self.params = params
        with jax_default(device):
            self._protocol = protocol_of(env, params)
        name = self._protocol.name
        self.readers = (
            ObservationReader(self._protocol.observation_space, [num_envs], name, drop_observations),
            ActionReader(self._protocol.action_space, [num_envs], categorical_action_encoding),
        )
        super().__init__(
            observation_spec=self.readers[0].spec,
            action_spec=self.readers[1].spec,
            batch_size=[num_envs],
            device=device,
        )
        self._leaves = kept_leaves(self._protocol.observation_space, drop_observations)
        self._keys = list(self.readers[0].spec.keys(True, True))
        self._max_steps = max_steps
        self._reset_ratio = reset_ratio
        self._handed = torch.zeros(1, device=device)
        self._seed: int | None = secrets.randbits(31)
        self._running: _Tree = None
        self._prepared: _Tree = None  # new episodes, taken in turn by the rows that finish
        self._age = 0  # steps since they were prepared
        self._ready: tuple[Tensor, list[Any]] | None = None  # the last step's done rows, and its roots
        with jax_default(device) as self._jax_device:
            self._shapes: _Tree = self._check_protocol()
            options = graph_options(self._jax_device) if compiler_options is None else dict(compiler_options)
        jit = partial(self._jax.jit, compiler_options=options)
        self._begin = jit(self._begin_rows, keep_unused=True)  # the second argument is waited for
        self._prepare = jit(self._prepare_rows, keep_unused=True)  # likewise
        self._advance = jit(self._advance_rows, donate_argnums=0)  # in place: CUDA graphs hold its addresses
        self._restart = jit(self._restart_rows)

    # -- functions of JAX

    def _begin_rows(self, key: Any, _: Any) -> tuple[_Tree, list[Any]]:
        """Return the running episodes, and their observations, after a reset of all rows."""
        jax, count = self._jax, self.batch_size.numel()
        key, reset_key = jax.random.split(key)
        state, observations = self._fresh(reset_key)
        running = {"key": key, "state": state, "steps": jax.numpy.zeros(count, "int32")}
        if self._reset_ratio > 1:
            running |= {"prepared": jax.numpy.zeros_like(key), "taken": jax.numpy.int32(0)}
        return running, observations

    def _prepare_rows(self, key: Any, _: Any) -> tuple[dict[str, Any], _Tree]:
        """Return what changes in the running episodes when new ones are prepared, and the new ones."""
        after, reset_key = self._jax.random.split(key)
        return {"key": after, "prepared": key, "taken": self._jax.numpy.int32(0)}, self._fresh(reset_key)

    def _advance_rows(
        self, running: _Tree, action: Any, prepared: _Tree
    ) -> tuple[_Tree, list[Any], Any, Any, list[Any]]:
        """Return the running episodes after a step and the reset of the rows that it finishes.

        Args:
            running: the running episodes before it.
            action: the actions ``[n, ...]``.
            prepared: new episodes; None if the step makes one for each row.

        Returns:
            The running episodes, the observations after the step, the reward ``[n, 1]``, the flags (``terminated``,
            ``truncated``, ``done``) ``[3, n, 1]``, and the observations after the reset.
        """
        jax, jnp, count = self._jax, self._jax.numpy, self.batch_size.numel()
        key, step_key, *reset_key = jax.random.split(running["key"], 3 if prepared is None else 2)
        keys = jax.random.split(step_key, count)
        stepped = jax.vmap(self._advance_row)(keys, running["state"], action)
        state, observations, reward, terminated, truncated = stepped
        steps = running["steps"] + 1
        if self._max_steps is not None:
            truncated = truncated | (steps >= self._max_steps)
        done = terminated | truncated
        running = {**running, "key": key, "steps": jnp.where(done, 0, steps)}
        if prepared is None:
            fresh = self._fresh(reset_key[0])
        else:
            number = (running["taken"] + jnp.cumsum(done, dtype="int32") - 1) % count
            fresh = jax.tree.map(lambda leaf: leaf[number], prepared)
            running["taken"] = (running["taken"] + done.sum(dtype="int32")) % count
        running["state"], ready = self._merged(done, fresh, (state, observations))
        return running, observations, reward[:, None], jnp.stack([terminated, truncated, done])[..., None], ready

    def _restart_rows(self, running: _Tree, rows: Any) -> tuple[_Tree, list[Any]]:
        """Return the running episodes, and observations valid in ``rows``, after a reset of these rows."""
        key, reset_key = self._jax.random.split(running["key"])
        state, observations = self._fresh(reset_key)
        state = self._merged(rows, state, running["state"])
        steps = self._jax.numpy.where(rows, 0, running["steps"])
        return {**running, "key": key, "state": state, "steps": steps}, observations

    def _fresh(self, key: Any) -> tuple[_Tree, list[Any]]:
        """Return a new episode for each row, and its observations."""
        return self._jax.vmap(self._begin_row)(self._jax.random.split(key, self.batch_size.numel()))

    def _merged(self, rows: Any, fresh: _Tree, old: _Tree) -> _Tree:
        """Return ``fresh`` in these rows, and ``old`` in the others."""

        def merge(one: Any, other: Any) -> Any:
            return self._jax.numpy.where(rows.reshape((-1, *[1] * (one.ndim - 1))), one, other)

        return self._jax.tree.map(merge, fresh, old)

    def _begin_row(self, key: Any) -> tuple[_Tree, list[Any]]:
        state, observation = self._protocol.begin(key)
        return self._jax.tree.map(self._strong, state), self._converted(observation)

    def _advance_row(self, key: Any, state: _Tree, action: Any) -> tuple[_Tree, list[Any], Any, Any, Any]:
        jnp = self._jax.numpy
        read = self._action_of(self._protocol.action_space, action)
        after, observation, reward, *ends = self._protocol.advance(key, state, read)
        after = self._jax.tree.map(self._strong, after, state)
        flags = [jnp.asarray(end, bool).reshape(()) for end in ends]
        return (after, self._converted(observation), jnp.asarray(reward, "float32").reshape(()), *flags)

    def _strong(self, leaf: Any, like: Any = None) -> Any:
        """Return an array with a fixed dtype, that of ``like``, so that every step has the same program."""
        array = self._jax.numpy.asarray(leaf)
        if self._is_key(array):
            return array
        return self._jax.lax.convert_element_type(array, array.dtype if like is None else like.dtype)

    def _is_key(self, array: Any) -> bool:
        return bool(self._jax.numpy.issubdtype(array.dtype, self._jax.dtypes.prng_key))

    def _converted(self, observation: Any) -> list[Any]:
        """Return the entries of an observation of one row, as tensors have them and in their order.

        They are copies, as the environment may keep its observations in its state.
        """
        jnp, converted = self._jax.numpy, list[Any]()
        for (path, space), key in zip(self._leaves, self._keys, strict=True):
            spec: TensorSpec = self.readers[0].spec[key]
            value = jnp.asarray(value_in(observation, path))
            if tuple(value.shape) != tuple(space.shape or ()):
                raise ArgumentError(
                    f"An observation must fit the observation space: {key!r} must have shape "
                    f"{list(space.shape or ())}, got {list(value.shape)}. Fix the observation_space of "
                    f"{self._protocol.name}, or its observations."
                )
            if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
                value = value - np.asarray(space.start, np.int32)
            if isinstance(spec, OneHot) and not isinstance(spec, Categorical):
                value = self._jax.nn.one_hot(value, spec.n, dtype="float32")
            dtype = str(spec.dtype).removeprefix("torch.")
            dtype = "int32" if dtype == "int64" else dtype  # widened by torch: JAX may be without 64 bits
            converted.append(jnp.array(value.reshape(tuple(spec.shape)), dtype, copy=True))
        return converted

    def _action_of(self, space: spaces.Space[Any], action: Any) -> Any:
        """Return the action of one row with the dtype and the start of its space."""
        if isinstance(space, spaces.Dict):
            return {name: self._action_of(child, action[name]) for name, child in space.spaces.items()}
        if isinstance(space, spaces.Tuple):
            return tuple(map(self._action_of, space.spaces, action))
        if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
            return action + np.asarray(space.start, np.int32)
        return action.astype(space.dtype)

    def _check_protocol(self) -> _Tree:
        """Trace the environment once, and return the shapes of the running episodes.

        Raises:
            ArgumentError: an observation doesn't fit its space, or a step returns another kind of state than a reset.
        """
        jax = self._jax
        action = self._action_shapes(self._protocol.action_space)
        key = jax.random.PRNGKey(0)
        state, _ = jax.eval_shape(self._protocol.begin, key)
        row = jax.tree.map(lambda space: jax.ShapeDtypeStruct(space.shape[1:], space.dtype), action)
        read = jax.eval_shape(lambda one: self._action_of(self._protocol.action_space, one), row)
        after = jax.eval_shape(self._protocol.advance, key, state, read)[0]
        found, wanted = ({path: leaf.shape for path, leaf in _named(jax, tree).items()} for tree in (after, state))
        if found != wanted:
            path = next(path for path in {**wanted, **found} if wanted.get(path) != found.get(path))
            raise ArgumentError(
                f"A step of {self._protocol.name} must return a state like that of a reset, but {path} has the shape "
                f"{found.get(path)} after a step and {wanted.get(path)} after a reset (None: there is none)."
            )
        shapes, _ = jax.eval_shape(self._begin_rows, key, None)
        prepared = jax.eval_shape(self._prepare_rows, key, None)[1] if self._reset_ratio > 1 else None
        jax.eval_shape(self._advance_rows, shapes, action, prepared)
        return shapes

    def _action_shapes(self, space: spaces.Space[Any]) -> Any:
        if isinstance(space, spaces.Dict):
            return {name: self._action_shapes(child) for name, child in space.spaces.items()}
        if isinstance(space, spaces.Tuple):
            return tuple(map(self._action_shapes, space.spaces))
        dtype = "float32" if np.issubdtype(space.dtype, np.floating) else "int32"
        return self._jax.ShapeDtypeStruct((*self.batch_size, *(space.shape or ())), dtype)

    # -- steps

    @contextmanager
    def _on_its_gpu(self) -> Generator[None]:
        """Run JAX on its device; see :func:`~recurl.envs.jax_protocols.jax_default`."""
        with on_gpu(self.device), self._jax.default_device(self._jax_device):
            yield

    @takes_entries
    @makes_memory
    def _reset(self, tensordict: Step | None) -> Step:
        with self._on_its_gpu():
            mask = None if tensordict is None else tensordict.get(RESET, None)
            if mask is None:
                key = self._new_key()
                self._running, observations = self._begin(key, self._to_jax(self._handed))
                self._age = 0
            elif self._ready is not None and _is_same(mask, self._ready[0]):
                observations = self._ready[1]
            else:
                rows = self._to_jax(mask.reshape(self.batch_size))
                self._running, observations = self._restart(self._episodes(), rows)
            self._ready = None
            return like(tensordict, self._entries(observations), self.batch_size, self.device)

    @takes_entries
    @makes_memory
    def _step(self, tensordict: Step) -> Step:
        with self._on_its_gpu():
            running = self._episodes()
            action = read_on_device(self._protocol.action_space, self.batch_size, tensordict[ACTION])
            action = self._jax.tree.map(self._to_jax, action)
            if self._reset_ratio > 1 and self._age % self._reset_ratio == 0:
                changed, self._prepared = self._prepare(running["key"], self._to_jax(self._handed))
                running = {**running, **changed}
            self._age += 1
            self._running, observations, reward, flags, ready = self._advance(running, action, self._prepared)
            entries: dict[Any, Tensor] = self._entries(observations)
            terminated, truncated, done = torch.from_dlpack(flags).unbind()
            self._ready = done, ready
            entries |= {REWARD: torch.from_dlpack(reward), TERMINATED: terminated, TRUNCATED: truncated, DONE: done}
            return like(tensordict, entries, self.batch_size, self.device)

    def _entries(self, observations: list[Any]) -> dict[Any, Tensor]:
        found = zip(self._keys, map(torch.from_dlpack, observations), strict=True)
        return {key: value.to(self.readers[0].spec[key].dtype) for key, value in found}

    def _to_jax(self, tensor: Tensor) -> Any:
        """Return a tensor as JAX's array; what JAX computes with it waits for torch's stream.

        So every program takes at least one tensor. JAX's allocator may then reuse the memory of arrays that torch has
        read until here.
        """
        kept = (torch.bool, torch.float32)
        if tensor.dtype not in kept:
            tensor = tensor.to(torch.float32 if tensor.is_floating_point() else torch.int32)
        return self._jax.dlpack.from_dlpack(tensor.detach().contiguous())

    def _episodes(self) -> _Tree:
        if self._running is None:
            raise UsageError("A JaxEnv has no state before the first reset of all rows: call env.reset() first.")
        return self._running

    def _new_key(self) -> Any:
        if self._seed is None:  # continue
            return self._episodes()["key"]
        seed, self._seed = self._seed, None
        random = self._jax.random
        key = random.PRNGKey(seed % 2**32)
        if seed >= 2**32:  # JAX may be without 64 bits
            key = random.fold_in(key, seed // 2**32)
        return self._jax.device_put(key, self._jax_device)

    def _set_seed(self, seed: int) -> None:
        self._seed = seed

    # -- saved states

    @property
    def can_save_state(self) -> bool:
        """Whether torch has all dtypes of the environment's state."""
        return self.state_obstacle is None

    @property
    def state_obstacle(self) -> str | None:
        """The part of the environment's state that torch can't hold; None if it holds all of it."""
        leaves = _named(self._jax, self._shapes).items()
        unknown = [(path, leaf.dtype) for path, leaf in leaves if not self._is_key(leaf) and _dtype(leaf) is None]
        return "".join(f"{path} is {dtype}, which torch lacks" for path, dtype in unknown[:1]) or None

    def get_state(self) -> dict[str, Any]:
        """Return the state of the running episodes, including the random key, as tensors by their path.

        Raises:
            UsageError: called before the first reset.
            UnsupportedError: torch lacks a dtype of the state (see :attr:`state_obstacle`).
        """
        if self.state_obstacle is not None:
            raise UnsupportedError(f"{self!r} can't save its state: {self.state_obstacle}. Reset it when resuming.")
        with self._on_its_gpu():
            leaves, random = _named(self._jax, self._episodes()), self._jax.random
            tensors = {path: torch.from_dlpack(self._plain(leaf)).clone() for path, leaf in leaves.items()}
            keys = {path: str(random.key_impl(leaf)) for path, leaf in leaves.items() if self._is_key(leaf)}
            saved = {"environment": self._protocol.name, "tensors": tensors, "keys": keys}
            return {**saved, "seed": self._seed, "age": self._age}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state returned by :meth:`get_state`, on an environment constructed the same way.

        Raises:
            ArgumentError: the state comes from a different kind of environment, or from one with other arguments.
        """
        if state.keys() != {"environment", "tensors", "keys", "seed", "age"}:
            raise ArgumentError(f"A JaxEnv restores only states saved by a JaxEnv, got {sorted(state)}.")
        if state["environment"] != self._protocol.name:
            raise ArgumentError(f"The state was saved by {state['environment']}, not by {self._protocol.name}.")
        jax, shapes = self._jax, _named(self._jax, self._shapes)
        plain = {path: jax.eval_shape(self._plain, leaf) for path, leaf in shapes.items()}
        check_state(state["tensors"], {path: tuple(leaf.shape) for path, leaf in plain.items()})
        for path, leaf in plain.items():
            if state["tensors"][path].dtype != _dtype(leaf):
                raise ArgumentError(f"{path} must be {_dtype(leaf)}, got {state['tensors'][path].dtype}.")
        with self._on_its_gpu():
            copies = {path: state["tensors"][path].to(self.device, copy=True).contiguous() for path in shapes}
            arrays = {
                path: jax.numpy.array(jax.dlpack.from_dlpack(tensor), copy=True) for path, tensor in copies.items()
            }
            keys = {path: jax.random.wrap_key_data(arrays[path], impl=impl) for path, impl in state["keys"].items()}
            leaves = [({**arrays, **keys})[path] for path in shapes]
            self._running = jax.tree.unflatten(jax.tree.structure(self._shapes), leaves)
            self._seed, self._ready, self._age = state["seed"], None, state["age"]
            if self._age % self._reset_ratio:
                self._prepared = self._prepare(self._running["prepared"], self._to_jax(self._handed))[1]

    def _plain(self, leaf: Any) -> Any:
        return self._jax.random.key_data(leaf) if self._is_key(leaf) else leaf

    def __repr__(self) -> str:
        return f"JaxEnv({brief(self._protocol.name)}, batch_size={list(self.batch_size)}, device={self.device})"


def _named(jax: Any, tree: _Tree) -> dict[str, Any]:
    """Return the leaves of a tree by their path."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _dtype(leaf: Any) -> torch.dtype | None:
    """Return torch's dtype of an array, or None."""
    name = str(leaf.dtype)
    return getattr(torch, name) if name in _DTYPES else None


def _is_same(mask: Tensor, done: Tensor) -> bool:
    """Return whether a mask is the ``done`` of the last step, without reading it."""
    return mask.data_ptr() == done.data_ptr() and mask.numel() == done.numel()

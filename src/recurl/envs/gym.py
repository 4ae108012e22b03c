"""Gymnasium environments, single and vectorized."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import VectorEnv

from recurl.core.errors import ArgumentError, ArgumentTypeError, UnsupportedError, UsageError
from recurl.core.keys import ACTION, ACTION_MASK, DONE, RESET, REWARD, TERMINATED, TRUNCATED, NestedKey, normalize_key
from recurl.core.specs import choice_counts
from recurl.core.torch_compat import edits_of
from recurl.envs import gym_state
from recurl.envs.base import EnvBase
from recurl.envs.gym_spaces import (
    ActionReader,
    MaskReader,
    ObservationReader,
    brief,
    find_in_info,
    find_mask,
    missing_mask_error,
    without,
)
from recurl.envs.gym_vector import autoreset_disabled, make, make_vector
from recurl.envs.gym_wrappers import Wrap
from recurl.envs.in_place import InPlace
from recurl.envs.parameters import Parameter, set_parameters
from recurl.execution.explain import NotCompiled
from recurl.sequences.entries import Entries, Step, like, takes_entries
from recurl.transforms import makes_memory

__all__ = ["GymEnv", "GymWrapper"]


_Flags = np.ndarray[Any, np.dtype[np.bool_]]
_RESET = ("observation", "info")
_STEP = ("observation", "reward", "terminated", "truncated", "info")
_FLAGS = (np.dtype(np.bool_),)
_EXPECTED_DTYPES = {"reward": (np.dtype(np.float64), np.dtype(np.float32)), "terminated": _FLAGS, "truncated": _FLAGS}
_UNKNOWN: Any = object()
_ACCEPTED_KINDS = {"reward": "fiub", "terminated": "biu", "truncated": "biu"}  # NumPy dtype kinds


def _parts(result: object, method: str, names: tuple[str, ...]) -> tuple[Any, ...]:
    values = cast("tuple[Any, ...]", result) if isinstance(result, tuple) else None
    if values is not None and len(values) == len(names):
        return values
    got = type(result).__name__ if values is None else f"{len(values)} values"
    raise UsageError(
        f"{method}() of a Gymnasium environment must return ({', '.join(names)}), got {got}. An environment of the "
        "old Gym API must be ported to Gymnasium first."
    )


def _raised_in_batching(error: BaseException) -> bool:
    """Return whether ``error`` was raised while Gymnasium batched the observations of several environments."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__", "").startswith("gymnasium.vector.utils") for frame in frames)


class GymWrapper(EnvBase):
    """Wrapper of a Gymnasium environment or vector environment.

    Every counted step executes an action: a vector environment must have autoreset disabled, or must reset within the
    step (``AutoresetMode.SAME_STEP``). ``next`` always holds the true final observation.

    Entries are ``"observation"``, or the entries of a ``Dict`` or ``Tuple`` space under their own (nested) names
    (``"0"``, ``"1"``, ... for a tuple); ``reward``, float32 ``[*B, 1]``; and ``done``, ``terminated``, and
    ``truncated``, bool ``[*B, 1]``. A ``Box`` keeps its dtype, except that float64 becomes float32; uint8 images stay
    uint8. A ``Discrete`` observation becomes a float32 one-hot vector, or an int64 index above 512 values.
    ``MultiDiscrete`` becomes int64 indices starting at 0. ``info`` is dropped, except for an action mask.

    An action mask, which marks the allowed choices of a discrete action, is written to ``"action_mask"``, bool
    ``[*B, n]``; policies, losses, and random actions honor it (see :mod:`recurl.core.specs.masks`). It is read from the
    observation, from which it is then removed, or otherwise from ``info``. To find out whether ``info`` contains a
    mask, an environment with discrete actions is reset once when it is wrapped; its first reset without a seed returns
    that result.

    Args:
        env: the environment; a vector environment has the batch size ``[num_envs]``.
        device: device of all tensors; torch's default when None.
        categorical_action_encoding: use the spec ``Categorical`` for a discrete action instead of ``OneHot``. Integers
            ``[*B]`` and one-hot vectors ``[*B, n]`` are accepted in either case.
        drop_observations: entries to drop, such as text, which has no tensor equivalent. The parts of a nested name are
            joined by dots.
        action_mask: name of the mask in the observation (of a ``Dict`` space; a nested key, or parts joined by dots) or
            in ``info``. A mask holds integers or bools, 1 for an allowed choice; see
            :class:`~recurl.envs.gym_spaces.MaskReader`. ``"action_mask"`` need not exist, any other name must. None:
            there is no mask, and an observation of that name is an ordinary one.
        create_env: function that creates another such environment, to test whether its state can be saved
            (:attr:`can_save_state`). None: use Gymnasium, if it created ``env``.

    Raises:
        ArgumentTypeError: ``env`` is not a Gymnasium environment.
        ArgumentError: the mask doesn't exist or doesn't match the actions; the vector environment resets in the step
            after the end of an episode; or, at a reset or step, an observation is not in the observation space.
        UsageError: (at a step) a reward is not a number, a flag is not a bool, or a row is done.
        UnsupportedError: a space can't be represented by tensors.

    Example:
        >>> import gymnasium
        >>> env = GymWrapper(gymnasium.make("CartPole-v1"))
        >>> env.rand_step()["next", "observation"].shape
        torch.Size([4])
    """

    reads_root = False

    def __init__(
        self,
        env: gym.Env[Any, Any] | VectorEnv[Any, Any, Any],
        *,
        device: torch.device | str | None = None,
        categorical_action_encoding: bool = False,
        drop_observations: Sequence[NestedKey] = (),
        action_mask: NestedKey | None = ACTION_MASK,
        create_env: Callable[[], gym_state.Gym] | None = None,
    ) -> None:
        if isinstance(env, VectorEnv):
            env = autoreset_disabled(env)
            observation_space, action_space = env.single_observation_space, env.single_action_space
            batch_size = [env.num_envs]
        elif isinstance(env, gym.Env):  # type: ignore[reportUnnecessaryIsInstance] # users
            observation_space, action_space, batch_size = env.observation_space, env.action_space, []
        else:
            raise ArgumentTypeError(f"A gymnasium.Env or gymnasium.vector.VectorEnv is required, got {type(env)}.")
        self._env: Any = env
        self._create, self._obstacle = create_env, _UNKNOWN
        self._reader_options: dict[str, Any] = {"drop_observations": drop_observations, "action_mask": action_mask}
        self._first_reset: tuple[Any, Any] | None = None  # result of the reset in the constructor, until it is used
        self._actions = ActionReader(action_space, batch_size, categorical_action_encoding)
        self._mask = None if action_mask is None else self._find_mask(action_mask, observation_space, batch_size)
        if self._mask is not None and self._mask.source == "observation":
            observation_space = without(observation_space, self._mask.path)
        self._observations = ObservationReader(observation_space, batch_size, env, drop_observations)
        if self._mask is not None:
            self._observations.spec.set(ACTION_MASK, self._mask.spec)
        self._rows_shape = tuple(batch_size)
        self._done_rows = self._no_rows = np.zeros((*batch_size, 1), dtype=np.bool_)
        self._any_done, self._no_rows_bytes = False, self._no_rows.tobytes()
        self._last_done: tuple[torch.Tensor | None, bool] = None, False  # flags of the last step, whether any is set
        self._seed: int | None = None
        super().__init__(
            observation_spec=self._observations.spec,
            action_spec=self._actions.spec,
            batch_size=batch_size,
            device=device,
        )
        nested = any(isinstance(key, tuple) for key in self._observations.spec.keys(True, True))
        self._skips_conversion = not nested and (self.device is None or self.device.type == "cpu")

    def _find_mask(self, name: NestedKey, space: gym.Space[Any], batch_size: list[int]) -> MaskReader | None:
        """Return the reader of the action mask, or None if there is none."""
        key, action = normalize_key(name), self._actions.spec
        path = find_mask(space, key, action, self._env)
        if path is not None:
            return MaskReader(path, "observation", action, batch_size, self._env)
        info: Any = {}
        if choice_counts(action):
            self._first_reset = _parts(self._call("reset"), "reset", _RESET)
            info = self._first_reset[1]
            path = find_in_info(info, key)
            if path is not None:
                return MaskReader(path, "info", action, batch_size, self._env)
        if key == ACTION_MASK:
            return None
        raise missing_mask_error(key, space, info, action, self._env)

    @property
    def gym_env(self) -> Any:
        """The wrapped Gymnasium environment."""
        return self._env

    def wrap_gym(self, wrapper: Callable[[Any], Any]) -> None:
        """Wrap the wrapped environment in a further Gymnasium wrapper that doesn't change its spaces.

        Args:
            wrapper: function from the environment to the wrapped one, such as a recorder.
        """
        self._env = wrapper(self._env)

    @property
    def readers(self) -> tuple[ObservationReader, ActionReader]:
        """Converters from observations to tensors and from action tensors to Gymnasium actions."""
        return self._observations, self._actions

    @property
    def mask_path(self) -> tuple[str, ...] | None:
        """Path of the action mask in the observation or in ``info``; None if there is no mask."""
        return None if self._mask is None else self._mask.path

    @takes_entries
    @makes_memory
    def _reset(self, tensordict: Step | None) -> Step:
        mask = None if tensordict is None else tensordict.get(RESET, None)
        rows = None if mask is None or not self.batch_size else mask.cpu().numpy().reshape(self.batch_size)
        return self._in_type_of(tensordict, self._read(*self._restart(rows), rows))

    def _restart(self, rows: np.ndarray[Any, Any] | None) -> tuple[Any, Any]:
        """Reset the given rows, or all, and return observations and info."""
        result, self._first_reset = self._first_reset, None
        if rows is not None:
            found = _parts(self._call("reset", options={"reset_mask": rows.copy()}), "reset", _RESET)
            self._set_done_rows(self._done_rows & ~rows[:, None])
            return found
        if result is None or self._seed is not None:
            result = _parts(self._call("reset", seed=self._seed), "reset", _RESET)
        self._seed = None
        self._set_done_rows(self._no_rows)
        return result

    def _read(self, observation: Any, info: Any, needed: np.ndarray[Any, Any] | None) -> dict[NestedKey, torch.Tensor]:
        """Return the entries of an observation. If there are masks, the rows ``needed`` must have one."""
        entries = self._observations.read(observation)
        if self._mask is not None:
            source = observation if self._mask.source == "observation" else info
            entries[ACTION_MASK] = self._mask.read(source, needed)
        return entries

    @takes_entries
    @makes_memory
    def _step(self, tensordict: Step) -> Step:
        flags = np.empty((3, *self._done_rows.shape), dtype=np.bool_)
        observation, reward, info, any_done = self._advance(tensordict[ACTION], *flags.reshape(3, -1))
        entries: dict[Any, torch.Tensor] = self._read(
            observation, info, None if self._mask is None else ~flags[0, ..., 0]
        )
        rewards = np.array(self._one_per_row("reward", reward), dtype=np.float32)
        entries[REWARD] = torch.from_numpy(rewards.reshape(self._done_rows.shape))
        entries[TERMINATED], entries[TRUNCATED], entries[DONE] = ended = [torch.from_numpy(flag) for flag in flags]
        self._last_done = ended[2], any_done
        return self._in_type_of(tensordict, entries)

    def _advance(self, action: Any, terminated: _Flags, truncated: _Flags, done: _Flags) -> tuple[Any, Any, Any, bool]:
        """Take a step, write its flags, ``[rows]`` each, and return observation, reward, info, and any(done)."""
        if self._any_done:
            raise UsageError(
                f"Rows {np.flatnonzero(self._done_rows)} are done: reset them before the next step "
                "(env.maybe_reset, or env.step_and_maybe_reset)."
            )
        self._first_reset = None
        outcome = self._call("step", self._actions.read(action))
        observation, reward, ended, cut, info = _parts(outcome, "step", _STEP)
        terminated[...] = ended = self._one_per_row("terminated", ended)
        truncated[...] = cut = self._one_per_row("truncated", cut)
        if ended.tobytes() == cut.tobytes() == self._no_rows_bytes:  # faster than sum() or any()
            done[...] = False
        else:
            self._set_done_rows(np.logical_or(terminated, truncated, out=done))
        return observation, reward, info, self._any_done

    def in_place(self) -> InPlace:
        """Return the in-place stepper of this environment."""
        if type(self) not in (GymWrapper, GymEnv):
            raise NotCompiled(f"{type(self).__name__} may do more than GymWrapper")
        if self._masked or (self.device is not None and self.device.type != "cpu"):
            raise NotCompiled(f"actions are masked, or {self} isn't on the CPU")
        return InPlace(self._advance, self._one_per_row, self._restart, self._observations, bool(self.batch_size))

    def _in_type_of(self, tensordict: Step | None, entries: dict[NestedKey, torch.Tensor]) -> Any:
        """Return host entries as the type of ``tensordict``, moved to this environment's device."""
        if type(tensordict) is Entries and self._skips_conversion:
            return Entries(entries, self.batch_size, self.device)
        return like(tensordict, entries, self.batch_size, self.device)

    def has_any(self, rows: torch.Tensor) -> bool:
        """Return whether the mask selects any row; already known for the done flags of the last step."""
        done, any_done = self._last_done
        if rows is done and not rows.is_inference() and not edits_of(rows):
            return any_done
        return super().has_any(rows)

    def _one_per_row(self, name: str, value: Any) -> np.ndarray[Any, Any]:
        """Validate rewards or flags and return them as an array, ``[rows]`` or ``[]``."""
        if type(value) is np.ndarray and value.shape == self._rows_shape and value.dtype in _EXPECTED_DTYPES[name]:
            return value
        found = np.asarray(value)
        fits = found.dtype.kind in _ACCEPTED_KINDS[name] and found.size == self._done_rows.size
        if fits and name != "reward" and found.dtype.kind != "b":
            fits = bool(np.isin(found, (0, 1)).all())
        if not fits:
            kind = "number" if name == "reward" else "bool"
            size = self._done_rows.size
            wanted = f"{size} {kind}s as {name}, one per environment" if self.batch_size else f"a {kind} as {name}"
            raise UsageError(f"step() of {self._env} must return {wanted}, got {brief(value)}.")
        return found if found.ndim < 2 else found.ravel()

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        try:
            return getattr(self._env, method)(*arguments, **options)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            if not _raised_in_batching(error):
                raise
            raise ArgumentError(
                f"An observation must fit the observation space {self._env.observation_space}, but one returned by "
                f"{method}() does not ({type(error).__name__}: {error}). Fix the observation_space of {self._env}, or "
                "the observations of its reset() and step()."
            ) from error

    def _set_done_rows(self, rows: np.ndarray[Any, Any]) -> None:
        """Store the flags of done rows; ``rows`` may be overwritten afterwards."""
        self._any_done = bool(np.count_nonzero(rows))
        self._done_rows = rows.copy().reshape(self._no_rows.shape) if self._any_done else self._no_rows

    def _set_parameters(self, values: dict[str, Parameter]) -> None:
        set_parameters(self._env, values)

    def _set_seed(self, seed: int) -> None:
        self._seed = seed

    def _close(self) -> None:
        self._env.close()

    @property
    def can_save_state(self) -> bool:
        """Whether the state of the running episodes can be saved; if not, :attr:`state_obstacle` gives the reason.

        It can if the environment implements ``get_state()`` and ``set_state(state)``. Otherwise, the state consists of
        the attributes of the environment and its wrappers, and a trial with two further environments checks once
        whether it can be restored.
        """
        return self.state_obstacle is None

    @property
    def state_obstacle(self) -> str | None:
        """Reason why the state can't be saved; None if it can."""
        if self._obstacle is _UNKNOWN:
            self._obstacle = None if gym_state.implements_state(self._env) else self._find_obstacle()
        return self._obstacle

    def _find_obstacle(self) -> str | None:
        from recurl.envs import state_trial  # noqa: PLC0415 - imported where it is used

        create = self._create or gym_state.creator_of(self._env)
        if create is None:
            return "it was passed as an object, and the trial needs a function that creates such environments"
        mine = {id(core) for core in gym_state.cores(self._env)}

        def make() -> GymWrapper:
            env = create()
            if not mine.isdisjoint(id(core) for core in gym_state.cores(env)):
                raise UsageError("the function that creates it must create a new one at every call")
            return GymWrapper(env, **self._reader_options)

        return state_trial.obstacle(make)

    def get_state(self) -> dict[str, Any]:
        """Return the state of the running episodes, including random generators.

        Raises:
            UnsupportedError: the environment can't save its state.
        """
        from recurl.envs.state_plain import UnsavableError  # noqa: PLC0415 - as above

        if self._obstacle is _UNKNOWN or self._obstacle is None:
            try:
                saved = gym_state.save(self._env)
            except UnsavableError as error:
                raise UnsupportedError(f"{self!r} can't save its state: {error}.") from error
            done = torch.from_numpy(self._done_rows.copy())
            return {"gym": saved, "done": done, "seed": self._seed}
        return super().get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state returned by :meth:`get_state`, on an environment constructed the same way."""
        if "gym" not in state:
            raise ArgumentError(f"{self} restores only states saved by an equal environment, got {sorted(state)}.")
        self._first_reset = None
        gym_state.restore(self._env, state["gym"])
        self._set_done_rows(state["done"].cpu().numpy())
        self._seed = state["seed"]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._env}, batch_size={list(self.batch_size)}, device={self.device})"


class GymEnv(GymWrapper):
    """Environment from Gymnasium's registry, single or vectorized.

    See :class:`GymWrapper` for entries and actions. A native vector environment that always resets in the step after
    the end of an episode (such as that of ``CartPole-v1``) is run as ``num_envs`` single-row instances, each reset
    individually.

    Args:
        env_name: Gymnasium id, e.g. ``"CartPole-v1"`` or ``"module:id"``.
        num_envs: number of environments (batch size ``[num_envs]``); None for a single one with batch size ``[]``.
        device: device of all tensors; torch's default when None.
        vectorization_mode: ``"sync"``, ``"async"`` (spawned processes), ``"vector_entry_point"`` (the environment's
            native vector implementation), or None: the native one if its autoreset can be disabled and there are no
            wrappers, otherwise ``"sync"``.
        wrappers: functions that wrap a Gymnasium environment, such as ``gymnasium.Wrapper`` classes; the first is
            innermost.
        categorical_action_encoding: see :class:`GymWrapper`.
        drop_observations: see :class:`GymWrapper`.
        action_mask: see :class:`GymWrapper`.
        **kwargs: keyword arguments of ``gymnasium.make``, which are passed to the environment's constructor.

    Raises:
        ArgumentError: the id or mode is unknown, ``num_envs`` is below 1, a mode is given without ``num_envs``, or
            wrappers are given along with a native vector environment.
        MissingDependencyError: the environment needs a package that is not installed.
        UnsupportedError: a space can't be represented by tensors.

    Example:
        >>> env = GymEnv("CartPole-v1", num_envs=4)
        >>> env.reset(seed=0)["observation"].shape
        torch.Size([4, 4])
    """

    def __init__(
        self,
        env_name: str,
        num_envs: int | None = None,
        *,
        device: torch.device | str | None = None,
        vectorization_mode: str | None = None,
        wrappers: Sequence[Wrap] = (),
        categorical_action_encoding: bool = False,
        drop_observations: Sequence[NestedKey] = (),
        action_mask: NestedKey | None = ACTION_MASK,
        **kwargs: Any,
    ) -> None:
        if num_envs is None and vectorization_mode is not None:
            raise ArgumentError(f"vectorization_mode={vectorization_mode!r} needs num_envs.")
        create: Callable[[], gym_state.Gym] = partial(make, env_name, wrappers, **kwargs)
        another = create
        if num_envs is not None:
            mode, shared = vectorization_mode, not drop_observations
            create = partial(make_vector, env_name, num_envs, mode, wrappers, shared, **kwargs)
            mode = "sync" if mode == "async" else mode
            another = partial(make_vector, env_name, min(num_envs, 2), mode, wrappers, shared, **kwargs)
        super().__init__(
            create(),
            device=device,
            categorical_action_encoding=categorical_action_encoding,
            drop_observations=drop_observations,
            action_mask=action_mask,
            create_env=another,
        )

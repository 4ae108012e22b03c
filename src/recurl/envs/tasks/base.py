"""Base classes of the tasks: vectorized rows, autoreset, seeding, saved state, and the single environment as one row.

A task is defined by its :class:`~recurl.envs.tasks.dynamics.Dynamics`. The single environment is one row of the vector
environment, so the two always agree. All random numbers are drawn when an episode begins, from the row's generator. The
episodes of a row therefore depend only on its seed, and row `i` of a vector environment seeded with `s` plays the same
episodes as a single environment seeded with `s + i` (as in gymnasium's `SyncVectorEnv`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from recurl.core.errors import ArgumentError, UnsupportedError, UsageError
from recurl.envs.tasks.checks import TRIAL_SEED, check_memory, check_step
from recurl.envs.tasks.drawing import Frame
from recurl.envs.tasks.dynamics import Dynamics, check_count, check_parameters, check_state, parts
from recurl.envs.tasks.namespaces import HOST, RowDraw

Observations: TypeAlias = Any
"""An array, or a dict of arrays by name."""
Actions = NDArray[np.int64]
StepResult = tuple[Observations, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]

_INT64 = np.dtype(np.int64)
_ONE = np.array(1)  # adding an array is faster than adding a number


def check_actions(actions: Any, shape: tuple[int, ...], num_actions: int) -> Actions:
    """Validate discrete `actions` and return them as a flat int64 array.

    Args:
        actions: integers in `[0, num_actions)` of shape `shape`, as an array or array-like.
        shape: `(num_envs,)`, or `()` for a single environment.
        num_actions: number of actions.

    Raises:
        ArgumentError: the shape differs, or the actions are not integers or out of range.

    Example:
        >>> check_actions([0, 2], (2,), 3)
        array([0, 2])
    """
    array = np.asarray(actions)
    if array.shape == shape and array.dtype.kind in "iu":
        flat = array if array.dtype is _INT64 and shape else array.reshape(-1).astype(np.int64, copy=False)
        # Viewed as unsigned, negative numbers are huge: a single comparison checks both bounds.
        if np.maximum.reduce(flat.view(np.uint64)) < num_actions:
            return flat
        got = f"values from {array.min()} to {array.max()}"
    else:
        got = f"{array.dtype} of shape {array.shape}"
    raise ArgumentError(f"actions must be integers in [0, {num_actions}) of shape {shape}; got {got}")


def check_choices(actions: Any, shape: tuple[int, ...], nvec: NDArray[np.int64]) -> Actions:
    """Validate multi-discrete `actions` and return them as an int64 array.

    Args:
        actions: integers of shape `shape`, at least 0 and below `nvec` along the last axis, as an array or array-like.
        shape: `(num_envs, n)`, or `(n,)` for a single environment.
        nvec: number of choices of each component, `[n]`.

    Raises:
        ArgumentError: the shape differs, or the actions are not integers or out of range.

    Example:
        >>> check_choices([[0, 2], [1, 0]], (2, 2), np.array([2, 3])).dtype
        dtype('int64')
    """
    array = np.asarray(actions)
    if array.shape != shape or array.dtype.kind not in "iu":
        got = f"{array.dtype} of shape {array.shape}"
    elif ((array < 0) | (array >= nvec)).any():
        got = f"values from {array.min(axis=0)} to {array.max(axis=0)}"
    else:
        return array.astype(np.int64, copy=False)
    raise ArgumentError(f"actions must be integers in [0, {nvec.tolist()}) of shape {shape}; got {got}")


def check_vectors(actions: Any, shape: tuple[int, ...]) -> NDArray[np.floating[Any]]:
    """Validate continuous `actions` and return them as a floating-point array; a floating-point dtype is kept.

    Args:
        actions: real numbers of shape `shape`, as an array or array-like.
        shape: `(num_envs, *action)`, or the shape of one action for a single environment.

    Raises:
        ArgumentError: the shape differs, or the actions are not real numbers or not finite.

    Example:
        >>> check_vectors([[0.5], [-1.0]], (2, 1)).dtype
        dtype('float64')
    """
    array = np.asarray(actions)
    if array.shape != shape or array.dtype.kind not in "fiu":
        raise ArgumentError(f"actions must be real numbers of shape {shape}; got {array.dtype} of shape {array.shape}")
    if not np.isfinite(array).all():
        raise ArgumentError("actions must be finite; got infinity or NaN")
    return array if array.dtype.kind == "f" else array.astype(np.float64)


class TaskVectorEnv(VectorEnv[Observations, Actions, NDArray[Any]]):
    """Vector environment of a task, with all rows stepped together in NumPy.

    Observations are arrays `[num_envs, ...]`, or a dict of them; actions integers `[num_envs]` or `[num_envs, n]`, or
    real vectors `[num_envs, n]`; rewards float64 `[num_envs]`; terminated and truncated bool `[num_envs]`. Every
    returned array is new. A row that reaches the step limit is truncated, whether or not it also terminated (as in
    gymnasium's `TimeLimit`).

    Args:
        dynamics: the task.
        num_envs: number of rows.
        autoreset_mode: gymnasium's `AutoresetMode` or its value. `NEXT_STEP`: the step after an episode's end ignores
            the row's action and returns the new episode's first observation with reward 0. `SAME_STEP`: the last step
            returns that observation, and `info["final_obs"]` (object array, None where `info["_final_obs"]` is False)
            the true final one. `DISABLED`: finished rows are reset with `reset(options={"reset_mask": mask})`, mask
            bool `[num_envs]`.

    Attributes:
        dynamics: the task.
        state: state arrays by name, rows last.
        rngs: one generator per row.

    Raises:
        ArgumentError: `autoreset_mode` is unknown, `num_envs` is below 1, or a function of the dynamics returns
            an invalid result.
    """

    def __init__(
        self, dynamics: Dynamics, num_envs: int = 1, autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP
    ) -> None:
        self.num_envs = check_count("num_envs", num_envs, minimum=1)
        try:
            self._mode = AutoresetMode(autoreset_mode)
        except ValueError:
            offered = [mode.value for mode in AutoresetMode]
            raise ArgumentError(f"autoreset_mode must be one of {offered}; got {autoreset_mode!r}") from None
        self.dynamics = dynamics
        self.metadata = {"render_modes": [], "autoreset_mode": self._mode}
        self.single_observation_space = dynamics.observation_space
        self.single_action_space = dynamics.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._step_limit = np.array(dynamics.step_limit)
        self._steps = np.zeros(num_envs, dtype=np.int64)
        self._done = np.zeros(num_envs, dtype=np.bool_)
        self._any_done = False
        self._started = False
        self.rngs = [seeding.np_random()[0] for _ in range(num_envs)]
        initial = check_step(dynamics, HOST, lambda: RowDraw([np.random.default_rng(TRIAL_SEED)]), 1)
        check_memory(dynamics)
        self.state: dict[str, Any] = {
            name: np.zeros((*value.shape[:-1], num_envs), value.dtype) for name, value in initial.items()
        }

    @property
    def steps(self) -> NDArray[np.int64]:
        """Number of steps in the current episode of each row."""
        return self._steps

    def draw(self, row: int) -> Frame:
        """Return an image of a row, uint8 `[height, width, 3]`.

        Raises:
            UnsupportedError: the task can't be rendered.
        """
        raise UnsupportedError(f"{type(self).__name__} can't be drawn: define draw(row).")

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        """Begin an episode in every row, or in the rows of `options["reset_mask"]` (bool `[num_envs]`).

        Args:
            seed: row `i`, if it is reset, is seeded with `seed + i`, or with the i-th seed of a sequence with one per
                row; None keeps the current generators.
            options: may contain `reset_mask`. Rows outside of it keep their state, and their observation is returned
                again.

        Raises:
            ArgumentError: `options` contains anything else, the mask isn't bool `[num_envs]` with at least one True, or
                there isn't one seed per row.
            UsageError: the first reset has a mask that excludes rows.
        """
        rows = self._rows_to_reset({} if options is None else options)
        seeds = self._seeds(seed)
        for row in rows.tolist():
            if seeds[row] is not None:
                self.rngs[row] = seeding.np_random(seeds[row])[0]
        self._restart(rows)
        self._started = True
        return self.dynamics.observe(HOST, self.state, self._steps), {}

    def _seeds(self, seed: int | Sequence[int | None] | None) -> Sequence[int | None]:
        if not isinstance(seed, Sequence):
            return [None if seed is None else seed + row for row in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise ArgumentError(f"seed must be a number, or one for each of {self.num_envs} rows; got {len(seed)}.")
        return seed

    def step(self, actions: Any) -> StepResult:
        """Play one step in every row.

        Args:
            actions: integers `[num_envs]` or `[num_envs, n]`, or real vectors `[num_envs, n]`.

        Raises:
            ArgumentError: `actions` have the wrong shape or dtype, or are out of range.
            UsageError: called before the first reset; or, under DISABLED, while a finished row has not been reset.
        """
        actions = self.checked(actions, self._done.shape)
        if not self._started or (self._any_done and self._mode is AutoresetMode.DISABLED):
            self._raise_on_step()
        self.state, reward, terminated = self.dynamics.advance(HOST, self.state, self._steps, actions)
        self._steps = self._steps + _ONE
        truncated = self._steps >= self._step_limit
        if self._any_done:  # only under NEXT_STEP
            reward[self._done] = 0.0
            terminated[self._done] = False
            truncated[self._done] = False
            self._restart(self._done.nonzero()[0])
        observations = self.dynamics.observe(HOST, self.state, self._steps)
        done = terminated | truncated
        self._any_done = np.count_nonzero(done) > 0
        info: dict[str, Any] = {}
        if self._any_done:
            self._done[...] = done
            if self._mode is AutoresetMode.SAME_STEP:
                rows = done.nonzero()[0]
                info = _final_info(observations, done, rows)
                self._restart(rows)
                observations = self.dynamics.observe(HOST, self.state, self._steps)
        return observations, reward, terminated, truncated, info

    def checked(self, actions: Any, rows: tuple[int, ...]) -> NDArray[Any]:
        """Validate `actions` and return them as an array.

        Args:
            actions: integers `rows` or `[*rows, n]`, or real vectors `[*rows, n]`.
            rows: `(num_envs,)`, or `()` for a single environment.

        Raises:
            ArgumentError: `actions` have the wrong shape or dtype, or are out of range.
        """
        space = self.dynamics.action_space
        if isinstance(space, Discrete):
            return check_actions(actions, rows, int(space.n))
        shape = (*rows, *space.shape)
        return check_vectors(actions, shape) if isinstance(space, Box) else check_choices(actions, shape, space.nvec)

    def get_state(self) -> dict[str, Any]:
        """Return the complete state of all rows: arrays, and generator states as plain containers.

        Raises:
            UsageError: called before the first reset.
        """
        if not self._started:
            raise UsageError("there is no state to save before the first reset; call reset() first")
        state: dict[str, Any] = {name: array.copy() for name, array in self._arrays().items()}
        state["rng"] = [rng.bit_generator.state for rng in self.rngs]
        return state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state returned by `get_state` of this environment, or of one with the same arguments.

        Raises:
            ArgumentError: an entry is missing or has another shape.
        """
        arrays = self._arrays()
        check_state(state, {name: array.shape for name, array in arrays.items()} | {"rng": (self.num_envs,)})
        for name, array in arrays.items():
            array[...] = state[name]
        for rng, rng_state in zip(self.rngs, state["rng"], strict=True):
            rng.bit_generator.state = rng_state
        self._any_done = bool(self._done.any())
        self._started = True

    def _arrays(self) -> dict[str, NDArray[Any]]:
        return {"steps": self._steps, "done": self._done, **self.state}

    def set_parameters(self, values: Mapping[str, Any]) -> None:
        """Change parameters of the task, which count from the next step, or where an episode begins.

        Raises:
            ArgumentError: the task has no such parameter, or a value is out of bounds.
        """
        check_parameters(self.dynamics, values)
        self.dynamics = self.dynamics.with_parameters(values)

    def _restart(self, rows: NDArray[np.intp]) -> None:
        self._steps[rows] = 0
        self._done[rows] = False
        self._any_done = np.count_nonzero(self._done) > 0
        fresh = self.dynamics.begin(HOST, RowDraw([self.rngs[row] for row in rows.tolist()]))
        for name, array in fresh.items():
            self.state[name].T[rows] = array.T  # rows first

    def _rows_to_reset(self, options: Mapping[str, Any]) -> NDArray[np.intp]:
        unknown = sorted(set(options) - {"reset_mask"})
        if unknown:
            raise ArgumentError(f"the only option of reset is 'reset_mask'; got {unknown}")
        if "reset_mask" not in options:
            return np.arange(self.num_envs)
        mask = np.asarray(options["reset_mask"])
        if mask.shape != (self.num_envs,) or mask.dtype != np.bool_ or not mask.any():
            raise ArgumentError(
                f"reset_mask must be bool of shape ({self.num_envs},) with at least one True; "
                f"got {mask.dtype} of shape {mask.shape} with {np.count_nonzero(mask)} set"
            )
        if not self._started and not mask.all():
            raise UsageError("the first reset must reset every row; call reset() without reset_mask first")
        return np.flatnonzero(mask)

    def _raise_on_step(self) -> None:
        if not self._started:
            raise UsageError("step() was called before the first reset(); call reset() first")
        raise UsageError(
            f"rows {np.flatnonzero(self._done).tolist()} are finished and autoreset is disabled; "
            "call reset(options={'reset_mask': mask}) for them before the next step"
        )


class TaskEnv(gymnasium.Env[Observations, Any]):
    """Single environment: one row of a task, without autoreset.

    Args:
        rows: a vector environment of one row with autoreset DISABLED.
        render_mode: `"rgb_array"` lets `render()` return an image; None lets it return None.

    Raises:
        ArgumentError: `render_mode` is invalid.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012 - declared like this by gymnasium

    def __init__(self, rows: TaskVectorEnv, render_mode: str | None = None) -> None:
        if render_mode not in (None, "rgb_array"):
            raise ArgumentError(f"render_mode must be 'rgb_array' or None; got {render_mode!r}")
        self.render_mode = render_mode
        if type(rows).draw is TaskVectorEnv.draw:
            self.metadata = {"render_modes": []}
        self._rows = rows
        self.observation_space = rows.single_observation_space
        self.action_space = rows.single_action_space
        rows.rngs = [self.np_random]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        """Begin an episode; see `TaskVectorEnv.reset`."""
        super().reset(seed=seed)
        self._rows.rngs = [self.np_random]
        observations, info = self._rows.reset(options=options)
        return _first(observations), info

    def step(self, action: Any) -> tuple[Observations, float, bool, bool, dict[str, Any]]:
        """Play one step.

        Raises:
            ArgumentError: `action` has the wrong shape or dtype, or is out of range.
            UsageError: called before the first reset, or after the end of the episode.
        """
        actions = self._rows.checked(action, ())
        actions = actions.reshape(1, *(self._rows.single_action_space.shape or ()))
        observations, reward, terminated, truncated, info = self._rows.step(actions)
        return _first(observations), float(reward[0]), bool(terminated[0]), bool(truncated[0]), info

    def render(self) -> Frame | None:  # pyright: ignore[reportIncompatibleMethodOverride] - gymnasium allows more
        """Return an image, uint8 `[height, width, 3]`, or None without a `render_mode`."""
        return None if self.render_mode is None else self._rows.draw(0)

    def get_state(self) -> dict[str, Any]:
        """Return the complete state; see `TaskVectorEnv.get_state`."""
        return self._rows.get_state()

    def set_parameters(self, values: Mapping[str, Any]) -> None:
        """Change parameters of the task; see `TaskVectorEnv.set_parameters`."""
        self._rows.set_parameters(values)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state returned by `get_state`; see `TaskVectorEnv.set_state`."""
        self._rows.set_state(state)


def _first(observations: Observations) -> Observations:
    if isinstance(observations, dict):
        return {name: array[0] for name, array in parts(observations).items()}
    return observations[0]


def _final_info(observations: Observations, done: NDArray[np.bool_], rows: NDArray[np.intp]) -> dict[str, Any]:
    final = np.full(len(done), None, dtype=object)
    for row in rows.tolist():
        copies = {name: array[row].copy() for name, array in parts(observations).items()}
        final[row] = copies if isinstance(observations, dict) else copies[""]
    return {"final_obs": final, "_final_obs": done.copy(), "final_info": {}, "_final_info": done.copy()}

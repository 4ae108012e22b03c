"""Private names of Gymnasium used by recurl, each with its purpose and a fallback if it disappears.

They are looked up where they are used, so that a missing name doesn't break ``import recurl``.
"""

from __future__ import annotations

from typing import Any, cast

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import concatenate, iterate

from recurl.core.private_names import absent_error, find

__all__ = ["LAST_RESULTS", "SyncVectorEnv", "add_info", "forget_pending", "set_elapsed_steps"]

LAST_RESULTS = ("_env_obs", "_observations")
"""Attributes of vector environments that hold the last observations, which a saved state leaves out.

Fallback: they are saved too.
"""


class SyncVectorEnv(gym.vector.SyncVectorEnv):
    """Faster version of Gymnasium's ``SyncVectorEnv`` with autoreset disabled.

    Observations that are arrays of the space's shape and dtype are copied directly to their rows, instead of being
    stacked afterwards. Fallback, if Gymnasium's buffers have other names: Gymnasium's ``step``.

    Example:
        >>> from gymnasium.vector import AutoresetMode
        >>> mode = AutoresetMode.DISABLED
        >>> env = SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2, autoreset_mode=mode, copy=False)
        >>> env.reset(seed=0)[0].shape, env.step(np.array([0, 1]))[1]
        ((2, 4), array([1., 1.]))
    """

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step every row."""
        try:
            batch: Any = self._observations
            rewards, terminated, truncated = self._rewards, self._terminations, self._truncations
            rows, add_info = self._env_obs, self._add_info
        except AttributeError:
            return super().step(actions)
        space, infos = self.single_observation_space, dict[str, Any]()
        fits = isinstance(space, gym.spaces.Box)
        for index, (action, env) in enumerate(zip(iterate(self.action_space, actions), self.envs, strict=True)):
            seen, rewards[index], terminated[index], truncated[index], info = env.step(action)
            rows[index] = seen
            fits = fits and type(seen) is np.ndarray and seen.dtype == space.dtype and seen.shape == space.shape
            if fits:
                batch[index] = seen
            infos = add_info(infos, info, index) if info else infos
        if not fits:
            batch = self._observations = concatenate(space, rows, batch)
        self._autoreset_envs = np.logical_or(terminated, truncated)
        return batch, np.copy(rewards), np.copy(terminated), np.copy(truncated), infos


def add_info(env: gym.vector.VectorEnv[Any, Any, Any], infos: Any, info: Any, index: int) -> dict[str, Any]:
    """Add the info of one row to those of a vector environment, in Gymnasium's format.

    Replacement: arrays by key, with a mask ``_key`` each.
    """
    vector_env: Any = env
    try:
        add = vector_env._add_info
    except AttributeError as error:
        raise absent_error("gymnasium:vector.VectorEnv._add_info") from error
    return add(infos, info, index)


def forget_pending(env: gym.vector.AsyncVectorEnv) -> None:
    """Let an ``AsyncVectorEnv`` forget calls without an answer, so that ``close`` doesn't wait for them.

    Fallback: it waits for its own time limit.
    """
    state = find("gymnasium.vector.async_vector_env:AsyncState.DEFAULT", None)
    if state is not None:
        cast(Any, env)._state = state


def set_elapsed_steps(limit: gym.wrappers.TimeLimit[Any, Any], steps: int) -> None:
    """Set the number of steps of the current episode that a ``TimeLimit`` has counted. Replacement: none."""
    if not hasattr(limit, "_elapsed_steps"):
        raise absent_error("gymnasium:wrappers.TimeLimit._elapsed_steps")
    cast(Any, limit)._elapsed_steps = steps

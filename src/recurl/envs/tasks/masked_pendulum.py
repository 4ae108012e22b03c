"""MaskedPendulum: Pendulum with the velocity hidden."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium.envs.classic_control.pendulum import DEFAULT_X, DEFAULT_Y, PendulumEnv
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from recurl.envs.tasks.base import Observations, TaskEnv, TaskVectorEnv, check_count
from recurl.envs.tasks.drawing import BLACK, RED, Canvas, Frame

_START = np.array([DEFAULT_X, DEFAULT_Y])
_OPTIMAL_RETURN = -138.0
_MEMORYLESS_RETURN = -1000.0
_MEASURED_STEPS = 200


class MaskedPendulumVectorEnv(TaskVectorEnv):
    """Swing a pendulum up and keep it there, from its angle only (`recurl/MaskedPendulum-v1`, vectorised).

    The dynamics, the constants, the reward and the initial state (angle uniform in [-pi, pi], velocity in [-1, 1]) are
    those of gymnasium's Pendulum-v1: states bit for bit, rewards to rounding. The angular velocity is hidden.

    Observation: float32 `[2]`: cosine and sine of the angle, which is 0 when the pendulum is upright.
    Actions: `Box(-2, 2, [1])`, the torque (N m), clipped to this range.
    Reward: `-(angle^2 + 0.1 velocity^2 + 0.001 torque^2)` of the state before the step, the angle in [-pi, pi).
    Episode: never terminated; truncated after `max_episode_steps`.

    Optimal return: about -138; measured, as no closed form is known: dynamic programming over a grid of 181 angles,
    181 velocities and 17 torques for 200 steps, then the mean over 4000 starts of the policy that is greedy with
    respect to its values. Two successive observations give the velocity, so an agent with memory can do as well.

    Best memoryless return: about -1000, against -1220 without any torque; measured by a cross-entropy search over
    policies `2 tanh(...)` of a Fourier series of the angle, with 2 and 4 harmonics. It is low because a torque that
    depends on the angle alone does no work over a swing forth and back, so it can neither drive nor damp the pendulum.
    The search found none better; this is no proof that none exists.

    Args:
        num_envs: number of rows.
        max_episode_steps: number of steps after which an episode is truncated; at least 1.
        autoreset_mode: see `TaskVectorEnv`.

    Raises:
        ArgumentError: an argument is out of range.

    Example:
        >>> env = MaskedPendulumVectorEnv(3)
        >>> observation, _ = env.reset(seed=0)
        >>> observation.shape, observation.dtype
        ((3, 2), dtype('float32'))
        >>> env.step(np.zeros((3, 1), dtype=np.float32))[1].shape
        (3,)
    """

    state_arrays: ClassVar[tuple[str, ...]] = ("physical",)

    def __init__(
        self,
        num_envs: int = 1,
        max_episode_steps: int = 200,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    ) -> None:
        self._physics = PendulumEnv()
        super().__init__(
            num_envs,
            observation_space=Box(-1.0, 1.0, (2,), np.float32),
            actions=Box(-self._physics.max_torque, self._physics.max_torque, (1,), np.float32),
            step_limit=check_count("max_episode_steps", max_episode_steps, minimum=1),
            autoreset_mode=autoreset_mode,
        )
        self._physical = np.zeros((2, num_envs))  # angle, its velocity

    def _begin(self, rows: list[int]) -> None:
        for row in rows:
            self._physical[:, row] = self.rngs[row].uniform(-_START, _START)

    def _advance(self, actions: Any) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        # The same operations in the same order as PendulumEnv.step, so that every bit of the state agrees. The square
        # of an array may differ from that of a scalar in the last bit, so rewards agree to rounding.
        physics, (angle, velocity) = self._physics, self._physical
        torque = np.clip(actions[:, 0], -physics.max_torque, physics.max_torque)
        upright = ((angle + np.pi) % (2 * np.pi)) - np.pi
        costs = upright**2 + 0.1 * velocity**2 + 0.001 * (torque**2)
        gravity = 3 * physics.g / (2 * physics.l) * np.sin(angle)
        faster = velocity + (gravity + 3.0 / (physics.m * physics.l**2) * torque) * physics.dt
        velocity[:] = np.clip(faster, -physics.max_speed, physics.max_speed)
        angle += velocity * physics.dt
        return -costs, np.zeros(self.num_envs, dtype=np.bool_)

    def _observe(self) -> Observations:
        angle = self._physical[0]
        return np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)

    def draw(self, row: int) -> Frame:
        """Return a picture of the pendulum."""
        canvas = Canvas(200, 200)
        angle = float(self._physical[0, row])
        end = (100 - 75 * float(np.sin(angle)), 100 - 75 * float(np.cos(angle)))
        canvas.line((100, 100), end, 14, RED)
        canvas.circle(end, 7, RED)
        canvas.circle((100, 100), 5, BLACK)
        return canvas.pixels

    @staticmethod
    def optimal_return(max_episode_steps: int = 200) -> float:
        """Return the mean return of an agent that knows the velocity, rounded; scaled to other lengths, as an estimate.

        Example:
            >>> MaskedPendulumVectorEnv.optimal_return()
            -138.0
        """
        return _OPTIMAL_RETURN * max_episode_steps / _MEASURED_STEPS

    @staticmethod
    def memoryless_return(max_episode_steps: int = 200) -> float:
        """Return the mean return of the best known policy of the current angle, rounded; scaled to other lengths.

        Example:
            >>> MaskedPendulumVectorEnv.memoryless_return()
            -1000.0
        """
        return _MEMORYLESS_RETURN * max_episode_steps / _MEASURED_STEPS


class MaskedPendulumEnv(TaskEnv):
    """Swing a pendulum up, from its angle only (`recurl/MaskedPendulum-v1`): one row of `MaskedPendulumVectorEnv`.

    See there for observation, actions, reward, end of the episode, optimal and best memoryless return.

    Args:
        max_episode_steps: number of steps after which an episode is truncated; at least 1. `gymnasium.make` does not
            pass an argument of this name on but wraps the environment in a `TimeLimit`, which can only lower the limit.

    Example:
        >>> env = MaskedPendulumEnv()
        >>> observation, _ = env.reset(seed=0)
        >>> float(np.square(observation).sum().round(4))
        1.0
    """

    def __init__(self, max_episode_steps: int = 200, render_mode: str | None = None) -> None:
        super().__init__(MaskedPendulumVectorEnv(1, max_episode_steps, AutoresetMode.DISABLED), render_mode)

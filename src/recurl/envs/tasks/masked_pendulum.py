"""MaskedPendulum: Pendulum with the velocity hidden."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.envs.classic_control.pendulum import DEFAULT_X, DEFAULT_Y, PendulumEnv
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode

from recurl.envs.tasks.base import TaskEnv, TaskVectorEnv
from recurl.envs.tasks.drawing import BLACK, RED, Canvas, Frame
from recurl.envs.tasks.dynamics import Dynamics, State, check_count
from recurl.envs.tasks.namespaces import Draw, Namespace

_PHYSICS = PendulumEnv()
_TORQUE, _SPEED, _DT = _PHYSICS.max_torque, _PHYSICS.max_speed, _PHYSICS.dt
_GRAVITY = 3 * _PHYSICS.g / (2 * _PHYSICS.l)
_INERTIA = 3.0 / (_PHYSICS.m * _PHYSICS.l**2)
_OPTIMAL_RETURN = -138.0
_MEMORYLESS_RETURN = -1000.0
_MEASURED_STEPS = 200


class MaskedPendulum(Dynamics):
    """Dynamics of `recurl/MaskedPendulum-v1`: see `MaskedPendulumVectorEnv`.

    State: `physical`, float64 `[2, rows]`: the angle and its velocity.

    Args:
        max_episode_steps: number of steps after which an episode is truncated; at least 1.

    Raises:
        ArgumentError: an argument is out of range.
    """

    def __init__(self, max_episode_steps: int = 200) -> None:
        super().__init__(
            observation_space=Box(-1.0, 1.0, (2,), np.float32),
            actions=Box(-_TORQUE, _TORQUE, (1,), np.float32),
            step_limit=check_count("max_episode_steps", max_episode_steps, minimum=1),
        )

    def begin(self, xp: Namespace, draw: Draw) -> State:
        """Draw an angle and a velocity per row."""
        angle = draw.uniform(-DEFAULT_X, DEFAULT_X)
        return {"physical": xp.stack((angle, draw.uniform(-DEFAULT_Y, DEFAULT_Y)))}

    def advance(self, xp: Namespace, state: State, steps: Any, actions: Any) -> tuple[State, Any, Any]:
        """Apply the torque."""
        # The same operations in the same order as PendulumEnv.step, for bitwise agreement of the state. The square of
        # an array may differ from that of a scalar in the last bit, so rewards agree to rounding.
        angle, velocity = state["physical"]
        torque = xp.clip(actions[:, 0], -_TORQUE, _TORQUE)
        upright = ((angle + xp.pi) % (2 * xp.pi)) - xp.pi
        costs = upright**2 + 0.1 * velocity**2 + 0.001 * (torque**2)
        faster = velocity + (_GRAVITY * xp.sin(angle) + _INERTIA * torque) * _DT
        velocity = xp.clip(faster, -_SPEED, _SPEED)
        physical = xp.stack((angle + velocity * _DT, velocity))
        return {"physical": physical}, -costs, xp.zeros(len(costs), dtype=xp.bool)

    def observe(self, xp: Namespace, state: State, steps: Any) -> Any:
        """Return cosine and sine of the angle."""
        angle = state["physical"][0]
        return xp.astype(xp.stack((xp.cos(angle), xp.sin(angle)), axis=1), xp.float32)


class MaskedPendulumVectorEnv(TaskVectorEnv):
    """Swing a pendulum up and keep it there, from its angle only (`recurl/MaskedPendulum-v1`, vectorized).

    The dynamics, the constants, the reward and the initial state (angle uniform in [-pi, pi], velocity in [-1, 1]) are
    those of gymnasium's Pendulum-v1: states bit for bit, rewards to rounding. The angular velocity is hidden.

    Observation: float32 `[2]`: cosine and sine of the angle, which is 0 when the pendulum is upright.
    Actions: `Box(-2, 2, [1])`, the torque (N m), clipped to this range.
    Reward: `-(angle^2 + 0.1 velocity^2 + 0.001 torque^2)` of the state before the step, the angle in [-pi, pi).
    Episode: never terminated; truncated after `max_episode_steps`.

    Optimal return: about -138, measured, as no closed form is known: dynamic programming over a grid of 181 angles,
    181 velocities and 17 torques for 200 steps, then the mean over 4000 starts of the policy that is greedy with
    respect to its values. Two successive observations determine the velocity, so an agent with memory can do as well.

    Best memoryless return: about -1000, compared with -1220 without any torque; measured by a cross-entropy search over
    policies `2 tanh(...)` of a Fourier series of the angle, with 2 and 4 harmonics. It is low because a torque that
    depends on the angle alone does no work over a swing back and forth, so it can neither drive nor damp the pendulum.
    The search found nothing better, which is not a proof.

    Args:
        num_envs: number of rows.
        max_episode_steps: number of steps after which an episode is truncated; at least 1.
        autoreset_mode: see `TaskVectorEnv`.

    Raises:
        ArgumentError: an argument is out of range.

    Example:
        >>> import numpy as np
        >>> env = MaskedPendulumVectorEnv(3)
        >>> observation, _ = env.reset(seed=0)
        >>> observation.shape, observation.dtype
        ((3, 2), dtype('float32'))
        >>> env.step(np.zeros((3, 1), dtype=np.float32))[1].shape
        (3,)
    """

    def __init__(
        self,
        num_envs: int = 1,
        max_episode_steps: int = 200,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    ) -> None:
        super().__init__(MaskedPendulum(max_episode_steps), num_envs, autoreset_mode)

    def draw(self, row: int) -> Frame:
        """Return an image of the pendulum."""
        canvas = Canvas(200, 200)
        angle = float(self.state["physical"][0, row])
        end = (100 - 75 * float(np.sin(angle)), 100 - 75 * float(np.cos(angle)))
        canvas.line((100, 100), end, 14, RED)
        canvas.circle(end, 7, RED)
        canvas.circle((100, 100), 5, BLACK)
        return canvas.pixels

    @staticmethod
    def optimal_return(max_episode_steps: int = 200) -> float:
        """Return the rounded mean return of an agent that knows the velocity; scaled for other lengths, as an estimate.

        Example:
            >>> MaskedPendulumVectorEnv.optimal_return()
            -138.0
        """
        return _OPTIMAL_RETURN * max_episode_steps / _MEASURED_STEPS

    @staticmethod
    def memoryless_return(max_episode_steps: int = 200) -> float:
        """Return the rounded mean return of the best known policy of the current angle; scaled for other lengths.

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
            forward an argument of this name but wraps the environment in a `TimeLimit`, which can only lower the limit.

    Example:
        >>> import numpy as np
        >>> env = MaskedPendulumEnv()
        >>> observation, _ = env.reset(seed=0)
        >>> float(np.square(observation).sum().round(4))
        1.0
    """

    def __init__(self, max_episode_steps: int = 200, render_mode: str | None = None) -> None:
        super().__init__(MaskedPendulumVectorEnv(1, max_episode_steps, AutoresetMode.DISABLED), render_mode)

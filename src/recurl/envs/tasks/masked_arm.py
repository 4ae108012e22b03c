"""MaskedArm: a two-link arm that reaches for a target, with velocities and its physical parameters hidden."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict
from gymnasium.vector import AutoresetMode

from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.core.symmetry import SignedPermutation, Symmetry
from recurl.envs.tasks.base import TaskEnv, TaskVectorEnv
from recurl.envs.tasks.drawing import BLACK, GREEN, GREY, RED, Canvas, Frame
from recurl.envs.tasks.dynamics import Dynamics, State, check_count
from recurl.envs.tasks.namespaces import Draw, Namespace

_LENGTH = 0.5  # of each link, in m
_MASS, _DAMPING, _ROTOR = 0.5, 0.3, 0.05  # kg of each link; N m s and kg m^2 of each joint
_SPREAD = (0.5, 0.5, 0.75, 0.3)  # of the two masses, the damping and the gain, as fractions
_TORQUE = (6.0, 2.0)  # N m
_GRAVITY = 9.81
_SPEED = 12.0  # rad/s
_DT, _SUBSTEPS = 0.05, 4
_REACH = (0.2, 0.9)  # distance of targets from the shoulder, in m
_COST = 0.01
_OPTIMAL_RETURN = -6.2
_MEMORYLESS_RETURN = -26.0


class MaskedArm(Dynamics):
    """Dynamics of `recurl/MaskedArm-v0`: see `MaskedArmVectorEnv`.

    State, float64: `motion` `[4, rows]`, the angles of shoulder and elbow and their velocities; `target` `[2, rows]`, x
    and y; `body` `[4, rows]`, the masses of the two links, the damping, and the gain of the motors, each divided by its
    nominal value.

    Args:
        gravity: whether the arm moves in a vertical plane instead of a horizontal one.
        randomization: scale of the random physical parameters, from 0, the nominal arm, to 1; may be changed during
            training (`set_parameters`).
        max_episode_steps: number of steps after which an episode is truncated; at least 1.

    Raises:
        ArgumentError: an argument is out of range.
    """

    parameters: Mapping[str, tuple[float, float]] = MappingProxyType({"randomization": (0.0, 1.0)})

    def __init__(self, gravity: bool = False, randomization: float = 1.0, max_episode_steps: int = 200) -> None:
        if not isinstance(randomization, int | float) or not 0 <= randomization <= 1:  # type: ignore[reportUnnecessaryIsInstance] # users
            raise ArgumentError(f"randomization must be a number from 0 to 1; got {randomization!r}")
        seen = np.array([1.0, 1.0, 1.0, 1.0, _REACH[1], _REACH[1]], np.float32)
        hidden = np.array([_SPEED, _SPEED, 2.0, 2.0, 2.0, 2.0], np.float32)
        super().__init__(
            observation_space=Dict(
                observation=Box(-seen, seen, dtype=np.float32),
                privileged=Box(np.where(hidden == 2.0, np.float32(0), -hidden), hidden, dtype=np.float32),
            ),
            actions=Box(-1.0, 1.0, (2,), np.float32),
            step_limit=check_count("max_episode_steps", max_episode_steps, minimum=1),
        )
        self.gravity = _GRAVITY if gravity else 0.0
        self.randomization = float(randomization)

    def begin(self, xp: Namespace, draw: Draw) -> State:
        """Draw pose, velocities, target and physical parameters per row."""
        drawn = draw.uniform(-1.0, 1.0, (10,))
        motion = xp.concat((drawn[:2] * xp.pi, drawn[2:4]))
        near, far = _REACH
        radius = xp.sqrt(near**2 + (far**2 - near**2) * 0.5 * (drawn[4] + 1))  # uniform over the area
        target = xp.stack((radius * xp.cos(xp.pi * drawn[5]), radius * xp.sin(xp.pi * drawn[5])))
        spread = xp.asarray(_SPREADS)[:, None] * self.randomization
        return {"motion": motion, "target": target, "body": 1 + spread * drawn[6:]}

    def advance(self, xp: Namespace, state: State, steps: Any, actions: Any) -> tuple[State, Any, Any]:
        """Apply the torques for a time step."""
        shoulder, elbow, shoulder_speed, elbow_speed = state["motion"]
        inner, outer, damping, gain = state["body"]
        commands = xp.astype(xp.clip(actions, -1.0, 1.0), xp.float64)
        torques = (commands[:, 0] * (_TORQUE[0] * gain), commands[:, 1] * (_TORQUE[1] * gain))
        dt, damping = _DT / _SUBSTEPS, damping * _DAMPING
        # Moments of inertia of uniform links, m l^2 / 3 about their ends.
        # The rotors of the geared motors add a constant to the diagonal of the mass matrix.
        one, two = inner * (_MASS * _LENGTH**2 / 3), outer * (_MASS * _LENGTH**2 / 3)
        for _ in range(_SUBSTEPS):
            bend, turn = xp.cos(elbow), xp.sin(elbow)
            m11, m12, m22 = _ROTOR + one + two * (4 + 3 * bend), two * (1 + 1.5 * bend), _ROTOR + two
            h = 1.5 * two * turn
            first = torques[0] - damping * shoulder_speed + h * (2 * shoulder_speed + elbow_speed) * elbow_speed
            second = torques[1] - damping * elbow_speed - h * shoulder_speed * shoulder_speed
            if self.gravity:
                weight = self.gravity * _MASS * _LENGTH
                lower = 0.5 * weight * outer * xp.cos(shoulder + elbow)
                first = first - weight * (0.5 * inner + outer) * xp.cos(shoulder) - lower
                second = second - lower
            determinant = m11 * m22 - m12 * m12
            shoulder_speed = shoulder_speed + dt * (m22 * first - m12 * second) / determinant
            elbow_speed = elbow_speed + dt * (m11 * second - m12 * first) / determinant
            shoulder_speed = xp.clip(shoulder_speed, -_SPEED, _SPEED)
            elbow_speed = xp.clip(elbow_speed, -_SPEED, _SPEED)
            shoulder, elbow = shoulder + dt * shoulder_speed, elbow + dt * elbow_speed
        x = _LENGTH * (xp.cos(shoulder) + xp.cos(shoulder + elbow)) - state["target"][0]
        y = _LENGTH * (xp.sin(shoulder) + xp.sin(shoulder + elbow)) - state["target"][1]
        cost = _COST * (commands[:, 0] * commands[:, 0] + commands[:, 1] * commands[:, 1])
        reward = -xp.sqrt(x * x + y * y) - cost
        motion = xp.stack((shoulder, elbow, shoulder_speed, elbow_speed))
        return {**state, "motion": motion}, reward, xp.zeros(len(cost), dtype=xp.bool)

    def observe(self, xp: Namespace, state: State, steps: Any) -> dict[str, Any]:
        """Return cosines and sines of the angles and the target; and, as privileged, velocities and parameters."""
        shoulder, elbow, *speeds = state["motion"]
        angles = (xp.cos(shoulder), xp.sin(shoulder), xp.cos(elbow), xp.sin(elbow))
        return {
            "observation": xp.astype(xp.stack((*angles, *state["target"]), axis=1), xp.float32),
            "privileged": xp.astype(xp.stack((*speeds, *state["body"]), axis=1), xp.float32),
        }


_SPREADS = np.array(_SPREAD)

ARM_MIRROR = Symmetry(
    {
        "observation": SignedPermutation([-1, 1, 1, -1, -1, 1]),
        "privileged": SignedPermutation([-1, -1, 1, 1, 1, 1]),
    },
    action=SignedPermutation([-1, -1]),
)
"""Symmetry of `recurl/MaskedArm-v0`, with and without gravity: left and right."""


class MaskedArmVectorEnv(TaskVectorEnv):
    """Reach for a target with a two-link arm, without seeing its velocities (`recurl/MaskedArm-v0`, vectorized).

    Two uniform links of 0.5 m and 0.5 kg, driven by geared motors at the shoulder (6 N m) and the elbow (2 N m), with
    viscous damping of 0.3 N m s and the rotor's inertia of 0.05 kg m^2 in both joints. Mass matrix, Coriolis and
    gravity terms are the closed form of the planar elbow manipulator (Spong, Hutchinson and Vidyasagar, Robot Modeling
    and Control, 2006, section 7.3.2, with the second angle relative to the first link), plus the inertia of the rotors
    in the diagonal of the mass matrix. A step of 0.05 s has 4 substeps of the semi-implicit Euler method. Velocities
    are clipped to 12 rad/s.

    When an episode begins, the angles are uniform in [-pi, pi], the velocities in [-1, 1] rad/s, the target in a ring
    around the shoulder from 0.2 to 0.9 m. The masses are multiplied by factors uniform in [0.5, 1.5], the damping by
    one in [0.25, 1.75], the torques of both motors by one in [0.7, 1.3]; `randomization` scales these ranges.

    Observation: a dict of float32 arrays.

    * `observation` `[6]`: cosine and sine of the shoulder's and of the elbow's angle, and x and y of the target.
    * `privileged` `[6]`: both angular velocities, and the factors of the two masses, the damping and the torques, which
      a simulator knows and a robot doesn't.

    Actions: `Box(-1, 1, [2])`, the torques of shoulder and elbow as fractions of the largest, clipped to this range.
    Reward: `-distance - 0.01 (a1^2 + a2^2)`, with the distance of the tip from the target after the step, in m.
    Episode: never terminated; truncated after `max_episode_steps`.

    Optimal return: about -6.2 with default arguments, measured, as no closed form is known: a controller that knows the
    privileged observations goes to the nearer of the two poses that reach the target, with the torques of the inverse
    dynamics. Its gains were found by a cross-entropy search, and the mean is over 1000 episodes.

    Best memoryless return: about -26, likewise measured, with torques proportional to the distances of the angles from
    this pose, which only the damping of the joints slows down. The search found nothing better, which is not a proof.

    Args:
        num_envs: number of rows.
        gravity: whether the arm moves in a vertical plane instead of a horizontal one.
        randomization: scale of the random physical parameters, from 0, the nominal arm, to 1.
        max_episode_steps: number of steps after which an episode is truncated; at least 1.
        autoreset_mode: see `TaskVectorEnv`.

    Raises:
        ArgumentError: an argument is out of range.

    Example:
        >>> import numpy as np
        >>> env = MaskedArmVectorEnv(3)
        >>> observations, _ = env.reset(seed=0)
        >>> {name: array.shape for name, array in observations.items()}
        {'observation': (3, 6), 'privileged': (3, 6)}
        >>> env.step(np.zeros((3, 2), dtype=np.float32))[1].shape
        (3,)
    """

    def __init__(
        self,
        num_envs: int = 1,
        gravity: bool = False,
        randomization: float = 1.0,
        max_episode_steps: int = 200,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    ) -> None:
        super().__init__(MaskedArm(gravity, randomization, max_episode_steps), num_envs, autoreset_mode)

    def draw(self, row: int) -> Frame:
        """Return an image of the arm and its target."""
        canvas = Canvas(200, 200)
        shoulder, elbow = (float(angle) for angle in self.state["motion"][:2, row])
        middle = _pixel(np.cos(shoulder), np.sin(shoulder))
        tip = _pixel(np.cos(shoulder) + np.cos(shoulder + elbow), np.sin(shoulder) + np.sin(shoulder + elbow))
        canvas.circle(_pixel(*(self.state["target"][:, row] / _LENGTH)), 7, GREEN)
        canvas.line((100, 100), middle, 10, GREY)
        canvas.line(middle, tip, 7, RED)
        for joint in ((100.0, 100.0), middle):
            canvas.circle(joint, 5, BLACK)
        return canvas.pixels

    @staticmethod
    def optimal_return(gravity: bool = False, randomization: float = 1.0, max_episode_steps: int = 200) -> float:
        """Return the rounded mean return of the best known controller that knows the privileged observations.

        Raises:
            UnsupportedError: it wasn't measured for these arguments.

        Example:
            >>> MaskedArmVectorEnv.optimal_return()
            -6.2
        """
        return _measured(_OPTIMAL_RETURN, gravity, randomization, max_episode_steps)

    @staticmethod
    def memoryless_return(gravity: bool = False, randomization: float = 1.0, max_episode_steps: int = 200) -> float:
        """Return the rounded mean return of the best known policy of the current observation.

        Raises:
            UnsupportedError: it wasn't measured for these arguments.

        Example:
            >>> MaskedArmVectorEnv.memoryless_return()
            -26.0
        """
        return _measured(_MEMORYLESS_RETURN, gravity, randomization, max_episode_steps)


def _measured(value: float, *arguments: object) -> float:
    if arguments != (False, 1.0, 200):
        raise UnsupportedError("the returns of MaskedArm were measured with its default arguments only")
    return value


def _pixel(x: float, y: float) -> tuple[float, float]:
    """Return the pixel of a point, given in lengths of a link from the shoulder."""
    return (100 + 45 * float(x), 100 - 45 * float(y))


class MaskedArmEnv(TaskEnv):
    """Reach with a two-link arm, without velocities (`recurl/MaskedArm-v0`): one row of `MaskedArmVectorEnv`.

    See there for the arm, observations, actions, and reward.

    Args:
        gravity: whether the arm moves in a vertical plane instead of a horizontal one.
        randomization: scale of the random physical parameters, from 0, the nominal arm, to 1.
        max_episode_steps: number of steps after which an episode is truncated; at least 1. `gymnasium.make` does not
            forward an argument of this name but wraps the environment in a `TimeLimit`, which can only lower the limit.

    Example:
        >>> env = MaskedArmEnv(randomization=0)
        >>> observations, _ = env.reset(seed=0)
        >>> observations["privileged"][2:].tolist()
        [1.0, 1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        gravity: bool = False,
        randomization: float = 1.0,
        max_episode_steps: int = 200,
        render_mode: str | None = None,
    ) -> None:
        rows = MaskedArmVectorEnv(1, gravity, randomization, max_episode_steps, AutoresetMode.DISABLED)
        super().__init__(rows, render_mode)

"""MaskedCartPole: CartPole with the velocities hidden."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from recurl.core.errors import UsageError
from recurl.core.symmetry import SignedPermutation, Symmetry
from recurl.envs.tasks.base import Observations, TaskVectorEnv, check_actions
from recurl.envs.tasks.drawing import BLACK, BLUE, BROWN, Canvas, Frame
from recurl.envs.tasks.dynamics import Dynamics, State, check_count, check_state
from recurl.envs.tasks.namespaces import Draw, Namespace

_PHYSICS = CartPoleEnv()
_FORCES = np.array([-_PHYSICS.force_mag, _PHYSICS.force_mag])
_LIMITS = np.array([[_PHYSICS.x_threshold], [_PHYSICS.theta_threshold_radians]])
_GRAVITY, _TAU, _LENGTH, _MASS = _PHYSICS.gravity, _PHYSICS.tau, _PHYSICS.length, _PHYSICS.total_mass
_POLE_MASS, _POLE_MOMENT = _PHYSICS.masspole, _PHYSICS.polemass_length


def _positions_space() -> Box:
    high = np.array([_PHYSICS.x_threshold * 2, _PHYSICS.theta_threshold_radians * 2], dtype=np.float32)
    return Box(-high, high, dtype=np.float32)


def _draw(x: float, angle: float) -> Frame:
    canvas = Canvas(300, 200)
    scale = 150 / _PHYSICS.x_threshold
    at, length = 150 + x * scale, _LENGTH * 2 * scale
    canvas.line((0, 150), (300, 150), 1, BLACK)
    canvas.rectangle((at - 12, 142), (at + 12, 158), BLACK)
    canvas.line((at, 145), (at + length * float(np.sin(angle)), 145 - length * float(np.cos(angle))), 5, BROWN)
    canvas.circle((at, 145), 3, BLUE)
    return canvas.pixels


class MaskedCartPole(Dynamics):
    """Dynamics of `recurl/MaskedCartPole-v1`: see `MaskedCartPoleVectorEnv`.

    State: `physical`, float64 `[4, rows]`: cart position, its velocity, pole angle, its velocity.

    Args:
        max_episode_steps: number of steps after which an episode is truncated; at least 1.

    Raises:
        ArgumentError: an argument is out of range.
    """

    def __init__(self, max_episode_steps: int = 500) -> None:
        limit = check_count("max_episode_steps", max_episode_steps, minimum=1)
        super().__init__(observation_space=_positions_space(), actions=2, step_limit=limit)

    def begin(self, xp: Namespace, draw: Draw) -> State:
        """Draw four small numbers per row."""
        return {"physical": draw.uniform(-0.05, 0.05, (4,))}

    def advance(self, xp: Namespace, state: State, steps: Any, actions: Any) -> tuple[State, Any, Any]:
        """Push the cart."""
        # The same operations in the same order as CartPoleEnv.step, for bitwise agreement.
        physical = state["physical"]
        _, x_dot, theta, theta_dot = physical
        cos = xp.cos(theta)
        sin = xp.sin(theta)
        temp = (xp.asarray(_FORCES)[actions] + _POLE_MOMENT * xp.square(theta_dot) * sin) / _MASS
        leverage = _LENGTH * (4.0 / 3.0 - _POLE_MASS * xp.square(cos) / _MASS)
        theta_acc = (_GRAVITY * sin - cos * temp) / leverage
        x_acc = temp - _POLE_MOMENT * theta_acc * cos / _MASS
        physical = physical + _TAU * xp.stack((x_dot, x_acc, theta_dot, theta_acc))
        outside = xp.abs(physical[0::2]) > xp.asarray(_LIMITS)
        return {"physical": physical}, xp.ones(len(theta)), outside[0] | outside[1]

    def observe(self, xp: Namespace, state: State, steps: Any) -> Any:
        """Return the two positions."""
        return xp.astype(state["physical"][0::2].T, xp.float32)


CARTPOLE_MIRROR = Symmetry({"observation": SignedPermutation([-1, -1])}, action=SignedPermutation([1, 1], order=[1, 0]))
"""Symmetry of `recurl/MaskedCartPole-v1`: left and right."""


class MaskedCartPoleVectorEnv(TaskVectorEnv):
    """Balance a pole on a cart from positions only (`recurl/MaskedCartPole-v1`, vectorized).

    The dynamics, the constants and the initial state (all four numbers uniform in [-0.05, 0.05]) are those of
    gymnasium's CartPole-v1 (Barto, Sutton and Anderson, 1983), bit for bit. The two velocities are hidden.

    Observation: float32 `[2]`: cart position (m) and pole angle (rad).
    Actions: `Discrete(2)`: 0 pushes the cart to the left, 1 to the right.
    Reward: 1 for each step, including the one that ends the episode.
    Episode: terminated when the cart is more than 2.4 m from the middle or the pole more than 12 degrees from the
    vertical; truncated after `max_episode_steps`.

    Optimal return: `max_episode_steps`. Two successive observations determine the velocities, and with these CartPole
    can be balanced indefinitely.

    Best memoryless return: about 100, a fifth of that. This is measured, as no closed form is known. It is low because
    a force that depends on the positions alone does not damp the motion (the divergence of the flow is 0: state volume
    is preserved, so no such policy makes the upright pole attractive), while the Euler steps of 0.02 s and the choice
    between only two forces add energy. The swing grows until the pole falls.
    The value was measured by a cross-entropy search over deterministic and stochastic policies of the current
    observation. The best logistic policy of a line `a x + b theta` reaches 51, and so does the best network of 12 tanh
    units, the kind of solution that a small policy network finds. The sign of such a line plus 12 sine waves of the
    positions reaches 98; some of the waves oscillate within a hundredth of a rad, as a dither between the two forces.
    The search found nothing better, which is not a proof.

    Args:
        num_envs: number of rows.
        max_episode_steps: number of steps after which an episode is truncated; at least 1.
        autoreset_mode: see `TaskVectorEnv`.

    Raises:
        ArgumentError: an argument is out of range.

    Example:
        >>> env = MaskedCartPoleVectorEnv(3)
        >>> observation, _ = env.reset(seed=0)
        >>> observation.shape, observation.dtype
        ((3, 2), dtype('float32'))
        >>> env.step([0, 1, 1])[1]
        array([1., 1., 1.])
    """

    def __init__(
        self,
        num_envs: int = 1,
        max_episode_steps: int = 500,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    ) -> None:
        super().__init__(MaskedCartPole(max_episode_steps), num_envs, autoreset_mode)

    def draw(self, row: int) -> Frame:
        """Return an image of cart and pole."""
        x, _, angle, _ = self.state["physical"][:, row].tolist()
        return _draw(x, angle)

    @staticmethod
    def optimal_return(max_episode_steps: int = 500) -> float:
        """Return the return of an agent that infers the velocities by memory: a reward at every step.

        Example:
            >>> MaskedCartPoleVectorEnv.optimal_return()
            500.0
        """
        return float(max_episode_steps)

    @staticmethod
    def memoryless_return(max_episode_steps: int = 500) -> float:
        """Return the rounded mean return of the best known policy of the current positions; see the class.

        Example:
            >>> MaskedCartPoleVectorEnv.memoryless_return()
            100.0
        """
        return min(100.0, float(max_episode_steps))


class MaskedCartPoleEnv(CartPoleEnv):
    """Balance a pole on a cart from positions only (`recurl/MaskedCartPole-v1`): gymnasium's CartPoleEnv, masked.

    See `MaskedCartPoleVectorEnv` for observation, actions, reward, end of the episode, optimal return (500) and best
    memoryless return.

    Args:
        max_episode_steps: number of steps after which an episode is truncated; at least 1. `gymnasium.make` does not
            forward an argument of this name but wraps the environment in a `TimeLimit`, which can only lower the limit.
        render_mode: see CartPoleEnv; `"rgb_array"` is rendered without pygame.

    Raises:
        ArgumentError: an argument is out of range.

    Example:
        >>> env = MaskedCartPoleEnv()
        >>> observation, _ = env.reset(seed=0)
        >>> observation
        array([ 0.01369617, -0.04590265], dtype=float32)
    """

    def __init__(self, max_episode_steps: int = 500, render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        self.observation_space = _positions_space()
        self._step_limit = check_count("max_episode_steps", max_episode_steps, minimum=1)
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        """Begin an episode; options as in CartPoleEnv (`low` and `high` of the initial state)."""
        observation, info = super().reset(seed=seed, options=options)
        self._steps = 0
        return observation[0::2].copy(), info

    # CartPoleEnv is typed as never truncating, as its TimeLimit does; this class counts its steps itself.
    def step(  # pyright: ignore[reportIncompatibleMethodOverride] - hence the different type
        self, action: Any
    ) -> tuple[Observations, float, bool, bool, dict[str, Any]]:
        """Play one step.

        Raises:
            ArgumentError: `action` isn't 0 or 1.
            UsageError: called before the first reset.
        """
        push = int(check_actions(action, (), 2)[0])
        self._check_started()
        observation, reward, terminated, _, info = super().step(push)
        self._steps += 1
        return observation[0::2].copy(), reward, terminated, self._steps >= self._step_limit, info

    def render(self) -> Any:
        """Return an image, uint8 `[height, width, 3]`; other modes are rendered by CartPoleEnv."""
        if self.render_mode != "rgb_array":
            return super().render()
        x, _, angle, _ = self._check_started().tolist()
        return _draw(x, angle)

    def get_state(self) -> dict[str, Any]:
        """Return the complete state, as plain containers and arrays.

        Raises:
            UsageError: called before the first reset.
        """
        physical = self._check_started().copy()
        # -1 represents None: the pole has not fallen.
        fallen = -1 if self.steps_beyond_terminated is None else self.steps_beyond_terminated
        rng = self.np_random.bit_generator.state
        return {"steps": self._steps, "steps_beyond_terminated": fallen, "physical": physical, "rng": [rng]}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state returned by `get_state`.

        Raises:
            ArgumentError: an entry is missing or has another shape.
        """
        check_state(state, {"steps": (), "steps_beyond_terminated": (), "physical": (4,), "rng": (1,)})
        self.state = np.array(state["physical"], dtype=np.float64)
        self._steps = int(state["steps"])
        fallen = int(state["steps_beyond_terminated"])
        self.steps_beyond_terminated = None if fallen < 0 else fallen
        self.np_random.bit_generator.state = state["rng"][0]

    def _check_started(self) -> NDArray[np.float64]:
        if self.state is None:
            raise UsageError("the environment has no state before the first reset; call reset() first")
        return self.state

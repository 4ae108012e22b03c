"""MaskedCartPole: CartPole with the velocities hidden."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from recurl.envs.tasks.base import Actions, Observations, TaskVectorEnv, check_actions, check_count, check_state
from recurl.envs.tasks.drawing import BLACK, BLUE, BROWN, Canvas, Frame
from recurl.errors import UsageError


def _positions_space(physics: CartPoleEnv) -> Box:
    high = np.array([physics.x_threshold * 2, physics.theta_threshold_radians * 2], dtype=np.float32)
    return Box(-high, high, dtype=np.float32)


def _draw(x: float, angle: float, physics: CartPoleEnv) -> Frame:
    canvas = Canvas(300, 200)
    scale = 150 / physics.x_threshold
    at, length = 150 + x * scale, physics.length * 2 * scale
    canvas.line((0, 150), (300, 150), 1, BLACK)
    canvas.rectangle((at - 12, 142), (at + 12, 158), BLACK)
    canvas.line((at, 145), (at + length * float(np.sin(angle)), 145 - length * float(np.cos(angle))), 5, BROWN)
    canvas.circle((at, 145), 3, BLUE)
    return canvas.pixels


class MaskedCartPoleVectorEnv(TaskVectorEnv):
    """Balance a pole on a cart from positions only (`recurl/MaskedCartPole-v1`, vectorised).

    The dynamics, the constants and the initial state (all four numbers uniform in [-0.05, 0.05]) are those of
    gymnasium's CartPole-v1 (Barto, Sutton and Anderson, 1983), bit for bit. The two velocities are hidden.

    Observation: float32 `[2]`: cart position (m) and pole angle (rad).
    Actions: `Discrete(2)`: 0 pushes the cart to the left, 1 to the right.
    Reward: 1 for each step, the one that ends the episode included.
    Episode: terminated when the cart is more than 2.4 m from the middle or the pole more than 12 degrees from the
    vertical; truncated after `max_episode_steps`.

    Optimal return: `max_episode_steps`. Two successive observations give the velocities, and with these CartPole can be
    balanced forever.

    Best memoryless return: about 100, a fifth of that; measured, as no closed form is known. It is low because a force
    that depends on the positions alone does not damp the motion (the divergence of the flow is 0: state volume is
    preserved, so no such policy makes the upright pole attractive), while the Euler steps of 0.02 s and the choice
    between only two forces add energy; the swing grows until the pole falls.
    The value was measured by a cross-entropy search over deterministic and stochastic policies of the current
    observation: 51 for the best logistic policy of a line `a x + b theta`, and no more for the best network of 12 tanh
    units, which is what a small policy network finds; 98 for the sign of such a line plus 12 sine waves of the
    positions, some of which oscillate within a hundredth of a rad: they are a dither between the two forces. The search
    found none better; this is no proof that none exists.

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

    state_arrays: ClassVar[tuple[str, ...]] = ("physical",)

    def __init__(
        self,
        num_envs: int = 1,
        max_episode_steps: int = 500,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    ) -> None:
        self._physics = CartPoleEnv()
        super().__init__(
            num_envs,
            observation_space=_positions_space(self._physics),
            actions=2,
            step_limit=check_count("max_episode_steps", max_episode_steps, minimum=1),
            autoreset_mode=autoreset_mode,
        )
        self._physical = np.zeros((4, num_envs))  # x, its velocity, theta, its velocity
        self._change = np.zeros_like(self._physical)
        self._forces = np.array([-self._physics.force_mag, self._physics.force_mag])
        self._limits = np.array([[self._physics.x_threshold], [self._physics.theta_threshold_radians]])

    def _begin(self, rows: list[int]) -> None:
        for row in rows:
            self._physical[:, row] = self.rngs[row].uniform(-0.05, 0.05, size=4)

    def _advance(self, actions: Actions) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        # The same operations in the same order as CartPoleEnv.step, so that every bit agrees.
        physics, physical, change = self._physics, self._physical, self._change
        _, _, theta, theta_dot = physical
        cos = np.cos(theta)
        sin = np.sin(theta)
        force = self._forces.take(actions)
        temp = (force + physics.polemass_length * np.square(theta_dot) * sin) / physics.total_mass
        leverage = physics.length * (4.0 / 3.0 - physics.masspole * np.square(cos) / physics.total_mass)
        theta_acc = (physics.gravity * sin - cos * temp) / leverage
        change[0::2] = physical[1::2]
        change[1] = temp - physics.polemass_length * theta_acc * cos / physics.total_mass
        change[3] = theta_acc
        physical += physics.tau * change
        outside = np.abs(physical[0::2]) > self._limits
        return np.ones(self.num_envs), outside[0] | outside[1]

    def _observe(self) -> Observations:
        return self._physical[0::2].T.astype(np.float32, order="C")

    def draw(self, row: int) -> Frame:
        """Return a picture of cart and pole."""
        return _draw(float(self._physical[0, row]), float(self._physical[2, row]), self._physics)

    @staticmethod
    def optimal_return(max_episode_steps: int = 500) -> float:
        """Return the return of an agent that infers the velocities from its memory: the reward of every step.

        Example:
            >>> MaskedCartPoleVectorEnv.optimal_return()
            500.0
        """
        return float(max_episode_steps)

    @staticmethod
    def memoryless_return(max_episode_steps: int = 500) -> float:
        """Return the mean return of the best known policy of the current positions, rounded; see the class for details.

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
            pass an argument of this name on but wraps the environment in a `TimeLimit`, which can only lower the limit.
        render_mode: see CartPoleEnv; `"rgb_array"` is drawn without pygame.

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
        self.observation_space = _positions_space(self)
        self._step_limit = check_count("max_episode_steps", max_episode_steps, minimum=1)
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        """Begin an episode; options as in CartPoleEnv (`low` and `high` of the initial state)."""
        observation, info = super().reset(seed=seed, options=options)
        self._steps = 0
        return observation[0::2].copy(), info

    # CartPoleEnv is typed as never truncating, which its TimeLimit does; this one counts its steps itself.
    def step(  # pyright: ignore[reportIncompatibleMethodOverride] - so it differs
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
        """Return a picture, uint8 `[height, width, 3]`; the other modes are CartPoleEnv's."""
        if self.render_mode != "rgb_array":
            return super().render()
        x, _, angle, _ = self._check_started().tolist()
        return _draw(x, angle, self)

    def get_state(self) -> dict[str, Any]:
        """Return the complete state, as plain containers and arrays.

        Raises:
            UsageError: called before the first reset.
        """
        physical = self._check_started().copy()
        # -1 stands for None: the pole has not fallen.
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

"""CartPole with only positions or only velocities observed."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box

from recurl.envs.tasks.dynamics import State
from recurl.envs.tasks.masked_cartpole import MaskedCartPole
from recurl.envs.tasks.namespaces import Namespace
from recurl.envs.tasks.popgym.noise import Noisy, check_sigma


class PositionOnlyCartPole(MaskedCartPole):
    """Balance a pole on a cart from cart position and pole angle.

    POPGym's PositionOnlyCartPole: gymnasium's CartPole, bit for bit, with the velocities hidden. Observation: the two
    positions, float32 `[2]`. Actions: 0 pushes to the left, 1 to the right. Reward: `1 / step_limit` at every step,
    including the one at which the pole falls or the cart leaves the track, which terminates the episode. (The package
    intends a reward of -1 there, but tests for a reward of 0, which gymnasium doesn't return. This is reproduced.)

    State: `physical`, float64 `[4, rows]`: cart position, its velocity, pole angle, its velocity.

    Args:
        max_episode_length: number of steps after which an episode is truncated; at least 1.

    Raises:
        ArgumentError: an argument is out of range.
    """

    def __init__(self, max_episode_length: int = 200) -> None:
        super().__init__(max_episode_length)

    def advance(self, xp: Namespace, state: State, steps: Any, actions: Any) -> tuple[State, Any, Any]:
        """Push the cart."""
        after, ones, terminated = super().advance(xp, state, steps, actions)
        return after, ones * (1.0 / self.step_limit), terminated


class VelocityOnlyCartPole(PositionOnlyCartPole):
    """Balance a pole on a cart from their velocities.

    POPGym's VelocityOnlyCartPole: see `PositionOnlyCartPole`. Observation: the two velocities, float32 `[2]`, except
    that, as in the package, the first step of an episode shows the two positions. The package's ids use `Cartpole`;
    here all tasks have the names of their classes.

    State: `physical`, float64 `[4, rows]`: cart position, its velocity, pole angle, its velocity.

    Args:
        max_episode_length: number of steps after which an episode is truncated; at least 1.

    Raises:
        ArgumentError: an argument is out of range.
    """

    def __init__(self, max_episode_length: int = 200) -> None:
        super().__init__(max_episode_length)
        self.observation_space = Box(-np.inf, np.inf, (2,), np.float32)

    def observe(self, xp: Namespace, state: State, steps: Any) -> Any:
        """Return the velocities."""
        physical = state["physical"]
        return xp.astype(xp.where(steps == 0, physical[0::2], physical[1::2]).T, xp.float32)


class NoisyPositionOnlyCartPole(Noisy, PositionOnlyCartPole):
    """Balance a pole on a cart from noisy positions.

    POPGym's NoisyPositionOnlyCartPole: see `PositionOnlyCartPole`. Normal noise is added to each position, of the same
    scale for both, although the angle is a much smaller number. Observations are clipped to the observation space. As
    in the package, all difficulties have 200 steps.

    State: `physical`, float64 `[4, rows]`: cart position, its velocity, pole angle, its velocity; `noise_0` and
    `noise_1`, float64 `[step_limit + 1, rows]`.

    Args:
        noise_sigma: standard deviation of the noise; positive.
        max_episode_length: number of steps after which an episode is truncated; at least 1.

    Raises:
        ArgumentError: an argument is out of range.
    """

    def __init__(self, noise_sigma: float = 0.1, max_episode_length: int = 200) -> None:
        super().__init__(max_episode_length)
        self.noise_sigma = check_sigma(noise_sigma)

"""Pendulum with only the angle observed."""

from __future__ import annotations

from typing import Any

from recurl.envs.tasks.dynamics import State
from recurl.envs.tasks.masked_pendulum import MaskedPendulum
from recurl.envs.tasks.namespaces import Namespace
from recurl.envs.tasks.popgym.noise import Noisy, check_sigma

_HALF = 16.2736044 / 2
"""Half the magnitude of the lowest reward of gymnasium's Pendulum."""


class PositionOnlyPendulum(MaskedPendulum):
    """Swing a pendulum up and keep it there, from its angle.

    POPGym's PositionOnlyPendulum: gymnasium's Pendulum with the velocity hidden. Observation: cosine and sine of the
    angle, float32 `[2]`. Action: the torque, clipped to [-2, 2]. Reward: gymnasium's reward shifted and scaled to
    [-1, 1], divided by the step limit. Never terminated. As in the package, harder means shorter: 200, 150 and 100
    steps.

    State: `physical`, float64 `[2, rows]`: the angle and its velocity.

    Args:
        max_episode_length: number of steps after which an episode is truncated; at least 1.

    Raises:
        ArgumentError: an argument is out of range.
    """

    def __init__(self, max_episode_length: int = 200) -> None:
        super().__init__(max_episode_length)

    def advance(self, xp: Namespace, state: State, steps: Any, actions: Any) -> tuple[State, Any, Any]:
        """Apply the torque."""
        after, reward, terminated = super().advance(xp, state, steps, actions)
        return after, (reward + _HALF) / _HALF / self.step_limit, terminated


class NoisyPositionOnlyPendulum(Noisy, PositionOnlyPendulum):
    """Swing a pendulum up and keep it there, from its noisy angle.

    POPGym's NoisyPositionOnlyPendulum: see `PositionOnlyPendulum`. Normal noise is added to cosine and sine, which are
    then clipped to [-1, 1]. As in the package, all difficulties have 200 steps.

    State: `physical`, float64 `[2, rows]`: the angle and its velocity; `noise_0` and `noise_1`, float64
    `[step_limit + 1, rows]`.

    Args:
        noise_sigma: standard deviation of the noise; positive.
        max_episode_length: number of steps after which an episode is truncated; at least 1.

    Raises:
        ArgumentError: an argument is out of range.
    """

    def __init__(self, noise_sigma: float = 0.1, max_episode_length: int = 200) -> None:
        super().__init__(max_episode_length)
        self.noise_sigma = check_sigma(noise_sigma)

"""MultiarmedBandit: find the arm that pays best."""

from __future__ import annotations

from typing import Any

from recurl.envs.tasks.dynamics import Dynamics, State, check_count
from recurl.envs.tasks.namespaces import Draw, Namespace
from recurl.envs.tasks.popgym.cards import entry_at, one_hot, one_hot_space, score


class MultiarmedBandit(Dynamics):
    """Pull arms that pay with different probabilities, redrawn in every episode.

    POPGym's MultiarmedBandit. Observation: whether the last arm paid, one-hot `[2]` (not paid at the beginning),
    without its index. Action: an arm. Reward: `1 / step_limit` if it pays, otherwise `-1 / step_limit`. Never
    terminated.

    The probabilities are uniform in [0, 1), in float64; the package draws them in float32.

    State: `arms`, float64 `[arms, rows]`, the probabilities; `luck`, float64 `[step_limit, rows]`: an arm whose
    probability is larger pays at that step; `paid`, bool `[rows]`.

    Args:
        num_bandits: number of arms; at least 2.
        episode_length: number of steps of an episode; at least 1.

    Raises:
        ArgumentError: an argument is out of range.
    """

    def __init__(self, num_bandits: int = 10, episode_length: int = 200) -> None:
        self.num_bandits = check_count("num_bandits", num_bandits, minimum=2)
        limit = check_count("episode_length", episode_length, minimum=1)
        super().__init__(observation_space=one_hot_space(2), actions=num_bandits, step_limit=limit)

    def begin(self, xp: Namespace, draw: Draw) -> State:
        """Draw the arms' probabilities, and the random number that decides each step."""
        arms = draw.uniform(0.0, 1.0, (self.num_bandits,))
        paid = xp.zeros((arms.shape[1],), dtype=xp.bool)
        return {"arms": arms, "luck": draw.uniform(0.0, 1.0, (self.step_limit,)), "paid": paid}

    def advance(self, xp: Namespace, state: State, steps: Any, actions: Any) -> tuple[State, Any, Any]:
        """Pull an arm."""
        paid = entry_at(xp, state["luck"], steps) < xp.pick(state["arms"], actions)
        never = xp.zeros((len(paid),), dtype=xp.bool)
        return {**state, "paid": paid}, score(xp, paid, 1 / self.step_limit), never

    def observe(self, xp: Namespace, state: State, steps: Any) -> Any:
        """Return whether the arm paid."""
        return one_hot(xp, (state["paid"],), (2,))

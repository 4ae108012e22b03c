"""Bandit: find the arm that pays, from previous actions and rewards only."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode

from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.envs.tasks.base import TaskEnv, TaskVectorEnv
from recurl.envs.tasks.drawing import GREEN, GREY, Canvas, Frame
from recurl.envs.tasks.dynamics import Dynamics, State, check_count
from recurl.envs.tasks.namespaces import Draw, Namespace

_MAX_WORK = 2_000_000  # belief-arm pairs evaluated: about a second


class Bandit(Dynamics):
    """Dynamics of `recurl/Bandit-v0`: see `BanditVectorEnv`.

    State: `good`, the arm that pays, int64 `[rows]`; `draws`, float64 `[pulls + 1, rows]`: an arm pays if its
    probability is above the draw.

    Args:
        num_arms: number of arms; at least 2.
        pulls: number of steps of an episode; at least 1.
        probability: probability that the good arm pays, above 0.5 and at most 1.

    Raises:
        ArgumentError: an argument is out of range.
    """

    def __init__(self, num_arms: int = 4, pulls: int = 20, probability: float = 0.9) -> None:
        self.num_arms = check_count("num_arms", num_arms, minimum=2)
        check_count("pulls", pulls, minimum=1)
        if not 0.5 < probability <= 1:
            raise ArgumentError(f"probability must be above 0.5 and at most 1; got {probability!r}")
        super().__init__(observation_space=Box(0.0, 1.0, (1,), np.float32), actions=num_arms, step_limit=pulls)
        self.probability = probability

    def begin(self, xp: Namespace, draw: Draw) -> State:
        """Draw the good arm, and the random number that decides each pull."""
        return {"good": draw.integers(self.num_arms), "draws": draw.uniform(0.0, 1.0, (self.step_limit + 1,))}

    def advance(self, xp: Namespace, state: State, steps: Any, actions: Any) -> tuple[State, Any, Any]:
        """Pull an arm."""
        chance = xp.where(actions == state["good"], self.probability, 1 - self.probability)
        paid = xp.pick(state["draws"], steps) < chance
        return state, xp.astype(paid, xp.float64), xp.zeros(len(paid), dtype=xp.bool)

    def observe(self, xp: Namespace, state: State, steps: Any) -> Any:
        """Return an uninformative observation, 0."""
        return xp.zeros((len(steps), 1), dtype=xp.float32)


class BanditVectorEnv(TaskVectorEnv):
    """Find the arm that pays (`recurl/Bandit-v0`, vectorized).

    A Bernoulli bandit with one good arm, redrawn in each episode: the task of RL2 (Duan et al., 2016, "RL2: Fast
    Reinforcement Learning via Slow Reinforcement Learning"). The observation is uninformative, so an agent needs its
    previous action and reward as inputs (`--previous-action --previous-reward`), and a memory for them.

    Observation: 0, float32 `[1]`. Action: the arm to pull, `Discrete(num_arms)`. Reward: 1 with probability
    `probability` from the good arm and `1 - probability` from the others, else 0. The good arm is uniform.
    Episode: truncated after `pulls` steps, never terminated.

    Optimal return: that of pulling the arm that is most likely the good one, which is optimal with one good arm
    (Rodman, 1978, "On the many armed bandit problem"). `optimal_return` computes it exactly.

    Best memoryless return: `pulls * (probability + (num_arms - 1) * (1 - probability)) / num_arms`, as any arm is the
    good one with probability `1 / num_arms`. An agent with memory but without rewards as inputs does no better.

    Args:
        num_envs: number of rows.
        num_arms: number of arms; at least 2.
        pulls: number of steps of an episode; at least 1.
        probability: probability that the good arm pays, above 0.5 and at most 1.
        autoreset_mode: see `TaskVectorEnv`.

    Raises:
        ArgumentError: an argument is out of range.

    Example:
        >>> env = BanditVectorEnv(2, num_arms=2, pulls=3, probability=1.0)
        >>> _, _ = env.reset(seed=0)
        >>> _, reward, _, _, _ = env.step([0, 0])
        >>> _, other, _, _, _ = env.step([1, 1])
        >>> reward + other
        array([1., 1.])
    """

    def __init__(
        self,
        num_envs: int = 1,
        num_arms: int = 4,
        pulls: int = 20,
        probability: float = 0.9,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    ) -> None:
        self._task = Bandit(num_arms, pulls, probability)
        super().__init__(self._task, num_envs, autoreset_mode)

    def draw(self, row: int) -> Frame:
        """Return an image of the arms, with the one that pays in green, and a progress bar of the episode."""
        canvas = Canvas(300, 100)
        cell = 280 / self._task.num_arms
        for arm in range(self._task.num_arms):
            left = 10 + arm * cell
            color = GREEN if arm == self.state["good"][row] else GREY
            canvas.rectangle((left, 10), (left + 0.8 * cell, 80), color)
        canvas.rectangle((10, 86), (10 + 280 * self._steps[row] / self._task.step_limit, 92), GREY)
        return canvas.pixels

    @staticmethod
    def optimal_return(num_arms: int = 4, pulls: int = 20, probability: float = 0.9) -> float:
        """Return the expected return of the best policy that remembers actions and rewards.

        Raises:
            UnsupportedError: the computation would take longer than about a second, due to many arms and pulls.

        Example:
            >>> round(BanditVectorEnv.optimal_return(num_arms=2, pulls=2, probability=1.0), 6)
            1.5
        """
        # Sufficient statistic of the past: each arm's number of rewards minus its number of blanks, sorted over arms.
        total, work = 0.0, 0
        beliefs: dict[tuple[int, ...], float] = {(0,) * min(num_arms, _MAX_WORK): 1.0}
        for _ in range(pulls):
            work += len(beliefs) * num_arms
            if work > _MAX_WORK:
                raise UnsupportedError(
                    f"The optimal return of {num_arms} arms and {pulls} pulls takes too long to compute."
                )
            after: dict[tuple[int, ...], float] = defaultdict(float)
            for (best, *others), weight in beliefs.items():
                chance = _payoff_probability(best, others, probability)
                total += weight * chance
                for lead, part in ((best + 1, chance), (best - 1, 1 - chance)):
                    if part:
                        after[tuple(sorted((lead, *others), reverse=True))] += weight * part
            beliefs = after
        return total

    @staticmethod
    def memoryless_return(num_arms: int = 4, pulls: int = 20, probability: float = 0.9) -> float:
        """Return the expected return of any policy without access to its past rewards.

        Example:
            >>> round(BanditVectorEnv.memoryless_return(num_arms=4, pulls=20, probability=0.9), 6)
            6.0
        """
        return pulls * (probability + (num_arms - 1) * (1 - probability)) / num_arms


def _payoff_probability(lead: int, others: list[int], probability: float) -> float:
    """Return the probability that an arm pays, given its lead of rewards over blanks and those of the others."""
    blank = 1 - probability
    if blank == 0:
        good = float(lead > 0) if lead else 1 / (1 + others.count(0))
    else:
        good = 1 / (1 + sum((probability / blank) ** (other - lead) for other in others))
    return good * probability + (1 - good) * blank


class BanditEnv(TaskEnv):
    """Find the arm that pays (`recurl/Bandit-v0`): one row of `BanditVectorEnv`, which has the details.

    Args:
        num_arms: number of arms; at least 2.
        pulls: number of steps of an episode; at least 1.
        probability: probability that the good arm pays, above 0.5 and at most 1.
        render_mode: see `TaskEnv`.

    Example:
        >>> env = BanditEnv(num_arms=2, pulls=1)
        >>> env.reset(seed=0)[0], env.step(0)[3]
        (array([0.], dtype=float32), True)
    """

    def __init__(
        self, num_arms: int = 4, pulls: int = 20, probability: float = 0.9, render_mode: str | None = None
    ) -> None:
        super().__init__(BanditVectorEnv(1, num_arms, pulls, probability, AutoresetMode.DISABLED), render_mode)

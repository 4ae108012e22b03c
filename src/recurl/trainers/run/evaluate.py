"""Greedy evaluation: returns and lengths of episodes, hidden states carried and reset as in training."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, pstdev

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from recurl.envs import EnvBase, StepCounter, TransformedEnv, interact
from recurl.errors import ArgumentError, NonFiniteError
from recurl.keys import DONE, NEXT, REWARD, TERMINATED, NestedKey
from recurl.mode import ExplorationType, set_exploration_type
from recurl.trainers.optim.finite import all_finite

MOST_STEPS = 27_000
"""Steps of an episode before an evaluation cuts it: those that evaluations on Atari allow."""


@dataclass(frozen=True)
class Evaluation:
    """Returns and lengths of greedy episodes.

    Example:
        >>> print(Evaluation([1.0, 3.0], [10, 20]))
        Greedy evaluation over 2 episodes: return 2 (standard deviation 1, from 1 to 3), length 15
    """

    returns: list[float]
    """Undiscounted return of each episode."""
    lengths: list[int]
    """Steps of each episode."""
    cut: int = 0
    """Episodes that had not ended after ``max_steps`` and were cut there."""
    max_steps: int = MOST_STEPS
    """The bound."""

    @property
    def mean_return(self) -> float:
        """Mean return over the episodes."""
        return fmean(self.returns)

    def __str__(self) -> str:
        spread = f"standard deviation {pstdev(self.returns):.4g}, from {min(self.returns):.4g}"
        text = (
            f"Greedy evaluation over {len(self.returns)} episodes: return {self.mean_return:.4g} "
            f"({spread} to {max(self.returns):.4g}), length {fmean(self.lengths):.4g}"
        )
        if self.cut:
            text += f"; {self.cut} of {len(self.returns)} episodes were cut after {self.max_steps:,} steps"
        return text


class _Scores:
    """Collects the same number of episodes from every environment, so that short ones don't weigh more.

    Args:
        quota: episodes of each environment.
        observations: keys of the observations.
        max_steps: most steps of an episode.
        progress: called after every step with the episodes that have ended and the steps made.
    """

    def __init__(
        self, quota: list[int], observations: list[NestedKey], max_steps: int, progress: Callable[[int, int], None]
    ) -> None:
        self._left = quota
        self._return = [0.0] * len(quota)
        self._length = [0] * len(quota)
        self._observations = observations
        self._max_steps = max_steps
        self._progress = progress
        self.returns: list[float] = []
        self.lengths: list[int] = []
        self.cut = 0

    def write(self, step: int, tensordict: TensorDictBase) -> None:
        after = tensordict[NEXT]
        rewards = after[REWARD].flatten().tolist()
        dones, ends = (after[key].flatten().tolist() for key in (DONE, TERMINATED))
        if not all(map(math.isfinite, rewards)):
            self._refuse("a reward", step)
        if not all_finite([after[key] for key in self._observations]):
            self._refuse("an observation", step)
        for row, (reward, done, end) in enumerate(zip(rewards, dones, ends, strict=True)):
            self._return[row] += reward
            self._length[row] += 1
            if done:
                self._finish(row, ended=end)
        self._progress(len(self.returns), (step + 1) * len(rewards))

    def _refuse(self, what: str, step: int) -> None:
        raise NonFiniteError(
            f"The environment must give finite numbers, but {what} at step {step} of the evaluation isn't: "
            "mend the environment."
        )

    def _finish(self, row: int, *, ended: bool) -> None:
        if self._left[row]:
            self._left[row] -= 1
            self.returns.append(self._return[row])
            self.lengths.append(self._length[row])
            self.cut += self._length[row] == self._max_steps and not ended
        self._return[row], self._length[row] = 0.0, 0

    def complete(self, tensordict: TensorDictBase) -> bool:
        return not any(self._left)


def evaluate_policy(
    policy: TensorDictModuleBase,
    env: EnvBase,
    *,
    episodes: int,
    max_steps: int = MOST_STEPS,
    progress: Callable[[int, int], None] = lambda done, steps: None,
) -> Evaluation:
    """Play greedy episodes.

    Args:
        policy: the actor; its hidden states must be declared by the environment.
        env: environments ``[B]``, seeded; each plays the same number of episodes, or one more.
        episodes: how many episodes count.
        max_steps: an episode that goes on after so many is cut, and counts with what it has reached.
        progress: called after every step with the number of episodes that have ended, and of steps made.

    Raises:
        ArgumentError: ``episodes`` or ``max_steps`` is not positive.
        NonFiniteError: a reward or an observation isn't finite.
    """
    check_bounds(episodes, max_steps)
    rows = env.batch_size.numel()
    observations = list(env.observation_spec.keys(True, True))
    quota = [episodes // rows + (row < episodes % rows) for row in range(rows)]
    scores = _Scores(quota, observations, max_steps, progress)
    bounded = TransformedEnv(env, StepCounter(max_steps, step_count_key="evaluation_step"))
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        interact(bounded, policy, bounded.reset(), sys.maxsize, write=scores.write, stop=scores.complete)
    return Evaluation(scores.returns, scores.lengths, scores.cut, max_steps)


def check_bounds(episodes: int, max_steps: int) -> None:
    """Refuse numbers of episodes or steps that are not positive.

    Raises:
        ArgumentError: one isn't.
    """
    if episodes <= 0:
        raise ArgumentError(f"--episodes must be positive, got {episodes}.")
    if max_steps <= 0:
        raise ArgumentError(f"--max-steps must be positive, got {max_steps}.")

"""Evaluation: returns and lengths of episodes, with hidden states carried and reset as in training."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from tensordict.nn import TensorDictModuleBase

from recurl.core.errors import ArgumentError, NonFiniteError
from recurl.core.keys import ACTION, AGENT_MASK, DONE, DONE_KEYS, IS_INIT, NEXT, REWARD, TERMINATED, NestedKey, next_key
from recurl.core.seeding import derive_seed
from recurl.core.specs import has_real_part
from recurl.data.replay_buffers.folders import fresh_folder, seal_folder
from recurl.envs import EnvBase, StepCounter, TransformedEnv, interact
from recurl.sequences.mode import ExplorationType, set_exploration_type
from recurl.trainers.files.durable import writing
from recurl.trainers.optim.finite import all_finite
from recurl.trainers.run.motion import MOTION, real_action

MOST_STEPS = 27_000
"""Default step limit of evaluation episodes, the one commonly used on Atari."""
CONFIDENCE = 0.95
"""Confidence level of the intervals."""
RESAMPLES = 10_000
"""Number of bootstrap resamples."""
_MOST_AT_ONCE = 1_000_000  # indices drawn at once, to bound memory


@dataclass(frozen=True)
class Evaluation:
    """Returns and lengths of episodes.

    Example:
        >>> print(Evaluation([1.0, 3.0], [10, 20]))
        Greedy evaluation over 2 episodes: return 2 (95% interval 1 to 3, standard deviation 1, from 1 to 3), length 15
    """

    returns: list[float]
    """Undiscounted return of each episode."""
    lengths: list[int]
    """Steps of each episode."""
    cut: int = 0
    """Number of episodes cut off after ``max_steps``."""
    max_steps: int = MOST_STEPS
    """Step limit of an episode."""
    deterministic: bool = True
    """Whether the policy took greedy actions rather than acting as in training."""
    motion: tuple[float, ...] | None = None
    """Mean absolute first and second differences of real-valued actions within these episodes; None for others,
    or if no episode has two steps."""

    @property
    def mean_return(self) -> float:
        """Mean return over the episodes."""
        return fmean(self.returns)

    @property
    def title(self) -> str:
        """Description of the evaluation."""
        kind = "Greedy" if self.deterministic else "Stochastic"
        return f"{kind} evaluation over {len(self.returns)} episodes"

    @property
    def remark(self) -> str:
        """Note on the number of episodes cut off; empty if there were none."""
        total = len(self.returns)
        return f"{self.cut} of {total} episodes were cut after {self.max_steps:,} steps" if self.cut else ""

    def to_dict(self) -> dict[str, Any]:
        """Return all results and their statistics as plain values."""
        return {
            "deterministic": self.deterministic,
            "episodes": len(self.returns),
            "return": _statistics(self.returns),
            "length": _statistics(self.lengths),
            "interval": {
                "confidence": CONFIDENCE,
                "method": "percentile bootstrap of the mean",
                "resamples": RESAMPLES,
            },
            **({} if self.motion is None else dict(zip(MOTION, self.motion, strict=True))),
            "cut": self.cut,
            "max_steps": self.max_steps,
            "returns": self.returns,
            "lengths": self.lengths,
        }

    def __str__(self) -> str:
        low, high = bootstrap_interval(self.returns)
        spread = (
            f"standard deviation {pstdev(self.returns):.4g}, from {min(self.returns):.4g} to {max(self.returns):.4g}"
        )
        interval = f"{CONFIDENCE:.0%} interval {low:.4g} to {high:.4g}"
        text = f"{self.title}: return {self.mean_return:.4g} ({interval}, {spread}), length {fmean(self.lengths):.4g}"
        if self.motion is not None:
            text = f"{text}, action rate {self.motion[0]:.4g}"
        return f"{text}; {self.remark}" if self.cut else text


def _statistics(values: Sequence[float]) -> dict[str, Any]:
    return {
        "mean": fmean(values),
        "interval": list(bootstrap_interval(values)),
        "std": pstdev(values),
        "min": min(values),
        "max": max(values),
    }


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95% percentile bootstrap interval of the mean; deterministic for given values.

    Source: Efron, "Nonparametric standard errors and confidence intervals" (1981).

    Args:
        values: independent samples, at least one; for a single sample the interval has zero width.

    Example:
        >>> low, high = bootstrap_interval([1.0, 2.0, 3.0, 4.0])
        >>> low, high
        (1.5, 3.5)
    """
    found, draw = np.asarray(values, np.float64), np.random.default_rng(derive_seed(0, "bootstrap"))
    rows = max(1, min(RESAMPLES, _MOST_AT_ONCE // found.size))
    means = [
        found[draw.integers(found.size, size=(min(rows, RESAMPLES - done), found.size))].mean(1)
        for done in range(0, RESAMPLES, rows)
    ]
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(np.concatenate(means), [tail, 100 - tail]).tolist()
    return low, high


class _EpisodeRecorder:
    """Recorder of a fixed number of episodes per environment, so that short episodes aren't overrepresented.

    Args:
        quota: number of episodes of each environment.
        observations: keys of the observations.
        states: keys of the hidden states of the policy.
        max_steps: step limit of an episode.
        progress: called after every step with the numbers of finished episodes and of steps.
        kept: keys of the entries of every step to keep; none are kept when empty.
        moves: whether actions are real-valued.
    """

    def __init__(
        self,
        quota: list[int],
        observations: list[NestedKey],
        states: list[NestedKey],
        max_steps: int,
        progress: Callable[[int, int], None],
        kept: Sequence[NestedKey] = (),
        *,
        moves: bool,
    ) -> None:
        self._left = quota
        self._return = [0.0] * len(quota)
        self._length = [0] * len(quota)
        self._absent = [0] * len(quota)  # steps for which each row has waited for its agent
        self._observations, self._states = observations, states
        self._max_steps = max_steps
        self._progress = progress
        self._kept = kept
        self._steps: list[TensorDictBase] = []
        self._counts: list[list[bool]] = []  # whether the episodes of the rows count, by step
        self.returns: list[float] = []
        self.lengths: list[int] = []
        self.cut = 0
        self._motion = _Motion(len(quota)) if moves else None

    @property
    def motion(self) -> tuple[float, ...] | None:
        means = (math.nan,) if self._motion is None else self._motion.means
        return None if math.isnan(means[0]) else means

    def write(self, step: int, tensordict: TensorDictBase) -> None:
        after = tensordict[NEXT]
        rewards = after[REWARD].flatten().tolist()
        dones, ends = (after[key].flatten().tolist() for key in (DONE, TERMINATED))
        if not all(map(math.isfinite, rewards)):
            raise _faulty("environment", "a reward", step, "fix the environment")
        if not all_finite([after[key] for key in (*self._observations, *self._states)]):
            if not all_finite([after[key] for key in self._observations]):
                raise _faulty("environment", "an observation", step, "fix the environment")
            raise _faulty("policy", "a hidden state", step, "train it with a lower --learning-rate, or another --cell")
        mask = tensordict.get(AGENT_MASK, None)
        present = [True] * len(dones) if mask is None else mask.flatten().tolist()
        self._absent = [0 if here else steps + 1 for here, steps in zip(present, self._absent, strict=True)]
        self._left = [
            left if steps <= self._max_steps else 0 for left, steps in zip(self._left, self._absent, strict=True)
        ]
        counted = [left > 0 and here for left, here in zip(self._left, present, strict=True)]
        if self._kept:
            self._steps.append(tensordict.select(*self._kept))
            self._counts.append(counted)
        if self._motion is not None:
            counts = np.array(counted)
            self._motion.add(real_action(tensordict.reshape(-1)).double().cpu().numpy(), np.array(self._length), counts)
        for row, (reward, done, end) in enumerate(zip(rewards, dones, ends, strict=True)):
            self._return[row] += reward
            self._length[row] += 1
            if done:
                self._finish(row, ended=end, counts=counted[row])
        self._progress(len(self.returns), (step + 1) * len(rewards))

    def _finish(self, row: int, *, ended: bool, counts: bool) -> None:
        if counts:
            self._left[row] -= 1
            self.returns.append(self._return[row])
            self.lengths.append(self._length[row])
            self.cut += self._length[row] == self._max_steps and not ended
        self._return[row], self._length[row] = 0.0, 0

    def complete(self, tensordict: TensorDictBase) -> bool:
        return not any(self._left)

    def steps(self) -> TensorDict:
        """Return the kept entries of the steps of all episodes that count, one episode after another, ``[N]``."""
        batch = cast(TensorDict, lazy_stack(self._steps, 1).contiguous())
        return batch.reshape(-1)[torch.tensor(self._counts, device=batch.device).T.reshape(-1)]


def _faulty(source: str, what: str, step: int, remedy: str) -> NonFiniteError:
    return NonFiniteError(
        f"The {source} must return finite numbers, but {what} at step {step} of the evaluation isn't: {remedy}."
    )


class _Motion:
    """Mean absolute first and second differences of actions within episodes.

    Args:
        rows: number of environments.
    """

    def __init__(self, rows: int) -> None:
        self._before: np.ndarray[Any, Any] = np.zeros((2, rows, 1))  # the last action and the difference before it
        self._sums, self._counts = [0.0] * len(MOTION), [0] * len(MOTION)

    def add(self, actions: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any], counts: np.ndarray[Any, Any]) -> None:
        """Add a step: actions ``[rows, n]``, steps of the episodes before it ``[rows]``, and which rows count."""
        last, change = self._before
        now = actions - last
        for order, difference in enumerate((now, now - change)):
            at = counts & (lengths > order)
            self._sums[order] += float(np.abs(difference[at]).mean(-1).sum()) if at.any() else 0.0
            self._counts[order] += int(at.sum())
        self._before = np.stack((actions, now))

    @property
    def means(self) -> tuple[float, ...]:
        """The means; NaN without steps to compare."""
        found = zip(self._sums, self._counts, strict=True)
        return tuple(total / count if count else math.nan for total, count in found)


def evaluate_policy(
    policy: TensorDictModuleBase,
    env: EnvBase,
    *,
    episodes: int,
    max_steps: int = MOST_STEPS,
    progress: Callable[[int, int], None] = lambda done, steps: None,
    deterministic: bool = True,
    save_episodes: Path | None = None,
) -> Evaluation:
    """Evaluate a policy.

    Args:
        policy: the actor or the collection policy; the environment must declare its hidden states.
        env: seeded environments ``[B]``; their numbers of episodes differ by at most one.
        episodes: number of episodes.
        max_steps: step limit of an episode; longer episodes are cut off and count with their return so far.
        progress: called after every step with the numbers of finished episodes and of steps.
        deterministic: take greedy actions; otherwise act as in training, with torch's global random generator.
        save_episodes: new folder to save the episodes to, as a memory-mapped TensorDict ``[N]`` of their steps, one
            episode after another: observations as the policy saw them, ``action``, and under ``"next"`` the reward and
            the done flags. They are kept in memory until all have ended.

    Raises:
        ArgumentError: if ``episodes`` or ``max_steps`` is not positive, or ``save_episodes`` isn't new.
        NonFiniteError: if a reward, an observation or a hidden state isn't finite.
        StorageError: if the episodes can't be written.
    """
    check_bounds(episodes, max_steps)
    check_new_folder(save_episodes)
    rows = env.batch_size.numel()
    states = list(env.state_spec.keys(True, True))
    observations = [key for key in env.observation_spec.keys(True, True) if key not in states]
    quota = [episodes // rows + (row < episodes % rows) for row in range(rows)]
    moves = has_real_part(env.action_spec_unbatched)
    kept = _kept(env) if save_episodes is not None else ()
    scores = _EpisodeRecorder(quota, observations, states, max_steps, progress, kept, moves=moves)
    bounded = TransformedEnv(env, StepCounter(max_steps, step_count_key="evaluation_step"))
    with set_exploration_type(ExplorationType.DETERMINISTIC if deterministic else ExplorationType.RANDOM):
        interact(bounded, policy, bounded.reset(), sys.maxsize, write=scores.write, stop=scores.complete)
    if save_episodes is not None:
        with writing(save_episodes), fresh_folder(save_episodes) as folder:
            scores.steps().memmap(folder)
            seal_folder(folder, {"episodes": len(scores.returns)})
    return Evaluation(scores.returns, scores.lengths, scores.cut, max_steps, deterministic, scores.motion)


def check_bounds(episodes: int, max_steps: int) -> None:
    """Check that the numbers of episodes and steps are positive.

    Raises:
        ArgumentError: if one isn't.
    """
    if episodes <= 0:
        raise ArgumentError(f"--episodes must be positive, got {episodes}.")
    if max_steps <= 0:
        raise ArgumentError(f"--max-steps must be positive, got {max_steps}.")


def check_new_folder(path: Path | None) -> None:
    """Check that the folder for saved episodes, if any, is new or empty.

    Raises:
        ArgumentError: if it isn't.
    """
    if path is not None and path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ArgumentError(f"--save-episodes needs a new or an empty folder, and {path} isn't: name another.")


def _kept(env: EnvBase) -> list[NestedKey]:
    """Return the keys of the entries of recorded steps, without the states of a policy."""
    seen = [key for key in env.observation_spec.keys(True, True) if key != IS_INIT and key not in env.state_spec]
    return [*seen, ACTION, *(next_key(key) for key in (REWARD, *DONE_KEYS))]

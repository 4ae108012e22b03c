"""Greedy evaluation: how good is a policy, hidden state carried and reset as in training."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from statistics import fmean, pstdev

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from recurl.envs import EnvBase, interact
from recurl.errors import ArgumentError
from recurl.keys import DONE, NEXT, REWARD
from recurl.mode import ExplorationType, set_exploration_type
from recurl.trainers.algorithms import RunAgent, make_agent
from recurl.trainers.checkpoint import latest_checkpoint, load_checkpoint
from recurl.trainers.config import RunConfig
from recurl.trainers.environment import make_env
from recurl.trainers.run_folder import RunFolder

_SIDE_BY_SIDE = 50
_FRESH = 1_000_003


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

    @property
    def mean_return(self) -> float:
        """Mean return over the episodes."""
        return fmean(self.returns)

    def __str__(self) -> str:
        spread = f"standard deviation {pstdev(self.returns):.4g}, from {min(self.returns):.4g}"
        return (
            f"Greedy evaluation over {len(self.returns)} episodes: return {self.mean_return:.4g} "
            f"({spread} to {max(self.returns):.4g}), length {fmean(self.lengths):.4g}"
        )


class _Scores:
    """Counts the same number of episodes from every environment, so that short ones don't weigh more."""

    def __init__(self, quota: list[int]) -> None:
        self._left = quota
        self._return = [0.0] * len(quota)
        self._length = [0] * len(quota)
        self.returns: list[float] = []
        self.lengths: list[int] = []

    def write(self, step: int, tensordict: TensorDictBase) -> None:
        rewards = tensordict[NEXT, REWARD].flatten().tolist()
        dones = tensordict[NEXT, DONE].flatten().tolist()
        for row, (reward, done) in enumerate(zip(rewards, dones, strict=True)):
            self._return[row] += reward
            self._length[row] += 1
            if done:
                self._finish(row)

    def _finish(self, row: int) -> None:
        if self._left[row]:
            self._left[row] -= 1
            self.returns.append(self._return[row])
            self.lengths.append(self._length[row])
        self._return[row], self._length[row] = 0.0, 0

    def complete(self, tensordict: TensorDictBase) -> bool:
        return not any(self._left)


def evaluate_policy(policy: TensorDictModuleBase, env: EnvBase, *, episodes: int) -> Evaluation:
    """Play greedy episodes.

    Args:
        policy: the actor; its hidden states must be declared by the environment.
        env: environments ``[B]``, seeded; each plays the same number of episodes, or one more.
        episodes: how many episodes count.

    Raises:
        ArgumentError: ``episodes`` is not positive.
    """
    if episodes <= 0:
        raise ArgumentError(f"--episodes must be positive, got {episodes}.")
    rows = env.batch_size.numel()
    scores = _Scores([episodes // rows + (row < episodes % rows) for row in range(rows)])
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        interact(env, policy, env.reset(), sys.maxsize, write=scores.write, stop=scores.complete)
    return Evaluation(scores.returns, scores.lengths)


def load_agent(folder: RunFolder, *, on_cpu: bool = False) -> tuple[RunConfig, RunAgent]:
    """Return the options of a run, and its networks as of the newest checkpoint.

    Args:
        folder: the run.
        on_cpu: put them on the CPU, wherever they were trained.

    Raises:
        ArgumentError: the run has no checkpoint, or it can't be read or doesn't fit.
    """
    config = folder.read_config()
    config = config.on_cpu() if on_cpu else config
    state = load_checkpoint(latest_checkpoint(folder.checkpoints))
    with make_env(config, 1) as plain:
        agent = make_agent(config, plain)
    try:
        agent.load_state_dict(state["algorithm"]["agent"])
    except (RuntimeError, KeyError) as error:
        raise ArgumentError(f"The checkpoint doesn't fit {folder.config}: {error}") from error
    return config, agent


def evaluate_run(folder: RunFolder, *, episodes: int, seed: int | None = None) -> Evaluation:
    """Play greedy episodes with the newest checkpoint of a run.

    Args:
        folder: the run.
        episodes: how many episodes.
        seed: of the environments; by default one that training did not use.

    Raises:
        ArgumentError: the run has no checkpoint, it can't be read or doesn't fit, or ``episodes`` is not positive.
    """
    if episodes <= 0:
        raise ArgumentError(f"--episodes must be positive, got {episodes}.")
    config, agent = load_agent(folder)
    torch.set_num_threads(config.threads)
    with make_env(config, min(episodes, _SIDE_BY_SIDE), policy=agent.actor) as env:
        env.set_seed(config.seed + _FRESH if seed is None else seed)
        return evaluate_policy(agent.actor, env, episodes=episodes)

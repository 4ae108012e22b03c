"""Trained policies: loaded from the newest checkpoint of a run, and evaluated."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import torch

from recurl.trainers.algorithms.environment import make_env
from recurl.trainers.algorithms.table import make_agent
from recurl.trainers.config import RunConfig
from recurl.trainers.files.checkpoints import fitting, load_newest
from recurl.trainers.networks.agent import Agent
from recurl.trainers.optim.finite import check_finite
from recurl.trainers.report.evaluation_display import EvaluationDisplay
from recurl.trainers.run.evaluate import Evaluation, check_bounds, evaluate_policy
from recurl.trainers.run.folder import RunFolder
from recurl.trainers.run.periodic import SIDE_BY_SIDE

if TYPE_CHECKING:
    from rich.console import Console

_FRESH = 1_000_003


def load_agent(folder: RunFolder, *, on_cpu: bool = False) -> tuple[RunConfig, Agent]:
    """Return the options of a run, and its networks as of the newest checkpoint.

    Args:
        folder: the run.
        on_cpu: put them on the CPU, wherever they were trained.

    Raises:
        ArgumentError: the run has no checkpoint, or it can't be read or doesn't fit.
        NonFiniteError: the policy isn't finite.
    """
    config = folder.read_config()
    config = config.on_cpu() if on_cpu else config
    path, state = load_newest(folder.checkpoints, folder.notify)
    with make_env(config, 1) as plain:
        agent = make_agent(config, plain)
    with fitting(path):
        agent.load_state_dict(state["algorithm"]["agent"])
    check_finite(agent.state_dict(), f"the policy in {path}")
    return config, agent


def evaluate_run(
    folder: RunFolder,
    *,
    episodes: int,
    seed: int | None = None,
    max_steps: int | None = None,
    console: Console | None = None,
) -> Evaluation:
    """Play greedy episodes with the newest checkpoint of a run.

    Args:
        folder: the run.
        episodes: how many episodes.
        seed: of the environments; by default one that training did not use.
        max_steps: an episode that goes on after so many is cut; by default the run's ``eval_max_steps``.
        console: where progress is shown, if it takes seconds.

    Raises:
        ArgumentError: the run has no checkpoint, it can't be read or doesn't fit, or a number is not positive.
        NonFiniteError: the policy, a reward or an observation isn't finite.
    """
    check_bounds(episodes, 1 if max_steps is None else max_steps)
    config, agent = load_agent(folder)
    torch.set_num_threads(config.threads)
    with (
        make_env(config.for_evaluation(), min(episodes, SIDE_BY_SIDE), policy=agent.actor) as env,
        closing(EvaluationDisplay(console, episodes)) as display,
    ):
        env.set_seed(config.seed + _FRESH if seed is None else seed)
        most = config.eval_max_steps if max_steps is None else max_steps
        return evaluate_policy(agent.actor, env, episodes=episodes, max_steps=most, progress=display.update)

"""Loading and evaluating the trained policy of a run."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from recurl.core.seeding import derive_seed, env_seed, preserved_rng
from recurl.trainers.algorithms.environment import make_env
from recurl.trainers.algorithms.table import make_agent
from recurl.trainers.config import RunConfig
from recurl.trainers.env_name import EnvSource
from recurl.trainers.files.checkpoints import restoring
from recurl.trainers.networks.agent import Agent
from recurl.trainers.optim.finite import check_finite
from recurl.trainers.report.evaluation_display import EvaluationDisplay
from recurl.trainers.run.evaluate import Evaluation, check_bounds, check_new_folder, evaluate_policy
from recurl.trainers.run.folder import RunFolder
from recurl.trainers.run.periodic import SIDE_BY_SIDE

if TYPE_CHECKING:
    from rich.console import Console


def load_agent(
    folder: RunFolder, *, on_cpu: bool = False, env: EnvSource | None = None, checkpoint: str = "newest"
) -> tuple[RunConfig, Agent]:
    """Return the options of a run and its networks, loaded from a checkpoint.

    Args:
        folder: the run.
        on_cpu: load the networks onto the CPU, regardless of the training device.
        env: see :meth:`RunFolder.read_config`; must be a function or an id, as new environments are created from it.
        checkpoint: ``"newest"``, or ``"best"`` for the one saved by ``recurl train --keep-best``.

    Raises:
        ArgumentError: if the run has no such checkpoint, or it can't be read or doesn't fit.
        NonFiniteError: if a parameter of the policy isn't finite.
    """
    config = folder.read_config(env)
    config = config.on_cpu() if on_cpu else config
    path, state = folder.read_checkpoint(checkpoint)
    with torch.random.fork_rng(devices=[]), make_env(config, 1) as plain:
        agent = make_agent(config, plain)  # initialized randomly, then overwritten
    with restoring(path):
        agent.load_state_dict(state["algorithm"]["agent"])
    check_finite(agent.state_dict(), f"the policy in {path}")
    return config, agent


def evaluate_run(
    folder: RunFolder,
    *,
    episodes: int,
    seed: int | None = None,
    max_steps: int | None = None,
    env: EnvSource | None = None,
    console: Console | None = None,
    checkpoint: str = "newest",
    deterministic: bool = True,
    save_episodes: Path | None = None,
) -> Evaluation:
    """Evaluate the policy of a run.

    Args:
        folder: the run.
        episodes: number of episodes.
        seed: seed of the environments and of sampled actions; by default one that training did not use.
        max_steps: step limit of an episode; by default the run's ``eval_max_steps``.
        env: see :func:`load_agent`.
        console: console for progress, shown if the evaluation takes seconds.
        checkpoint: ``"newest"``, or ``"best"`` for the one saved by ``recurl train --keep-best``.
        deterministic: take greedy actions; otherwise act as in training, by sampling or exploring.
        save_episodes: new folder to save the episodes to; see :func:`~recurl.trainers.evaluate_policy`.

    Raises:
        ArgumentError: if the run has no such checkpoint, it can't be read or doesn't fit, a number is not positive, or
            ``save_episodes`` isn't new.
        NonFiniteError: if a parameter or a hidden state of the policy, a reward or an observation isn't finite.
        StorageError: if the episodes can't be written.
    """
    check_bounds(episodes, 1 if max_steps is None else max_steps)
    check_new_folder(save_episodes)
    config, agent = load_agent(folder, env=env, checkpoint=checkpoint)
    torch.set_num_threads(config.threads)
    seed = env_seed(config.seed, "fresh") if seed is None else seed
    policy = agent.actor if deterministic else agent.policy
    with (
        make_env(config.for_evaluation(), min(episodes, SIDE_BY_SIDE), policy=policy) as envs,
        closing(EvaluationDisplay(console, episodes)) as display,
        preserved_rng(),
    ):
        envs.set_seed(seed)
        torch.manual_seed(derive_seed(seed, "actions"))
        return evaluate_policy(
            policy,
            envs,
            episodes=episodes,
            max_steps=config.eval_max_steps if max_steps is None else max_steps,
            progress=display.update,
            deterministic=deterministic,
            save_episodes=save_episodes,
        )

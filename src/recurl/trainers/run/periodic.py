"""Periodic evaluation during training: greedy, with separate environments and random numbers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import fmean, pstdev
from typing import Any

from recurl.core.errors import ArgumentError
from recurl.core.keys import is_within
from recurl.core.seeding import env_seed, preserved_rng, seed_everything
from recurl.core.specs import Composite
from recurl.distributed import broadcast, rank
from recurl.envs import EnvBase
from recurl.trainers.algorithms.environment import make_env
from recurl.trainers.config import RunConfig
from recurl.trainers.files.checkpoints import save_checkpoint
from recurl.trainers.networks.agent import Agent
from recurl.trainers.optim.finite import check_finite
from recurl.trainers.report.metrics import EVALUATION, Row
from recurl.trainers.run.evaluate import evaluate_policy
from recurl.trainers.run.folder import RunFolder
from recurl.trainers.run.motion import MOTION

SIDE_BY_SIDE = 50
"""Maximum number of parallel environments of an evaluation."""
EVALUATION_COLUMNS = (
    "update",
    "env_steps",
    EVALUATION,
    "eval_return_std",
    "eval_return_min",
    "eval_return_max",
    "eval_length",
    "eval_episodes",
    "eval_cut",
    "eval_s",
)
EVALUATED_MOTION = tuple(f"eval_{name}" for name in MOTION)
"""Further columns if actions are real-valued."""


class PeriodicEvaluation:
    """Evaluation of the policy at a fixed interval of environment steps and at the end, always on the same episodes.

    Training is not affected.

    Args:
        config: the options.
        agent: the networks.
        folder: the run folder, where the best policy is saved.

    Attributes:
        count: number of evaluations made.
        last: mean return of the last evaluation; None before the first.
        best: best mean return; None before the first.

    Raises:
        ArgumentError: if the environment can't be created, or its spaces differ from those of the training
            environment.
    """

    def __init__(self, config: RunConfig, agent: Agent, folder: RunFolder) -> None:
        self._config, self._agent, self._folder = config, agent, folder
        self.count = 0
        self.last: float | None = None
        self.best: float | None = None
        self._env = None
        with preserved_rng():
            evaluated = config.for_evaluation()
            if evaluated is not config:
                _check_spaces(config, evaluated)
            if config.eval_every is not None and rank() == 0:
                self._env = make_env(evaluated, min(config.eval_episodes, SIDE_BY_SIDE), policy=agent.actor)

    def due(self, before: int, now: int, *, last: bool = False) -> bool:
        """Return whether an evaluation is due after an update.

        Args:
            before: environment steps before the update.
            now: environment steps after the update.
            last: whether this is the last update of the run.
        """
        every = self._config.eval_every
        return every is not None and (last or now // every > before // every)

    def __call__(self, update: int, env_steps: int) -> Row:
        """Evaluate, save the policy if it is the best, and return the metrics. Rank 0 evaluates for all ranks."""
        row = {} if self._env is None else self._evaluate(self._env, update, env_steps)
        row, state = broadcast((row, self.state_dict()))
        self.load_state_dict(state)
        return row

    def _evaluate(self, env: EnvBase, update: int, env_steps: int) -> Row:
        config, start = self._config, time.perf_counter()
        with preserved_rng():
            seed_everything(config.seed, "evaluation")
            env.set_seed(env_seed(config.seed, "evaluation"))
            found = evaluate_policy(
                self._agent.actor, env, episodes=config.eval_episodes, max_steps=config.eval_max_steps
            )
        self.count += 1
        self.last = found.mean_return
        if self.best is None or self.last > self.best:
            self.best = self.last
            if config.keep_best:
                self._keep(env_steps)
        numbers = (
            update,
            env_steps,
            self.last,
            pstdev(found.returns),
            min(found.returns),
            max(found.returns),
            fmean(found.lengths),
            len(found.returns),
            found.cut,
            round(time.perf_counter() - start, 3),
        )
        motion = {} if found.motion is None else dict(zip(EVALUATED_MOTION, found.motion, strict=True))
        return {**dict(zip(EVALUATION_COLUMNS, numbers, strict=True)), **motion}

    def _keep(self, env_steps: int) -> None:
        agent = self._agent.state_dict()
        check_finite(agent, "the policy")
        state = {"config": self._config.to_dict(), "algorithm": {"agent": agent}, "eval_return": self.last}
        save_checkpoint(self._folder.best, env_steps, state, keep=1)

    @property
    def solved(self) -> bool:
        """Whether the last evaluation reached ``stop_eval_return``."""
        target = self._config.stop_eval_return
        return target is not None and self.last is not None and self.last >= target

    def close(self) -> None:
        """Close the environments."""
        if self._env is not None:
            self._env.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values."""
        return {"count": self.count, "last": self.last, "best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state returned by :meth:`state_dict`."""
        self.count, self.last, self.best = (state[name] for name in ("count", "last", "best"))


def _of_actor(config: RunConfig, env: EnvBase) -> Composite:
    """Return the spec of the observations without those that only a critic or a teacher sees."""
    private = config.private_observations
    spec = env.observation_spec
    leaves = spec.items(include_nested=True, leaves_only=True)
    kept = Composite(shape=spec.shape, device=spec.device)
    for key, leaf in leaves:
        if not is_within(key, private):
            kept.set(key, leaf)
    return kept


def _check_spaces(config: RunConfig, evaluated: RunConfig) -> None:
    with make_env(config, 1) as training, make_env(evaluated, 1) as other:
        pairs = {
            "observations": (_of_actor(config, training), _of_actor(config, other)),
            "actions": (training.action_spec_unbatched, other.action_spec_unbatched),
        }
        for what, (wanted, found) in pairs.items():
            if wanted != found:
                raise ArgumentError(
                    "The evaluation environment (--eval-env, --eval-env-kwargs) must have the same "
                    f"{what} as the training environment, {wanted}, got {found}."
                )

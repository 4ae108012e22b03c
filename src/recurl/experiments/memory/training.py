"""Training of one run of the memory benchmark, and its row of results."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from recurl._version import __version__
from recurl.core.versions import source_commit
from recurl.experiments.jobs import OnSpeed, train_in
from recurl.experiments.memory.sizes import equal_size
from recurl.experiments.memory.suites import SUITES, MemoryRun
from recurl.experiments.popgym.score import MaxMeanReturn
from recurl.trainers.algorithms.configs import PPOConfig
from recurl.trainers.run.folder import RunFolder
from recurl.trainers.run.load import evaluate_run
from recurl.trainers.run.outcome import Outcome
from recurl.trainers.run.trainer import Trainer

EPISODES = 100
"""Episodes of the greedy evaluation after a run."""
_size_of = cache(equal_size)  # of runs that differ in the seed


@dataclass(frozen=True, kw_only=True)
class MemoryResult:
    """Result of a finished run."""

    task: str
    cell: str
    options: str
    """Environment, its arguments, and the PPO options that differ from the defaults; the hidden size is that of the
    reference."""
    hidden_size: int
    """Hidden size with which the parameters are as many as those of the reference."""
    parameters: int
    """Parameters of the policy and its critic."""
    reference: int
    """Parameters of the policy of the reference, a GRU, and its critic."""
    seed: int
    steps: int
    """Steps asked for; those taken are a whole number of batches."""
    greedy: float
    """Mean return of 100 greedy episodes of the trained policy."""
    best: float
    """Maximum mean return of a window of training (MMER)."""
    mean: float
    """Mean return over all windows of training, the area under the learning curve."""
    episodes: int
    env_steps: int
    wall_s: float
    """Wall-clock seconds of the run, including setup and evaluation."""
    device: str
    versions: str
    commit: str
    """Commit of the checkout that trained the run; empty if recurl is installed otherwise."""
    date: str

    @property
    def key(self) -> tuple[Any, ...]:
        """Unique key: that of the run."""
        return self.task, self.cell, self.seed, self.steps, self.options

    @property
    def name(self) -> str:
        """The run, for messages."""
        return f"{self.task} {self.cell} seed {self.seed}"

    @property
    def difference(self) -> float:
        """Relative difference of the number of parameters from that of the reference."""
        return self.parameters / self.reference - 1

    def check(self) -> None:
        """Check the task and the numbers that are shown; raise ValueError if one is not valid."""
        if not any(self.task in tasks for tasks in SUITES.values()):
            raise ValueError(f"there is no task {self.task!r}")
        if not math.isfinite(self.greedy):
            raise ValueError(f"greedy must be finite, not {self.greedy}")
        for name, number in (("parameters", self.parameters), ("reference", self.reference)):
            if number <= 0:
                raise ValueError(f"{name} must be positive, not {number}")


class MemoryWork(NamedTuple):
    """What is done with each run; see :class:`~recurl.experiments.jobs.Work`."""

    folder: Path
    """Parent folder of the run folders."""
    device: str
    """Name of the device, for the results."""
    notify: Callable[[str], None]
    """Called with notices; must be a module-level function, since it is sent to workers."""

    def train(self, run: MemoryRun, on_speed: OnSpeed, should_stop: Callable[[], bool]) -> MemoryResult | None:
        """Choose the hidden size, train, evaluate, and return the result, or None if the run was stopped."""
        begin = time.perf_counter()
        size, reference = _size_of(replace(run.config, seed=0))
        config: PPOConfig = replace(run.config, hidden_size=size)
        score = MaxMeanReturn(config.num_envs)

        def finished(folder: RunFolder, trainer: Trainer, outcome: Outcome) -> MemoryResult:
            greedy = evaluate_run(folder, episodes=EPISODES)
            agent = trainer.algorithm.agent
            return MemoryResult(
                task=run.task,
                cell=run.cell,
                options=run.options,
                hidden_size=size,
                parameters=sum(parameter.numel() for parameter in agent.parameters()),
                reference=reference,
                seed=run.seed,
                steps=config.total_steps,
                greedy=round(greedy.mean_return, 6),
                best=round(score.value, 6),
                mean=round(score.mean, 6),
                episodes=score.episodes,
                env_steps=outcome.env_steps,
                wall_s=round(time.perf_counter() - begin, 2),
                device=self.device,
                versions=f"recurl {__version__} torch {torch.__version__}",
                commit=source_commit() or "",
                date=time.strftime("%Y-%m-%d"),
            )

        return train_in(
            self.folder / run.slug,
            config,
            self.notify,
            callbacks=[score],
            on_speed=on_speed,
            should_stop=should_stop,
            keep=False,
            then=finished,
        )

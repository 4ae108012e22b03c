"""Tasks, cells and PPO settings of the memory benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeAlias

from recurl.core.errors import ArgumentError
from recurl.core.messages import nearest
from recurl.core.ranges import AUTO
from recurl.envs.tasks.popgym import POPGYM_TASKS, popgym_id
from recurl.experiments.popgym.settings import check_steps, options_text, split_layers
from recurl.experiments.popgym.settings import find_tasks as find_popgym_tasks
from recurl.recurrence import CELLS as KNOWN
from recurl.trainers.algorithms.configs import PPOConfig
from recurl.trainers.config import NO_CELL

Suite: TypeAlias = Literal["core", "popgym"]

_OFFERED = ("gru", "lstm", "slstm", "s5", "gtrxl", "shm", "mlstm", "mamba2", "gated_deltanet")
CELLS = (*(name for name in _OFFERED if name in KNOWN), NO_CELL)
"""Cells compared by default."""
REFERENCE = "gru"
"""Cell whose policy sets the number of parameters on each task."""
TUNED_ON = ("CountRecallEasy", "HigherLowerEasy")
"""POPGym tasks on which the setting `fast` was selected, for GRU; their results are shown, but not scored."""


class MemoryTask(NamedTuple):
    """A task of a suite."""

    name: str
    env: str
    env_kwargs: tuple[str, ...]
    steps: int
    """Environment steps of a run."""
    span: int
    """Steps of a sequence, long enough for gradients to reach what has to be remembered."""

    @property
    def is_scored(self) -> bool:
        """Whether the task counts in means over tasks."""
        return self.name not in TUNED_ON


def _core(name: str, env: str, *env_kwargs: str, span: int = 128) -> MemoryTask:
    return MemoryTask(name, f"recurl/{env}", env_kwargs, 10_000_000, span)


def _repeat(k: int) -> MemoryTask:
    length = max(64, 2 * k)
    arguments = (f"k={k}", f"episode_length={length}")
    return _core(f"RepeatPrevious{k}", "RepeatPrevious-v0", *arguments, span=max(128, length))


SUITES: dict[Suite, dict[str, MemoryTask]] = {
    "core": {
        task.name: task
        for task in (
            _core("MaskedCartPole", "MaskedCartPole-v1"),
            *map(_repeat, (4, 16, 64, 256, 512)),
            _core("TMaze10", "TMaze-v0", "corridor_length=10"),
            _core("TMaze100", "TMaze-v0", "corridor_length=100", span=256),
            _core("TMaze1000", "TMaze-v0", "corridor_length=1000", span=2048),
            _core("EndlessTMaze", "EndlessTMaze-v0", "random_lengths=True"),
            _core("ColorCubes", "ColorCubes-v0"),
            _core("RockSample", "RockSample-v0"),
        )
    },
    "popgym": {name: MemoryTask(name, popgym_id(name), (), 15_000_000, 128) for name in POPGYM_TASKS},
}
"""Tasks by suite and name."""


class MemoryRun(NamedTuple):
    """One run of the benchmark, corresponding to a row of the results."""

    task: str
    cell: str
    """Name of the cell, with the suffix ``*4`` for four layers."""
    seed: int
    config: PPOConfig
    """The options; ``hidden_size`` is that of the reference, with whose parameters the run's size is chosen."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Unique key: the task, the cell, the seed and the settings."""
        return self.task, self.cell, self.seed, self.config.total_steps, self.options

    @property
    def name(self) -> str:
        """The run, for messages."""
        return f"{self.task} {self.cell} seed {self.seed}"

    @property
    def slug(self) -> str:
        """Name of the run's folder."""
        cell = "".join(letter if letter.isalnum() else "-" for letter in self.cell)
        return f"{self.task}-{cell}-seed{self.seed}"

    @property
    def options(self) -> str:
        """The settings of the task and of PPO, as text."""
        arguments = " ".join(self.config.env_kwargs)
        return f"{self.config.env_name}{f' {arguments}' if arguments else ''}: {options_text(self.config)}"


def find_tasks(suite: Suite, names: Sequence[str]) -> list[MemoryTask]:
    """Return the named tasks of a suite in its order, or all of them if no names are given.

    Args:
        suite: the suite.
        names: names of tasks; of POPGym's also of families, such as ``RepeatPrevious`` for all three difficulties.

    Raises:
        ArgumentError: the suite has no such task.

    Example:
        >>> [task.name for task in find_tasks("core", ["TMaze100", "TMaze10"])]
        ['TMaze10', 'TMaze100']
    """
    tasks = SUITES[suite]
    if suite == "popgym":
        names = find_popgym_tasks(names)
    for name in names:
        if name not in tasks:
            raise ArgumentError(f"--tasks: {suite} has no task {name!r}, but {', '.join(tasks)}.{nearest(name, tasks)}")
    return [task for name, task in tasks.items() if not names or name in names]


def make_runs(
    tasks: Sequence[MemoryTask],
    cells: Sequence[str],
    seeds: int,
    settings: Mapping[str, Any],
    *,
    changes: Mapping[str, Any],
    steps: int | None,
    device: str,
) -> list[MemoryRun]:
    """Return the runs of the benchmark, ordered by seed, then task, then cell.

    Sequences are as long as the task's span, and batches have as many steps as those of the settings: with longer
    sequences, fewer environments.

    Args:
        tasks: the tasks.
        cells: names of cells; ``none`` for no memory, ``s5*4`` for four layers of S5.
        seeds: number of seeds, starting at 0.
        settings: PPO options, the changes among them; see :func:`recurl.experiments.popgym.settings.setting`.
        changes: PPO options that are the same for all tasks, whatever their span.
        steps: environment steps of each run; None for those of its task.
        device: device of environments and networks.

    Raises:
        ArgumentError: a cell is unknown, layers are requested for ``none``, an option can't be used, or the steps are
            fewer than a batch.
    """
    on_gpu = device.startswith("cuda")
    frames = settings["num_envs"] * settings["rollout_steps"]
    # What is possible with the cell is compiled and captured on a GPU; on a CPU compilation costs more than it saves.
    speed = AUTO if on_gpu else False
    fixed: dict[str, Any] = {"device": device, "checkpoint_every": 10**6, "compile": speed, "cuda_graph": speed}
    made: list[MemoryRun] = []
    for task in tasks:
        span: dict[str, Any] = {
            "num_envs": max(1, frames // task.span),
            "rollout_steps": task.span,
            "sequence_length": task.span,
        }
        own: dict[str, Any] = {**settings, **span, **changes, **fixed, "env": task.env, "env_kwargs": task.env_kwargs}
        own["total_steps"] = steps or task.steps
        check_steps("--steps", own["total_steps"], own["num_envs"], own["rollout_steps"])
        for name, depth in dict.fromkeys(map(split_layers, cells)):
            own |= {"cell": name, "num_layers": depth}
            config = PPOConfig(**own)
            made.append(MemoryRun(task.name, name if depth == 1 else f"{name}*{depth}", 0, config))
    return [run._replace(seed=seed, config=replace(run.config, seed=seed)) for seed in range(seeds) for run in made]

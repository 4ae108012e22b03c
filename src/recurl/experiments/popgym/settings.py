"""Tasks, cells and PPO settings of the POPGym benchmark."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from recurl.core.errors import ArgumentError
from recurl.core.messages import nearest
from recurl.core.ranges import AUTO
from recurl.envs.tasks.popgym import POPGYM_TASKS, popgym_id
from recurl.envs.tasks.popgym.table import DIFFICULTIES
from recurl.recurrence import CELLS as KNOWN
from recurl.recurrence import load_cell
from recurl.trainers.algorithms.configs import PPOConfig
from recurl.trainers.config import NO_CELL
from recurl.trainers.study.grid import check_option_names

CELLS = (*(name for name in ("gru", "lstm", "mingru", "s5") if name in KNOWN), NO_CELL)
"""Cells compared by default."""

SETTINGS: dict[str, dict[str, Any]] = {
    "fast": {
        "num_envs": 256,
        "rollout_steps": 128,
        "sequence_length": 128,
        "epochs": 4,
        "minibatches": 8,
        "learning_rate": 1e-3,
        "gae_lambda": 0.95,
        "entropy_coeff": 0.01,
        "encoder_width": 128,
        "head_width": 128,
    },
    "paper": {
        "num_envs": 64,
        "rollout_steps": 1024,
        "sequence_length": 1024,
        "epochs": 30,
        "minibatches": 8,
        "learning_rate": 5e-5,
        "learning_rate_schedule": "constant",
        "gae_lambda": 1.0,
        "critic_coeff": 1.0,
        "scale_rewards": False,
        "normalize_observations": False,
        "encoder_width": 128,
        "encoder_layers": 2,
        "head_width": 128,
    },
}
"""PPO options of each setting, in addition to the common ones."""
_COMMON = {
    "hidden_size": 256,
    "shared_trunk": True,
    "gamma": 0.99,
    "clip_epsilon": 0.2,
    "previous_action": True,
    "logger": "none",
}
_FIXED = (
    "env",
    "env_kwargs",
    "cell",
    "num_layers",
    "seed",
    "total_steps",
    "device",
    "cuda_graph",
    "compile",
    "checkpoint_every",
)
"""Options fixed by the benchmark."""
_VARYING = (
    *_FIXED,
    "algorithm",
    "backend",
    "vectorization",
    "threads",
    "logger",
    "callback",
)
"""Options that are not part of a setting because they vary between runs or depend on the machine."""
_LAYERS = re.compile(r"(.*)\*(\d+)")


class Run(NamedTuple):
    """One run of the benchmark, corresponding to a row of the results."""

    task: str
    cell: str
    """Name of the cell, with the suffix ``*4`` for four layers."""
    seed: int
    config: PPOConfig

    @property
    def key(self) -> tuple[str, str, int]:
        """Unique key within a setting."""
        return self.task, self.cell, self.seed

    @property
    def slug(self) -> str:
        """Name of the run's folder."""
        cell = "".join(letter if letter.isalnum() else "-" for letter in self.cell)
        return f"{self.task}-{cell}-seed{self.seed}"


def find_tasks(names: Sequence[str]) -> list[str]:
    """Return the named tasks in table order, or all of them if no names are given.

    Args:
        names: names of tasks such as ``RepeatPreviousEasy``, or of families such as ``RepeatPrevious`` for all three
            difficulties.

    Raises:
        ArgumentError: a name is unknown.

    Example:
        >>> find_tasks(["HigherLowerHard", "Autoencode"])
        ['AutoencodeEasy', 'AutoencodeMedium', 'AutoencodeHard', 'HigherLowerHard']
    """
    families = {name: [f"{name}{level}" for level in DIFFICULTIES] for name in map(family_of, POPGYM_TASKS)}
    found: set[str] = set()
    for name in names:
        if name not in POPGYM_TASKS and name not in families:
            raise ArgumentError(f"--tasks: there is no task {name!r}.{nearest(name, (*families, *POPGYM_TASKS))}")
        found.update(families.get(name, [name]))
    return [name for name in POPGYM_TASKS if name in found or not names]


def family_of(name: str) -> str:
    """Return the family of a task, its name without the difficulty.

    Example:
        >>> family_of("RepeatFirstHard")
        'RepeatFirst'
    """
    return next(name.removesuffix(level) for level in DIFFICULTIES if name.endswith(level))


def make_runs(
    tasks: Sequence[str], cells: Sequence[str], seeds: int, settings: Mapping[str, Any], *, budget: int, device: str
) -> list[Run]:
    """Return the runs of the benchmark, ordered by seed, then cell, then task.

    Args:
        tasks: names of tasks.
        cells: names of cells; ``none`` for no memory, ``s5*4`` for four layers of S5.
        seeds: number of seeds, starting at 0.
        settings: PPO options; see :func:`setting`.
        budget: environment steps of each run.
        device: device of environments and networks.

    Raises:
        ArgumentError: a cell is unknown, layers are requested for ``none``, an option can't be used, or the budget is
            smaller than a batch.
    """
    check_steps("--budget", budget, settings["num_envs"], settings["rollout_steps"])
    graph = device.startswith("cuda") and settings.get("cuda_graph", True)
    common: dict[str, Any] = {**settings, "total_steps": budget, "device": device, "checkpoint_every": 10**6}
    made: list[Run] = []
    for name, depth in dict.fromkeys(map(split_layers, cells)):
        own: dict[str, Any] = {"cell": name, "num_layers": depth, "cuda_graph": graph}
        own["compile"] = AUTO if graph else False  # where it is possible
        first = PPOConfig(env=popgym_id(tasks[0]), **{**common, **own})
        cell = name if depth == 1 else f"{name}*{depth}"
        made += [Run(task, cell, 0, replace(first, env=popgym_id(task))) for task in tasks]
    return [run._replace(seed=seed, config=replace(run.config, seed=seed)) for seed in range(seeds) for run in made]


def check_steps(option: str, steps: int, num_envs: Any, rollout_steps: Any) -> None:
    """Check that the steps of a run cover a batch; PPO reports values that are not integers.

    Args:
        option: the option that sets the steps.
        steps: environment steps of the run.
        num_envs: number of environments.
        rollout_steps: steps of each between updates.

    Raises:
        ArgumentError: the steps are fewer.
    """
    if isinstance(num_envs, int) and isinstance(rollout_steps, int) and steps < num_envs * rollout_steps:
        raise ArgumentError(
            f"{option} must cover one batch of {num_envs * rollout_steps} steps ({num_envs} environments x "
            f"{rollout_steps}), got {steps}: raise it, or lower one of them (--set num_envs=8)."
        )


def split_layers(cell: str) -> tuple[str, int]:
    """Split a cell such as ``s5*4`` into its name, which identifies results, and its number of layers.

    Raises:
        ArgumentError: there would be no layer, layers are requested for ``none``, or options don't fit.
    """
    match = _LAYERS.fullmatch(cell)
    name, depth = (match[1], int(match[2])) if match else (cell, 1)
    if depth < 1:
        raise ArgumentError(f"--cells: a cell must have at least one layer, got {cell!r}: write {name}.")
    if name == NO_CELL and depth != 1:
        raise ArgumentError(f"--cells: {NO_CELL} has no layers, got {cell!r}: write {NO_CELL}.")
    if "(" in name and ":" not in name:  # options have several spellings
        name = load_cell(name).name
    return name, depth


def setting(name: str, changes: Mapping[str, Any], *, cuda_graph: bool = True) -> dict[str, Any]:
    """Return the PPO options of a setting.

    Args:
        name: ``fast`` or ``paper``.
        changes: options to override.
        cuda_graph: on a GPU, compile steps and capture them as CUDA graphs.

    Raises:
        ArgumentError: an option is unknown or fixed by the benchmark.
    """
    fixed = sorted(set(changes) & set(_FIXED))
    if fixed:
        raise ArgumentError(f"--set can't set {fixed[0]}, which the benchmark sets itself.")
    check_option_names(PPOConfig, dict.fromkeys(changes, ()))
    return {**_COMMON, **SETTINGS[name], **changes, "cuda_graph": cuda_graph}


def options_text(config: PPOConfig) -> str:
    """Return the non-default options of a setting as text.

    Example:
        >>> options_text(PPOConfig(env="TMaze-v0", gamma=0.9, num_envs=64, seed=3))
        'gamma=0.9 num_envs=64'
    """
    defaults = PPOConfig(env="none").to_dict()
    options = {name: value for name, value in config.to_dict().items() if name not in _VARYING}
    return " ".join(f"{name}={value}" for name, value in sorted(options.items()) if value != defaults[name])

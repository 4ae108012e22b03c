"""Registry of the tasks: gymnasium ids, classes (imported on first use), and optimal and memoryless returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import gymnasium
from gymnasium.vector import AutoresetMode

if TYPE_CHECKING:
    from recurl.envs.tasks.base import TaskEnv, TaskVectorEnv
    from recurl.envs.tasks.dynamics import Dynamics


@dataclass(frozen=True)
class Task:
    """A task that requires memory, with the best returns with and without memory.

    Example:
        >>> from recurl.envs.tasks import TASKS
        >>> task = TASKS["recurl/RepeatPrevious-v0"]
        >>> task.optimal_return(k=8), task.memoryless_return(k=8)
        (1.0, 0.25)
    """

    id: str
    """Id for `gymnasium.make` and `gymnasium.make_vec`."""

    entry_point: str
    """Module and name of the single environment's class."""

    vector_entry_point: str
    """Module and name of the vector environment's class."""

    @property
    def env(self) -> type[gymnasium.Env]:
        """Class of the single environment."""
        return _imported(self.entry_point)

    @property
    def vector_env(self) -> type[TaskVectorEnv]:
        """Class of the vector environment."""
        return _imported(self.vector_entry_point)

    @property
    def optimal_return(self) -> Callable[..., float]:
        """Return of the best policy with memory, as a function of the environment's keyword arguments (`k`, ...)."""
        return _imported(self.vector_entry_point).optimal_return

    @property
    def memoryless_return(self) -> Callable[..., float]:
        """Expected return of the best memoryless policy of the current observation, as a function of the same."""
        return _imported(self.vector_entry_point).memoryless_return


def _imported(entry_point: str) -> Any:
    module, _, name = entry_point.partition(":")
    return getattr(import_module(module), name)


TASKS = {
    task_id: Task(task_id, f"recurl.envs.tasks.{task}Env", f"recurl.envs.tasks.{task}VectorEnv")
    for task_id, task in {
        "recurl/Bandit-v0": "bandit:Bandit",
        "recurl/ColorCubes-v0": "color_cubes:ColorCubes",
        "recurl/EndlessTMaze-v0": "endless_tmaze:EndlessTMaze",
        "recurl/MaskedArm-v0": "masked_arm:MaskedArm",
        "recurl/MaskedCartPole-v1": "masked_cartpole:MaskedCartPole",
        "recurl/MaskedPendulum-v1": "masked_pendulum:MaskedPendulum",
        "recurl/RepeatPrevious-v0": "repeat_previous:RepeatPrevious",
        "recurl/RockSample-v0": "rock_sample:RockSample",
        "recurl/TMaze-v0": "tmaze:TMaze",
    }.items()
}
"""All tasks, by id."""


def register_tasks() -> None:
    """Register all tasks with gymnasium, skipping those already registered.

    No step limit is registered: each environment counts its own steps and saves the count with its state, whereas the
    count of a `TimeLimit` wrapper could not be restored.

    Example:
        >>> import gymnasium
        >>> register_tasks()
        >>> gymnasium.make_vec("recurl/TMaze-v0", num_envs=2, corridor_length=5)
        TMazeVectorEnv(recurl/TMaze-v0, num_envs=2)
    """
    for task in TASKS.values():
        if task.id not in gymnasium.registry:
            gymnasium.register(task.id, entry_point=task.entry_point, vector_entry_point=task.vector_entry_point)


def register_dynamics(env_id: str, create: Callable[..., Dynamics]) -> None:
    """Register a custom task with gymnasium, single and vectorized.

    Args:
        env_id: the id, such as `Catch-v0`.
        create: creates the dynamics, such as their class; its arguments become those of the environment.

    Example:
        >>> import gymnasium
        >>> from recurl.envs.tasks import TMaze
        >>> register_dynamics("Corridor-v0", TMaze)
        >>> gymnasium.make_vec("Corridor-v0", num_envs=2, corridor_length=3).reset(seed=0)[0].shape
        (2, 4)
        >>> _ = gymnasium.registry.pop("Corridor-v0")
    """
    gymnasium.register(env_id, entry_point=partial(_single, create), vector_entry_point=partial(_vector, create))


def _single(create: Callable[..., Dynamics], render_mode: str | None = None, **kwargs: Any) -> TaskEnv:
    base = import_module("recurl.envs.tasks.base")
    return base.TaskEnv(base.TaskVectorEnv(create(**kwargs), 1, AutoresetMode.DISABLED), render_mode)


def _vector(
    create: Callable[..., Dynamics],
    num_envs: int = 1,
    autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    **kwargs: Any,
) -> TaskVectorEnv:
    return import_module("recurl.envs.tasks.base").TaskVectorEnv(create(**kwargs), num_envs, autoreset_mode)


# As in gymnasium's own packages, importing the package registers its environments.
register_tasks()

"""Registry of the tasks: gymnasium ids, classes, and optimal and memoryless returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode

from recurl.envs.tasks.bandit import BanditEnv, BanditVectorEnv
from recurl.envs.tasks.base import TaskEnv, TaskVectorEnv
from recurl.envs.tasks.dynamics import Dynamics
from recurl.envs.tasks.masked_cartpole import MaskedCartPoleEnv, MaskedCartPoleVectorEnv
from recurl.envs.tasks.masked_pendulum import MaskedPendulumEnv, MaskedPendulumVectorEnv
from recurl.envs.tasks.repeat_previous import RepeatPreviousEnv, RepeatPreviousVectorEnv
from recurl.envs.tasks.tmaze import TMazeEnv, TMazeVectorEnv


@dataclass(frozen=True)
class Task:
    """A task that requires memory, with the best returns with and without memory.

    Example:
        >>> task = TASKS["recurl/RepeatPrevious-v0"]
        >>> task.optimal_return(k=8), task.memoryless_return(k=8)
        (1.0, 0.25)
    """

    id: str
    """Id for `gymnasium.make` and `gymnasium.make_vec`."""

    env: type[gymnasium.Env]
    """Class of the single environment."""

    vector_env: type[TaskVectorEnv]
    """Class of the vector environment."""

    optimal_return: Callable[..., float]
    """Return of the best policy with memory, as a function of the environment's keyword arguments (`k`, ...)."""

    memoryless_return: Callable[..., float]
    """Expected return of the best memoryless policy of the current observation, as a function of the same arguments."""


TASKS = {
    task.id: task
    for task in (
        Task(
            "recurl/Bandit-v0",
            BanditEnv,
            BanditVectorEnv,
            BanditVectorEnv.optimal_return,
            BanditVectorEnv.memoryless_return,
        ),
        Task(
            "recurl/MaskedCartPole-v1",
            MaskedCartPoleEnv,
            MaskedCartPoleVectorEnv,
            MaskedCartPoleVectorEnv.optimal_return,
            MaskedCartPoleVectorEnv.memoryless_return,
        ),
        Task(
            "recurl/MaskedPendulum-v1",
            MaskedPendulumEnv,
            MaskedPendulumVectorEnv,
            MaskedPendulumVectorEnv.optimal_return,
            MaskedPendulumVectorEnv.memoryless_return,
        ),
        Task(
            "recurl/RepeatPrevious-v0",
            RepeatPreviousEnv,
            RepeatPreviousVectorEnv,
            RepeatPreviousVectorEnv.optimal_return,
            RepeatPreviousVectorEnv.memoryless_return,
        ),
        Task(
            "recurl/TMaze-v0",
            TMazeEnv,
            TMazeVectorEnv,
            TMazeVectorEnv.optimal_return,
            TMazeVectorEnv.memoryless_return,
        ),
    )
}
"""All tasks, by id."""


def register_tasks() -> None:
    """Register all tasks with gymnasium, skipping those already registered.

    No step limit is registered: each environment counts its own steps and saves the count with its state, whereas the
    count of a `TimeLimit` wrapper could not be restored.

    Example:
        >>> register_tasks()
        >>> gymnasium.make_vec("recurl/TMaze-v0", num_envs=2, corridor_length=5)
        TMazeVectorEnv(recurl/TMaze-v0, num_envs=2)
    """
    for task in TASKS.values():
        if task.id not in gymnasium.registry:
            gymnasium.register(
                task.id,
                entry_point=f"{task.env.__module__}:{task.env.__qualname__}",
                vector_entry_point=f"{task.vector_env.__module__}:{task.vector_env.__qualname__}",
            )


def register_dynamics(env_id: str, create: Callable[..., Dynamics]) -> None:
    """Register a custom task with gymnasium, single and vectorized.

    Args:
        env_id: the id, such as `Catch-v0`.
        create: creates the dynamics, such as their class; its arguments become those of the environment.

    Example:
        >>> from recurl.envs.tasks import TMaze
        >>> register_dynamics("Corridor-v0", TMaze)
        >>> gymnasium.make_vec("Corridor-v0", num_envs=2, corridor_length=3).reset(seed=0)[0].shape
        (2, 4)
        >>> _ = gymnasium.registry.pop("Corridor-v0")
    """
    gymnasium.register(env_id, entry_point=partial(_single, create), vector_entry_point=partial(_vector, create))


def _single(create: Callable[..., Dynamics], render_mode: str | None = None, **kwargs: Any) -> TaskEnv:
    return TaskEnv(TaskVectorEnv(create(**kwargs), 1, AutoresetMode.DISABLED), render_mode)


def _vector(
    create: Callable[..., Dynamics],
    num_envs: int = 1,
    autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    **kwargs: Any,
) -> TaskVectorEnv:
    return TaskVectorEnv(create(**kwargs), num_envs, autoreset_mode)


# As in gymnasium's own packages, importing the environments registers them.
register_tasks()

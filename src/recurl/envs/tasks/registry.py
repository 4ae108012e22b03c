"""The tasks by their gymnasium ids, with the returns to be had on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import gymnasium

from recurl.envs.tasks.base import TaskVectorEnv
from recurl.envs.tasks.masked_cartpole import MaskedCartPoleEnv, MaskedCartPoleVectorEnv
from recurl.envs.tasks.masked_pendulum import MaskedPendulumEnv, MaskedPendulumVectorEnv
from recurl.envs.tasks.repeat_previous import RepeatPreviousEnv, RepeatPreviousVectorEnv
from recurl.envs.tasks.tmaze import TMazeEnv, TMazeVectorEnv


@dataclass(frozen=True)
class Task:
    """A task that memory solves, and what it is worth with and without.

    Example:
        >>> task = TASKS["recurl/RepeatPrevious-v0"]
        >>> task.optimal_return(k=8), task.memoryless_return(k=8)
        (1.0, 0.25)
    """

    id: str
    """Name for `gymnasium.make` and `gymnasium.make_vec`."""

    env: type[gymnasium.Env]
    """The single environment."""

    vector_env: type[TaskVectorEnv]
    """The vectorised one."""

    optimal_return: Callable[..., float]
    """Return of the best policy with memory; takes the environment's own keyword arguments (`k`, ...)."""

    memoryless_return: Callable[..., float]
    """Expected return of the best policy that sees the present observation alone; same arguments."""


TASKS = {
    task.id: task
    for task in (
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
"""Every task, by its id."""


def register_tasks() -> None:
    """Register every task with gymnasium; those that are registered already are left as they are.

    No step limit is registered: each environment keeps its own and counts it in its saved state, where a `TimeLimit`
    around it could not be restored.

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


# As in gymnasium's own packages, importing the environments is what makes them known.
register_tasks()

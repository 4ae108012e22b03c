"""Small partially observable tasks with known returns; importing this package registers them with gymnasium."""

from recurl.envs.tasks.bandit import BanditEnv, BanditVectorEnv
from recurl.envs.tasks.masked_cartpole import MaskedCartPoleEnv, MaskedCartPoleVectorEnv
from recurl.envs.tasks.masked_pendulum import MaskedPendulumEnv, MaskedPendulumVectorEnv
from recurl.envs.tasks.registry import TASKS, Task, register_tasks
from recurl.envs.tasks.repeat_previous import RepeatPreviousEnv, RepeatPreviousVectorEnv
from recurl.envs.tasks.tmaze import TMazeEnv, TMazeVectorEnv

__all__ = [
    "TASKS",
    "BanditEnv",
    "BanditVectorEnv",
    "MaskedCartPoleEnv",
    "MaskedCartPoleVectorEnv",
    "MaskedPendulumEnv",
    "MaskedPendulumVectorEnv",
    "RepeatPreviousEnv",
    "RepeatPreviousVectorEnv",
    "TMazeEnv",
    "TMazeVectorEnv",
    "Task",
    "register_tasks",
]

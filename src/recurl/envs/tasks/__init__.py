"""Small partially observable tasks with known optimal returns. Importing the package registers them with gymnasium."""

from typing import TYPE_CHECKING

from recurl.core.lazy import lazy_names
from recurl.envs.tasks import popgym
from recurl.envs.tasks.registry import TASKS, Task, register_dynamics, register_tasks

if TYPE_CHECKING:
    from recurl.envs.tasks.agreement import check_dynamics
    from recurl.envs.tasks.bandit import Bandit, BanditEnv, BanditVectorEnv
    from recurl.envs.tasks.base import TaskEnv, TaskVectorEnv
    from recurl.envs.tasks.color_cubes import ColorCubes, ColorCubesEnv, ColorCubesVectorEnv
    from recurl.envs.tasks.dynamics import Dynamics
    from recurl.envs.tasks.endless_tmaze import EndlessTMaze, EndlessTMazeEnv, EndlessTMazeVectorEnv
    from recurl.envs.tasks.masked_arm import ARM_MIRROR, MaskedArm, MaskedArmEnv, MaskedArmVectorEnv
    from recurl.envs.tasks.masked_cartpole import (
        CARTPOLE_MIRROR,
        MaskedCartPole,
        MaskedCartPoleEnv,
        MaskedCartPoleVectorEnv,
    )
    from recurl.envs.tasks.masked_pendulum import MaskedPendulum, MaskedPendulumEnv, MaskedPendulumVectorEnv
    from recurl.envs.tasks.repeat_previous import RepeatPrevious, RepeatPreviousEnv, RepeatPreviousVectorEnv
    from recurl.envs.tasks.rock_sample import RockSample, RockSampleEnv, RockSampleVectorEnv
    from recurl.envs.tasks.tmaze import TMaze, TMazeEnv, TMazeVectorEnv

lazy_names(
    __name__,
    {
        ".agreement": "check_dynamics",
        ".bandit": "Bandit BanditEnv BanditVectorEnv",
        ".base": "TaskEnv TaskVectorEnv",
        ".color_cubes": "ColorCubes ColorCubesEnv ColorCubesVectorEnv",
        ".dynamics": "Dynamics",
        ".endless_tmaze": "EndlessTMaze EndlessTMazeEnv EndlessTMazeVectorEnv",
        ".masked_arm": "ARM_MIRROR MaskedArm MaskedArmEnv MaskedArmVectorEnv",
        ".masked_cartpole": "CARTPOLE_MIRROR MaskedCartPole MaskedCartPoleEnv MaskedCartPoleVectorEnv",
        ".masked_pendulum": "MaskedPendulum MaskedPendulumEnv MaskedPendulumVectorEnv",
        ".repeat_previous": "RepeatPrevious RepeatPreviousEnv RepeatPreviousVectorEnv",
        ".rock_sample": "RockSample RockSampleEnv RockSampleVectorEnv",
        ".tmaze": "TMaze TMazeEnv TMazeVectorEnv",
    },
)

__all__ = [
    "ARM_MIRROR",
    "CARTPOLE_MIRROR",
    "TASKS",
    "Bandit",
    "BanditEnv",
    "BanditVectorEnv",
    "ColorCubes",
    "ColorCubesEnv",
    "ColorCubesVectorEnv",
    "Dynamics",
    "EndlessTMaze",
    "EndlessTMazeEnv",
    "EndlessTMazeVectorEnv",
    "MaskedArm",
    "MaskedArmEnv",
    "MaskedArmVectorEnv",
    "MaskedCartPole",
    "MaskedCartPoleEnv",
    "MaskedCartPoleVectorEnv",
    "MaskedPendulum",
    "MaskedPendulumEnv",
    "MaskedPendulumVectorEnv",
    "RepeatPrevious",
    "RepeatPreviousEnv",
    "RepeatPreviousVectorEnv",
    "RockSample",
    "RockSampleEnv",
    "RockSampleVectorEnv",
    "TMaze",
    "TMazeEnv",
    "TMazeVectorEnv",
    "Task",
    "TaskEnv",
    "TaskVectorEnv",
    "check_dynamics",
    "popgym",
    "register_dynamics",
    "register_tasks",
]

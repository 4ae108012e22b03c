"""POPGym's tasks, native on host and device. Importing the package registers them.

Each task agrees with the package `popgym` step by step; the classes document exceptions. Observations are vectors:
discrete ones are one-hot encoded here, int8, with parts concatenated as by `gymnasium.spaces.flatten`. Real numbers
stay float32.

Source: Morad et al., "POPGym: Benchmarking Partially Observable Reinforcement Learning" (2023).
"""

from typing import TYPE_CHECKING

from recurl.core.lazy import lazy_names
from recurl.envs.tasks.popgym.table import POPGYM_TASKS, popgym_id, register_popgym

if TYPE_CHECKING:
    from recurl.envs.tasks.popgym.autoencode import Autoencode
    from recurl.envs.tasks.popgym.battleship import Battleship
    from recurl.envs.tasks.popgym.cartpole import NoisyPositionOnlyCartPole, PositionOnlyCartPole, VelocityOnlyCartPole
    from recurl.envs.tasks.popgym.concentration import Concentration
    from recurl.envs.tasks.popgym.count_recall import CountRecall
    from recurl.envs.tasks.popgym.higher_lower import HigherLower
    from recurl.envs.tasks.popgym.labyrinth import LabyrinthEscape, LabyrinthExplore
    from recurl.envs.tasks.popgym.minesweeper import MineSweeper
    from recurl.envs.tasks.popgym.multiarmed_bandit import MultiarmedBandit
    from recurl.envs.tasks.popgym.pendulum import NoisyPositionOnlyPendulum, PositionOnlyPendulum
    from recurl.envs.tasks.popgym.repeat import RepeatFirst, RepeatPrevious

lazy_names(
    __name__,
    {
        ".autoencode": "Autoencode",
        ".battleship": "Battleship",
        ".cartpole": "NoisyPositionOnlyCartPole PositionOnlyCartPole VelocityOnlyCartPole",
        ".concentration": "Concentration",
        ".count_recall": "CountRecall",
        ".higher_lower": "HigherLower",
        ".labyrinth": "LabyrinthEscape LabyrinthExplore",
        ".minesweeper": "MineSweeper",
        ".multiarmed_bandit": "MultiarmedBandit",
        ".pendulum": "NoisyPositionOnlyPendulum PositionOnlyPendulum",
        ".repeat": "RepeatFirst RepeatPrevious",
    },
)

__all__ = [
    "POPGYM_TASKS",
    "Autoencode",
    "Battleship",
    "Concentration",
    "CountRecall",
    "HigherLower",
    "LabyrinthEscape",
    "LabyrinthExplore",
    "MineSweeper",
    "MultiarmedBandit",
    "NoisyPositionOnlyCartPole",
    "NoisyPositionOnlyPendulum",
    "PositionOnlyCartPole",
    "PositionOnlyPendulum",
    "RepeatFirst",
    "RepeatPrevious",
    "VelocityOnlyCartPole",
    "popgym_id",
    "register_popgym",
]

"""Registry of POPGym's tasks: names, dynamics and arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import gymnasium

from recurl.envs.tasks.registry import register_dynamics

if TYPE_CHECKING:
    from recurl.envs.tasks.dynamics import Dynamics

DIFFICULTIES = ("Easy", "Medium", "Hard")

_Arguments = dict[str, Any]

_FAMILIES: dict[str, tuple[_Arguments, _Arguments, _Arguments]] = {
    "autoencode:Autoencode": ({"num_decks": 1}, {"num_decks": 2}, {"num_decks": 3}),
    "battleship:Battleship": ({"board_size": 8}, {"board_size": 10}, {"board_size": 12}),
    "concentration:Concentration": (
        {"num_decks": 1, "deck_type": "colors"},
        {"num_decks": 2, "deck_type": "colors"},
        {"num_decks": 1, "deck_type": "ranks"},
    ),
    "count_recall:CountRecall": (
        {"num_decks": 1, "deck_type": "colors"},
        {"num_decks": 2, "deck_type": "suits"},
        {"num_decks": 4, "deck_type": "ranks"},
    ),
    "higher_lower:HigherLower": ({"num_decks": 1}, {"num_decks": 2}, {"num_decks": 3}),
    "labyrinth:LabyrinthEscape": ({"maze_size": 10}, {"maze_size": 14}, {"maze_size": 18}),
    "labyrinth:LabyrinthExplore": ({"maze_size": 10}, {"maze_size": 14}, {"maze_size": 18}),
    "minesweeper:MineSweeper": (
        {"board_size": 4, "num_mines": 2},
        {"board_size": 6, "num_mines": 6},
        {"board_size": 8, "num_mines": 10},
    ),
    "multiarmed_bandit:MultiarmedBandit": (
        {"num_bandits": 10, "episode_length": 200},
        {"num_bandits": 20, "episode_length": 400},
        {"num_bandits": 30, "episode_length": 600},
    ),
    "cartpole:NoisyPositionOnlyCartPole": ({"noise_sigma": 0.1}, {"noise_sigma": 0.2}, {"noise_sigma": 0.3}),
    "pendulum:NoisyPositionOnlyPendulum": ({"noise_sigma": 0.1}, {"noise_sigma": 0.2}, {"noise_sigma": 0.3}),
    "cartpole:PositionOnlyCartPole": (
        {"max_episode_length": 200},
        {"max_episode_length": 400},
        {"max_episode_length": 600},
    ),
    "pendulum:PositionOnlyPendulum": (
        {"max_episode_length": 200},
        {"max_episode_length": 150},
        {"max_episode_length": 100},
    ),
    "repeat:RepeatFirst": ({"num_decks": 1}, {"num_decks": 8}, {"num_decks": 16}),
    "repeat:RepeatPrevious": ({"num_decks": 1, "k": 4}, {"num_decks": 2, "k": 32}, {"num_decks": 3, "k": 64}),
    "cartpole:VelocityOnlyCartPole": (
        {"max_episode_length": 200},
        {"max_episode_length": 400},
        {"max_episode_length": 600},
    ),
}


def _dynamics(family: str, **arguments: Any) -> Dynamics:
    module, _, name = family.partition(":")
    return getattr(import_module(f"recurl.envs.tasks.popgym.{module}"), name)(**arguments)


POPGYM_TASKS: dict[str, Callable[..., Dynamics]] = {
    f"{family.partition(':')[2]}{difficulty}": partial(_dynamics, family, **arguments)
    for family, levels in _FAMILIES.items()
    for difficulty, arguments in zip(DIFFICULTIES, levels, strict=True)
}
"""Factories of each task's dynamics, by task name such as `RepeatPreviousEasy`."""


def popgym_id(name: str) -> str:
    """Return the id of a task for `gymnasium.make` and `gymnasium.make_vec`.

    Example:
        >>> import gymnasium
        >>> env = gymnasium.make_vec(popgym_id("RepeatPreviousEasy"), num_envs=2)
        >>> env.reset(seed=0)[0].shape, env.single_action_space
        ((2, 4), Discrete(4))
    """
    return f"recurl/popgym-{name}-v0"


def register_popgym() -> None:
    """Register all tasks with gymnasium, skipping those already registered."""
    for name, create in POPGYM_TASKS.items():
        if popgym_id(name) not in gymnasium.registry:
            register_dynamics(popgym_id(name), create)


register_popgym()

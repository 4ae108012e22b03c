from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from check_popgym import compare
from recurl.envs.tasks.popgym import POPGYM_TASKS

pytestmark = [  # the package is a peer
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning:gymnasium"),
    pytest.mark.filterwarnings("ignore:Maze environments have been shown:DeprecationWarning"),
]


@pytest.mark.parametrize("name", POPGYM_TASKS)
def test_every_step_agrees_with_the_package(name):
    found = compare(name, 4)
    assert found.episodes == 4
    assert found.reward_difference == 0 or "Pendulum" in name


@pytest.mark.parametrize(
    "name",
    [
        *("BattleshipEasy", "ConcentrationEasy", "LabyrinthEscapeEasy", "LabyrinthExploreEasy", "MineSweeperEasy"),
        "PositionOnlyCartPoleEasy",
    ],
)
def test_both_ways_to_end_are_compared(name):
    assert compare(name, 12).terminated > 0


def test_the_package_has_the_same_48_tasks():
    theirs = {name for name in gymnasium.registry if name.startswith("popgym-")}
    named = {name.removeprefix("popgym-").removesuffix("-v0").replace("Cartpole", "CartPole") for name in theirs}
    assert named == set(POPGYM_TASKS)
    assert len(POPGYM_TASKS) == 48


def test_boards_of_battleship_are_drawn_as_the_package_draws_them():
    from popgym.envs import BattleshipEasy

    theirs, boards = BattleshipEasy(), 2000
    theirs.reset(seed=0)
    expected = np.zeros((8, 8))
    for _ in range(boards):
        theirs.reset()
        expected += theirs.board
    env = gymnasium.make_vec("recurl/popgym-BattleshipEasy-v0", num_envs=boards)
    env.reset(seed=0)
    found = env.unwrapped.state["ships"].sum(-1).reshape(8, 8)
    deviation = (found - expected) / np.sqrt(2 * boards * 0.19 * 0.81)
    assert np.abs(deviation).max() < 4.5
    assert np.square(deviation).mean() < 2

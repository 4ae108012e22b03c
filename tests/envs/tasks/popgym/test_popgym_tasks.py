from __future__ import annotations

import pickle

import gymnasium
import numpy as np
import pytest
import torch

from recurl.core.errors import ArgumentError
from recurl.envs import TensorEnv, check_env_specs
from recurl.envs.tasks import TaskVectorEnv, check_dynamics, popgym
from recurl.envs.tasks.namespaces import TensorDraw, tensors_on
from recurl.envs.tasks.popgym import POPGYM_TASKS, popgym_id
from recurl.envs.tasks.popgym.labyrinth import GOAL, START
from recurl.execution.readback import refuse_read_back

FAMILIES = [name for name in POPGYM_TASKS if name.endswith("Easy")]


@pytest.mark.parametrize("name", FAMILIES)
def test_host_and_device_agree(name):
    assert check_dynamics(POPGYM_TASKS[name](), episodes=4, rows=4) <= 4.0


@pytest.mark.parametrize("name", POPGYM_TASKS)
def test_is_an_environment_on_the_device(name):
    dynamics, xp = POPGYM_TASKS[name](), tensors_on("cpu")
    check_env_specs(TensorEnv(dynamics, 3))
    dynamics.begin(xp, TensorDraw(torch.Generator(), 3))  # constants are copied to the device at their first use
    with refuse_read_back():
        state = dynamics.begin(xp, TensorDraw(torch.Generator(), 3))
    assert all(value.shape[-1] == 3 for value in state.values())


@pytest.mark.parametrize("name", FAMILIES)
def test_is_registered(name):
    env = gymnasium.make(popgym_id(name))
    first = env.reset(seed=3)[0]
    assert first in env.observation_space
    rows = gymnasium.make_vec(popgym_id(name), num_envs=2)
    np.testing.assert_array_equal(rows.reset(seed=2)[0][1], first)
    copied = pickle.loads(pickle.dumps(env))
    action = env.action_space.sample()
    np.testing.assert_array_equal(copied.step(action)[0], env.step(action)[0])


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_that_have_ended_may_be_stepped(name):
    env = TensorEnv(POPGYM_TASKS[name](), 2)
    env.reset()
    env.running = {**env.running, "steps": env.running["steps"] + 2 * env.dynamics.step_limit}
    for _ in range(3):
        env.rand_step()


@pytest.mark.parametrize("name", ["RepeatFirstMedium", "CountRecallHard", "HigherLowerMedium", "ConcentrationMedium"])
def test_decks_are_whole_and_shuffled_on_host_and_device(name):
    dynamics = POPGYM_TASKS[name]()
    host, device = TaskVectorEnv(dynamics, 50), TensorEnv(dynamics, 50)
    host.reset(seed=0)
    device.reset(seed=0)
    for state in (host.state, {key: value.numpy() for key, value in device.running.items()}):
        deck = next(state[key] for key in ("suits", "ranks", "values") if key in state)
        counts = np.stack([np.bincount(row) for row in deck.T])
        assert (counts == counts[0, 0]).all()
        assert len({row.tobytes() for row in deck.T}) == 50
        means = deck.mean(axis=1) / deck.mean()  # for every place of the deck
        assert 0.3 < means.min() < means.max() < 1.8


def test_boards_hold_their_ships_and_mines_on_the_device():
    ships = TensorEnv(POPGYM_TASKS["BattleshipHard"](), 200)
    ships.reset(seed=0)
    assert (ships.running["ships"].sum(0) == 12).all()
    mines = TensorEnv(POPGYM_TASKS["MineSweeperHard"](), 200)
    mines.reset(seed=0)
    assert (mines.running["mines"].sum(0) == 10).all()
    share = mines.running["mines"].double().mean(1)  # of the boards, for every square
    assert 0.05 < share.min() < share.max() < 0.30


def test_arms_pay_as_often_as_their_probability_says():
    env = TensorEnv(POPGYM_TASKS["MultiarmedBanditEasy"](), 400)
    env.reset(seed=0)
    arms, luck = env.running["arms"], env.running["luck"]
    assert torch.allclose((luck[:, None] < arms).double().mean(0), arms, atol=0.2)
    assert abs(arms.mean() - 0.5) < 0.02


def test_starts_and_goals_are_in_opposite_walls_beside_a_cell():
    env, width = TensorEnv(POPGYM_TASKS["LabyrinthEscapeEasy"](), 4000), 11
    env.reset(seed=0)
    squares = env.running["squares"]
    assert ((squares == START).sum(0) == 1).all()
    assert ((squares == GOAL).sum(0) == 1).all()
    start, goal = ((squares == what).byte().argmax(0) for what in (START, GOAL))
    assert (start == env.running["place"]).all()
    (row, column), (goal_row, goal_column) = ((place // width, place % width) for place in (start, goal))
    crosses = (row - goal_row).abs() == 10  # from above to below or back
    assert (crosses ^ ((column - goal_column).abs() == 10)).all()
    for place in (start, goal):
        counts = torch.bincount(place, minlength=width**2)
        assert (counts > 0).sum() == 20
        assert 200 - 60 < counts[counts > 0].min() < counts.max() < 200 + 60  # four standard deviations
    beside, opposite = torch.where(crosses, column, row), torch.where(crosses, goal_column, goal_row)
    together = torch.bincount(5 * (beside // 2) + opposite // 2, minlength=25)
    assert 160 - 50 < together.min() < together.max() < 160 + 50


def test_all_squares_of_a_maze_are_worth_one():
    env = TensorEnv(POPGYM_TASKS["LabyrinthExploreMedium"](), 3)
    env.reset(seed=0)
    assert env.running["left"].tolist() == [97] * 3  # 49 cells and 48 passages
    assert torch.allclose(env.running["worth"] * env.running["left"], torch.ones(3).double())


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (lambda: popgym.LabyrinthEscape(7), r"maze_size must be even; got 7"),
        (lambda: popgym.LabyrinthExplore(4), r"maze_size must be an integer of at least 6; got 4"),
        (lambda: popgym.LabyrinthExplore(6, 1), r"episode_length must be an integer of at least 2; got 1"),
        (lambda: popgym.RepeatPrevious(k=52), r"k must be less than the 52 cards; got 52"),
        (lambda: popgym.CountRecall(deck_type="suit"), r"deck_type must be one of .*'suit'\. Did you mean suits\?"),
        (lambda: popgym.Concentration(deck_type="suits"), r"deck_type must be one of colors, ranks; got 'suits'"),
        (lambda: popgym.Battleship(4, (3, 3, 3)), r"room for every ship, .* got \(3, 3, 3\) on a board of 4 x 4"),
        (lambda: popgym.MineSweeper(2, 2), r"num_mines must leave 3 of the 4 squares free; got 2"),
        (lambda: popgym.NoisyPositionOnlyCartPole(0.0), r"noise_sigma must be positive and finite; got 0\.0"),
    ],
)
def test_bad_arguments_are_refused(create, message):
    with pytest.raises(ArgumentError, match=message):
        create()


@pytest.mark.parametrize("name", ["RepeatPrevious", "MultiarmedBandit", "Autoencode", "HigherLower"])
def test_arguments_of_a_registered_task_can_be_changed(name):
    argument = {"MultiarmedBandit": {"num_bandits": 4}}.get(name, {"num_decks": 4})
    env = gymnasium.make(popgym_id(f"{name}Hard"), **argument)
    changed = next(iter(argument))
    assert getattr(env.unwrapped._rows.dynamics, changed) == 4

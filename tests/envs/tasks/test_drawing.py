import gymnasium as gym
import numpy as np
import pytest

import recurl.envs.tasks
from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.envs.tasks import TMaze
from recurl.envs.tasks.base import TaskEnv, TaskVectorEnv
from recurl.envs.tasks.drawing import BLACK, BLUE, GREEN, RED, Canvas

SIZES = {
    "recurl/Bandit-v0": (100, 300, 3),
    "recurl/ColorCubes-v0": (200, 200, 3),
    "recurl/EndlessTMaze-v0": (120, 300, 3),
    "recurl/MaskedArm-v0": (200, 200, 3),
    "recurl/MaskedCartPole-v1": (200, 300, 3),
    "recurl/MaskedPendulum-v1": (200, 200, 3),
    "recurl/RepeatPrevious-v0": (100, 300, 3),
    "recurl/RockSample-v0": (200, 200, 3),
    "recurl/TMaze-v0": (120, 300, 3),
}


def inside(pixels, color):
    return (pixels == color).all(-1)


def test_shapes_fill_the_pixels_whose_centres_they_cover():
    canvas = Canvas(8, 6)
    canvas.rectangle((1, 2), (4, 5), BLACK)
    expected = np.zeros((6, 8), bool)
    expected[2:5, 1:4] = True
    assert np.array_equal(inside(canvas.pixels, BLACK), expected)
    canvas.circle((6, 1), 1, RED)
    assert inside(canvas.pixels, RED).sum() == 4
    canvas.line((0, 0.5), (8, 0.5), 1, GREEN)
    assert inside(canvas.pixels, GREEN)[0].all()
    clockwise, other = Canvas(9, 9), Canvas(9, 9)
    corners = [(1, 1), (8, 2), (4, 7)]
    clockwise.polygon(corners, BLUE)
    other.polygon(corners[::-1], BLUE)
    assert np.array_equal(clockwise.pixels, other.pixels)
    assert 15 < inside(other.pixels, BLUE).sum() < 25  # the area is 19.5
    other.polygon([(100, 100), (110, 100), (100, 110)], RED)  # outside
    assert not inside(other.pixels, RED).any()


@pytest.mark.parametrize("name", SIZES)
def test_every_task_has_pictures_that_move(name):
    env = gym.make(name, render_mode="rgb_array")
    env.reset(seed=0)
    pictures = [env.render()]
    for _ in range(8):
        env.step(0 if isinstance(env.action_space, gym.spaces.Discrete) else env.action_space.sample())
        pictures.append(env.render())
    assert all((picture.shape, picture.dtype) == (SIZES[name], np.uint8) for picture in pictures)
    assert not np.array_equal(pictures[0], pictures[-1])
    assert gym.make(name).render_mode is None


def test_the_cue_of_the_maze_is_shown_first_only():
    env = gym.make("recurl/TMaze-v0", corridor_length=3, render_mode="rgb_array")
    sides = {}
    for seed in range(8):
        cue, _ = env.reset(seed=seed)
        rows = np.flatnonzero(inside(env.render(), GREEN).any(1))
        sides[int(cue[0])] = rows.mean() < 60
        env.step(0)
        assert not inside(env.render(), GREEN).any()
    assert sides == {1: True, 0: False}  # left is above


def test_the_symbol_to_name_is_green():
    env = gym.make("recurl/RepeatPrevious-v0", k=2, render_mode="rgb_array")
    shown = [int(env.reset(seed=0)[0].argmax())]
    shown += [int(env.step(0)[0].argmax()) for _ in range(5)]
    rows = np.flatnonzero(inside(env.render(), GREEN).any(1))
    assert 10 + shown[-3] * 20 == rows[0]


def test_a_pole_that_leans_to_the_right_does_so_in_the_picture():
    env = gym.make("recurl/MaskedCartPole-v1", render_mode="rgb_array")
    env.reset(seed=0)
    env.unwrapped.state = np.array([0.0, 0.0, 0.2, 0.0])
    columns = np.flatnonzero(inside(env.render(), (202, 152, 101)).any(0))
    assert columns.mean() > 150


def test_mistakes():
    with pytest.raises(ArgumentError, match="render_mode must be 'rgb_array' or None; got 'human'"):
        recurl.envs.tasks.TMazeEnv(render_mode="human")

    class Plain(TaskVectorEnv):
        pass

    rows = Plain(TMaze(), 1, "Disabled")
    with pytest.raises(UnsupportedError, match=r"Plain can't be drawn: define draw\(row\)"):
        TaskEnv(rows, "rgb_array").render()
    assert TaskEnv(rows).render() is None
    assert TaskEnv(rows).metadata["render_modes"] == []

from __future__ import annotations

import pickle

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from recurl.core.errors import ArgumentError, UsageError
from recurl.envs.tasks import TASKS, MaskedCartPoleVectorEnv, RepeatPreviousVectorEnv, TMazeEnv, TMazeVectorEnv
from recurl.envs.tasks.base import check_actions
from recurl.envs.tasks.dynamics import check_count, is_number, parts

# Short episodes, so that a few dozen steps see terminations, truncations and resets.
SHORT = {
    "recurl/Bandit-v0": {"pulls": 7},
    "recurl/ColorCubes-v0": {"size": 2, "cubes": 1, "targets": 2, "max_episode_steps": 7},
    "recurl/EndlessTMaze-v0": {"corridor_length": 2, "corridors": 2, "random_lengths": True, "max_episode_steps": 6},
    "recurl/MaskedArm-v0": {"max_episode_steps": 8},
    "recurl/MaskedCartPole-v1": {"max_episode_steps": 15},
    "recurl/MaskedPendulum-v1": {"max_episode_steps": 9},
    "recurl/RepeatPrevious-v0": {"k": 2, "num_symbols": 3, "episode_length": 7},
    "recurl/RockSample-v0": {"size": 2, "rocks": 2, "max_episode_steps": 6},
    "recurl/TMaze-v0": {"corridor_length": 2, "max_episode_steps": 6},
}
MODES = list(AutoresetMode)


@pytest.fixture(params=list(TASKS))
def task(request):
    return TASKS[request.param]


@pytest.fixture(params=[name for name in TASKS if name not in ("recurl/MaskedArm-v0", "recurl/MaskedPendulum-v1")])
def discrete(request):
    return TASKS[request.param]


def draw(env, rng, rows):
    """Return random actions for environments of shape `rows`."""
    space = getattr(env, "single_action_space", env.action_space)
    if isinstance(space, Box):
        return rng.uniform(1.2 * space.low, 1.2 * space.high, (*rows, *space.shape)).astype(np.float32)
    return rng.integers(space.n, size=rows)


def play(env, steps, rng, mode=AutoresetMode.NEXT_STEP):
    """Play randomly and return all results; under DISABLED, finished rows are reset by mask."""
    came = []
    for _ in range(steps):
        actions = draw(env, rng, (env.num_envs,))
        came.append(env.step(actions))
        done = came[-1][2] | came[-1][3]
        if mode is AutoresetMode.DISABLED and done.any():
            came.append(env.reset(options={"reset_mask": done}))
    return came


def assert_same(left, right):
    assert type(left) is type(right)
    if isinstance(left, tuple | list):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, np.ndarray):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert_same(left.tolist(), right.tolist()) if left.dtype == object else np.testing.assert_array_equal(
            left, right
        )
    else:
        assert left == right


@pytest.mark.parametrize("mode", MODES)
def test_rows_equal_single_environments_in_every_autoreset_mode(task, mode):
    kwargs = SHORT[task.id]
    native = task.vector_env(5, autoreset_mode=mode, **kwargs)
    rows = SyncVectorEnv([lambda: task.env(**kwargs)] * 5, autoreset_mode=mode)

    assert_same(native.reset(seed=11), rows.reset(seed=11))
    assert_same(
        play(native, 80, np.random.default_rng(0), mode),
        play(rows, 80, np.random.default_rng(0), mode),
    )


@pytest.mark.filterwarnings(
    "ignore:.*we recommend using a symmetric and normalized space"
)  # gymnasium's Pendulum is not
def test_single_environment_passes_gymnasiums_checker(task):
    env = gymnasium.make(task.id, disable_env_checker=True).unwrapped
    # Rendering is inherited and requires pygame.
    check_env(env, skip_render_check=bool(env.metadata["render_modes"]))


def test_results_are_in_the_spaces(task):
    env = task.vector_env(3, **SHORT[task.id])
    assert env.observation_space.contains(env.reset(seed=0)[0])
    for observations, reward, terminated, truncated, _ in play(env, 40, np.random.default_rng(0)):
        assert env.observation_space.contains(observations)
        assert (reward.dtype, terminated.dtype, truncated.dtype) == (np.float64, np.bool_, np.bool_)
        assert reward.shape == terminated.shape == truncated.shape == (3,)


def test_nothing_returned_is_changed_later(task):
    env = task.vector_env(4, autoreset_mode="SameStep", **SHORT[task.id])
    env.reset(seed=0)
    came = play(env, 30, np.random.default_rng(1))
    copies = pickle.loads(pickle.dumps(came))
    play(env, 30, np.random.default_rng(2))
    assert_same(came, copies)


def test_same_seed_same_episodes(task):
    runs = []
    for _ in range(2):
        env = task.vector_env(3, **SHORT[task.id])
        runs.append([env.reset(seed=7), *play(env, 50, np.random.default_rng(0))])
    assert_same(*runs)


def test_a_rows_episodes_depend_on_its_seed_alone(task):
    kwargs = SHORT[task.id] | {"autoreset_mode": "SameStep"}
    many, two = task.vector_env(6, **kwargs), task.vector_env(2, **kwargs)
    many.reset(seed=3)
    two.reset(seed=7)
    rng = np.random.default_rng(0)
    for _ in range(60):
        actions = draw(many, rng, (6,))
        for all_rows, last_rows in zip(many.step(actions)[:4], two.step(actions[4:])[:4], strict=True):
            for some, same in zip(parts(all_rows).values(), parts(last_rows).values(), strict=True):
                np.testing.assert_array_equal(some[4:], same)


def test_every_row_may_have_its_own_seed(task):
    env, alike = (task.vector_env(3, **SHORT[task.id]) for _ in range(2))
    assert_same(env.reset(seed=[5, 6, 7]), alike.reset(seed=5))
    kept = env.rngs[1]
    env.reset(seed=(5, None, 7))
    assert [rng is kept for rng in env.rngs] == [False, True, False]
    with pytest.raises(ArgumentError, match=r"seed must be a number, or one for each of 3 rows; got 2\."):
        env.reset(seed=[1, 2])


def test_seeded_partial_reset_seeds_the_masked_rows(task):
    env = task.vector_env(3, autoreset_mode="Disabled", **SHORT[task.id])
    first, _ = env.reset(seed=5)
    other, _ = env.reset(seed=99)
    mask = np.array([False, True, False])
    again, _ = env.reset(seed=5, options={"reset_mask": mask})
    for name, array in parts(again).items():
        np.testing.assert_array_equal(array[1], parts(first)[name][1])
        np.testing.assert_array_equal(array[[0, 2]], parts(other)[name][[0, 2]])


def test_the_masks_of_a_reset_are_left_alone(task):
    env = task.vector_env(2, **SHORT[task.id])
    env.reset(seed=0)
    options = {"reset_mask": np.array([True, False])}
    env.reset(options=options)
    assert list(options) == ["reset_mask"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", [0, 3, 6, 7])
def test_saved_state_resumes_exactly(task, mode, steps):
    env = task.vector_env(4, autoreset_mode=mode, **SHORT[task.id])
    env.reset(seed=1)
    play(env, steps, np.random.default_rng(0), mode)
    state = pickle.loads(pickle.dumps(env.get_state()))

    other = task.vector_env(4, autoreset_mode=mode, **SHORT[task.id])
    other.set_state(state)
    expected = play(env, 60, np.random.default_rng(1), mode)
    assert_same(play(other, 60, np.random.default_rng(1), mode), expected)
    # Later steps of the environment affect neither the saved state nor its restoration.
    other.set_state(state)
    assert_same(play(other, 60, np.random.default_rng(1), mode), expected)


def test_saved_state_of_a_single_environment_resumes_exactly_inside_its_wrappers(task):
    def go_on(env):
        came, rng = [], np.random.default_rng(0)
        for _ in range(60):
            came.append(env.step(draw(env, rng, ())))
            if came[-1][2] or came[-1][3]:
                came.append(env.reset())
        return came

    env, other = gymnasium.make(task.id), gymnasium.make(task.id)
    env.reset(seed=1)
    env.step(draw(env, np.random.default_rng(1), ()))
    state = pickle.loads(pickle.dumps(env.get_wrapper_attr("get_state")()))
    other.reset()
    other.get_wrapper_attr("set_state")(state)
    assert_same(go_on(other), go_on(env))


def test_saved_state_is_made_of_plain_containers(task):
    def assert_plain(value):
        if isinstance(value, dict):
            assert all(isinstance(key, str) for key in value)
            for item in value.values():
                assert_plain(item)
        elif isinstance(value, list):
            for item in value:
                assert_plain(item)
        else:
            assert type(value) in (int, float, str, bool, np.ndarray)

    for env in (task.vector_env(2), task.env()):
        env.reset(seed=0)
        assert_plain(env.get_state())


def test_a_saved_state_that_does_not_fit_is_refused(task):
    env = task.vector_env(2, **SHORT[task.id])
    env.reset(seed=0)
    state = env.get_state()
    with pytest.raises(ArgumentError, match="built with the same arguments"):
        task.vector_env(3, **SHORT[task.id]).set_state(state)
    del state["steps"]
    with pytest.raises(ArgumentError, match="built with the same arguments"):
        env.set_state(state)
    with pytest.raises(ArgumentError, match="built with the same arguments"):
        task.env().set_state(state)


def test_saving_or_stepping_before_the_first_reset_is_refused(task):
    vector = task.vector_env(2)
    for env, rows in ((vector, (2,)), (task.env(), ())):
        actions = draw(vector, np.random.default_rng(0), rows)
        with pytest.raises(UsageError, match=r"before the first reset.*call reset\(\)"):
            env.get_state()
        with pytest.raises(UsageError, match=r"before the first reset.*call reset\(\)"):
            env.step(actions)


@pytest.mark.parametrize(
    "actions",
    [[0, 99], [-1, 0], [0], [[0, 0]], 0, [0.0, 1.0], [True, False], np.zeros((2, 1), dtype=int)],
    ids=str,
)
def test_bad_actions_are_refused(discrete, actions):
    env = discrete.vector_env(2)
    env.reset(seed=0)
    before = env.get_state()
    with pytest.raises(ArgumentError, match=r"must be integers in \[0, \d+\) of shape \(2,\); got "):
        env.step(actions)
    assert_same(env.get_state(), before)


@pytest.mark.parametrize("action", [99, -1, 1.0, [0], None, True], ids=str)
def test_bad_actions_of_a_single_environment_are_refused(discrete, action):
    env = discrete.env()
    env.reset(seed=0)
    with pytest.raises(ArgumentError, match=r"must be integers in \[0, \d+\) of shape \(\); got "):
        env.step(action)


def test_integers_of_every_kind_are_actions():
    for dtype in (np.uint8, np.int32, np.int64, np.uint64):
        assert check_actions(np.array([0, 2], dtype=dtype), (2,), 3).tolist() == [0, 2]
    assert check_actions(np.int64(2), (), 3).tolist() == [2]
    assert check_actions(np.array([[0, 7], [2, 7]])[:, 0], (2,), 3).tolist() == [0, 2]
    with pytest.raises(ArgumentError, match="values from 0 to 18446744073709551615"):
        check_actions(np.array([0, 2**64 - 1], dtype=np.uint64), (2,), 3)


@pytest.mark.parametrize("value", [0, 1.0, "1", True, None])
def test_counts_are_checked(value):
    with pytest.raises(ArgumentError, match="rows must be an integer of at least 1; got"):
        check_count("rows", value, minimum=1)


def test_arguments_may_be_numbers_of_numpy():
    count = check_count("rows", np.int64(7), minimum=1)
    assert (count, type(count)) == (7, int)
    assert is_number(np.float32(0.5))
    assert not is_number(np.bool_(True))
    env = gymnasium.make("recurl/RepeatPrevious-v0", k=np.int32(2), episode_length=np.int64(8))
    assert env.reset(seed=0)[0] in env.observation_space


def test_unknown_autoreset_mode_is_refused(task):
    with pytest.raises(ArgumentError, match=r"autoreset_mode must be one of \['NextStep', 'SameStep', 'Disabled'\]"):
        task.vector_env(2, autoreset_mode="later")
    with pytest.raises(ArgumentError, match="num_envs must be"):
        task.vector_env(0)


def test_autoreset_mode_is_declared_per_instance():
    assert TMazeVectorEnv(2).metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    assert TMazeVectorEnv(2, autoreset_mode="Disabled").metadata["autoreset_mode"] is AutoresetMode.DISABLED


def test_disabled_refuses_to_step_a_finished_row():
    env = TMazeVectorEnv(3, corridor_length=1, autoreset_mode="Disabled")
    env.reset(seed=0)
    env.step([0, 0, 1])
    env.step([1, 1, 1])
    with pytest.raises(UsageError, match=r"rows \[0, 1\] are finished.*reset_mask"):
        env.step([0, 0, 0])
    env.reset(options={"reset_mask": np.array([True, False, False])})
    with pytest.raises(UsageError, match=r"rows \[1\] are finished"):
        env.step([0, 0, 0])
    single = TMazeEnv(corridor_length=1)
    single.reset(seed=0)
    single.step(0)
    single.step(1)
    with pytest.raises(UsageError, match=r"rows \[0\] are finished"):
        single.step(0)


@pytest.mark.parametrize(
    "mask",
    [np.array([True]), np.array([1, 0]), np.array([False, False]), None, np.array([[True, True]])],
    ids=["short", "integers", "empty", "none", "column"],
)
def test_bad_reset_masks_are_refused(mask):
    env = RepeatPreviousVectorEnv(2)
    env.reset(seed=0)
    with pytest.raises(ArgumentError, match=r"reset_mask must be bool of shape \(2,\) with at least one True; got "):
        env.reset(options={"reset_mask": mask})


def test_other_options_and_a_partial_first_reset_are_refused():
    env = MaskedCartPoleVectorEnv(2)
    with pytest.raises(ArgumentError, match=r"only option of reset is 'reset_mask'; got \['high', 'low'\]"):
        env.reset(options={"low": 0.0, "high": 0.1})
    with pytest.raises(UsageError, match="first reset must reset every row"):
        env.reset(options={"reset_mask": np.array([True, False])})
    env.reset(options={"reset_mask": np.array([True, True])})

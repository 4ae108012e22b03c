from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary
from tensordict import TensorDict

from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.envs import TensorEnv
from recurl.envs.tasks import (
    Bandit,
    ColorCubes,
    Dynamics,
    EndlessTMaze,
    MaskedArm,
    MaskedCartPole,
    MaskedPendulum,
    RepeatPrevious,
    RockSample,
    TaskVectorEnv,
    TMaze,
    check_dynamics,
)
from recurl.envs.tasks.namespaces import HOST, RowDraw, TensorDraw, tensors_on


class Walk(Dynamics):
    """Walk along a line; each function can be replaced."""

    def __init__(self, **functions):
        super().__init__(observation_space=Box(-9.0, 9.0, (1,), np.float32), actions=2, step_limit=5)
        vars(self).update(functions)

    def begin(self, xp, draw):
        return {"place": draw.uniform(-1.0, 1.0)}

    def advance(self, xp, state, steps, actions):
        place = state["place"] + 2 * actions - 1
        return {"place": place}, -xp.abs(place), xp.abs(place) > 3.0

    def observe(self, xp, state, steps):
        return xp.astype(state["place"][:, None], xp.float32)


class Walk2(Dynamics):
    """Walk on a board: an action picks one of two directions along the first axis and one of three along the second."""

    def __init__(self):
        super().__init__(observation_space=Box(-9.0, 9.0, (2,), np.float32), actions=(2, 3), step_limit=5)

    def begin(self, xp, draw):
        return {"place": draw.uniform(-1.0, 1.0, (2,))}

    def advance(self, xp, state, steps, actions):
        place = state["place"] + actions.T
        return {"place": place}, place[0] - place[1], place[0] > 4.0

    def observe(self, xp, state, steps):
        return xp.astype(state["place"].T, xp.float32)


class Pair(Walk):
    """Walk that observes its place as a number, and separately in bits."""

    def __init__(self, **functions):
        super().__init__(**functions)
        self.observation_space = Dict(place=Box(-9.0, 9.0, (1,), np.float32), side=MultiBinary(2))

    def observe(self, xp, state, steps):
        place = state["place"]
        side = xp.astype(xp.stack((place < 0, place >= 0), axis=1), xp.int8)
        return {"side": side, "place": xp.astype(place[:, None], xp.float32)}


@pytest.mark.parametrize(
    ("observed", "message"),
    [
        (
            lambda xp, state, steps: xp.zeros((len(steps), 1)),
            r"observe must return a dict with the names \['place', 'si",
        ),
        (lambda xp, state, steps: {"place": xp.zeros((len(steps), 1))}, "must return a dict with the names"),
        (
            lambda xp, state, steps: {"place": xp.zeros((len(steps), 1)), "side": xp.zeros(2)},
            r"observations 'place' of Pair\.observe must be float32 of shape \(1, 1\); got float64",
        ),
    ],
)
def test_observations_of_several_arrays_must_be_those_of_the_space(observed, message):
    with pytest.raises(ArgumentError, match=message):
        TaskVectorEnv(Pair(observe=observed), 1)


def test_one_array_is_not_a_dict():
    with pytest.raises(ArgumentError, match=r"Walk\.observe must return one array, as its observation_space; got"):
        TaskVectorEnv(Walk(observe=lambda xp, state, steps: {"observation": xp.zeros((1, 1))}), 1)


def test_parts_of_an_observation_may_be_left_out():
    env = TensorEnv(Pair(), 3, drop_observations=["side"])
    whole = TensorEnv(Pair(), 3)
    for made in (env, whole):
        made.set_seed(0)
    left, right = env.reset(), whole.reset()
    assert set(right.keys()) - set(left.keys()) == {"side"}
    assert torch.equal(left["place"], right["place"])
    assert right["side"].dtype == torch.int8
    assert list(env.observation_spec.keys()) == ["place"]
    with pytest.raises(ArgumentError, match="'hidden'"):
        TensorEnv(Pair(), 3, drop_observations=["hidden"])
    with pytest.raises(ArgumentError, match=r"observation"):
        TensorEnv(Walk(), 3, drop_observations=["observation"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "dynamics",
    [
        Bandit(),
        ColorCubes(hide_colors=True),
        EndlessTMaze(random_lengths=True),
        RockSample(),
        MaskedArm(),
        MaskedArm(gravity=True),
        MaskedCartPole(),
        MaskedPendulum(),
        RepeatPrevious(),
        TMaze(),
        Walk(),
        Walk2(),
        Pair(),
    ],
    ids=lambda made: type(made).__name__,
)
def test_one_step_agrees_at_every_step_of_100_episodes(dynamics):
    assert check_dynamics(dynamics, episodes=100) <= 4.0


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        (
            {"begin": lambda xp, draw: {"place": xp.zeros(7)}},
            r"last axis .*Walk\.begin returns must have one entry for each of the \d rows",
        ),
        (
            {"observe": lambda xp, state, steps: state["place"]},
            r"observations of Walk\.observe must be float32 of shape \(\d, 1\); got float64 of shape \(\d,\)",
        ),
        (
            {"advance": lambda xp, state, steps, actions: (state, 1.0, steps > 3)},
            r"rewards of Walk\.advance must be float of shape \(\d,\); got float of shape \(\)",
        ),
        (
            {"advance": lambda xp, state, steps, actions: (state, state["place"], steps)},
            r"terminated of Walk\.advance must be bool of shape \(\d,\); got int64",
        ),
        (
            {"advance": lambda xp, state, steps, actions: ({}, state["place"], steps > 3)},
            r"Walk\.advance must return a state like the one it got, .*place.*; got \{\}",
        ),
    ],
)
def test_wrong_results_are_refused(functions, message):
    with pytest.raises(ArgumentError, match=message):
        TaskVectorEnv(Walk(**functions), 3)
    with pytest.raises(ArgumentError, match=message):
        TensorEnv(Walk(**functions), 3)


@pytest.mark.parametrize("actions", [0, -1, True, 2.5, "two", [], [2, 0], Discrete(3), None])
def test_actions_that_are_no_numbers_are_refused(actions):
    with pytest.raises(ArgumentError, match=r"actions must be the number of actions, such as 3; .*got"):
        Dynamics.__init__(Walk(), observation_space=Box(-1, 1, (1,)), actions=actions, step_limit=5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"observation_space": Discrete(2)}, "observation_space of Walk must be a Box or MultiBinary"),
        ({"observation_space": Dict()}, "observation_space of Walk must be a Box or MultiBinary"),
        ({"observation_space": Dict(a=Dict(x=Box(-1, 1, (1,))))}, "or a flat Dict of these; got Dict"),
        ({"observation_space": Dict(action_mask=MultiBinary(2))}, "can't be named 'action_mask': a task has no action"),
        ({"step_limit": 0}, "step_limit must be an integer of at least 1; got 0"),
        ({"step_limit": None}, "step_limit must be an integer of at least 1; got None"),
    ],
)
def test_other_arguments_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        Dynamics.__init__(Walk(), **{"observation_space": Box(-1, 1, (1,)), "actions": 2, "step_limit": 5, **arguments})


def test_a_device_that_isnt_there_is_refused():
    for use in (
        lambda device: TensorEnv(Walk(), 2, device=device),
        lambda device: check_dynamics(Walk(), device=device),
    ):
        with pytest.raises(ArgumentError, match=r"--device cuda:9 can't be used"):
            use("cuda:9")


def test_an_action_may_choose_several_things():
    host, device = TaskVectorEnv(Walk2(), 3, "Disabled"), TensorEnv(Walk2(), 3)
    assert str(host.single_action_space) == "MultiDiscrete([2 3])"
    device.reset()
    device.running = {"place": torch.zeros(2, 3, dtype=torch.float64), "steps": torch.zeros(3, dtype=torch.int64)}
    actions = [[0, 0], [1, 2], [0, 1]]
    step = device.step(TensorDict({"action": torch.tensor(actions)}, [3]))
    np.testing.assert_array_equal(step["next", "observation"], np.array(actions))
    host.reset()
    before = host.state["place"].T
    np.testing.assert_array_equal(host.step(actions)[0], (before + actions).astype(np.float32))
    np.testing.assert_array_equal(host.action_space.high, [[1, 2]] * 3)


@pytest.mark.parametrize(
    ("actions", "came"),
    [
        ([[0, 3]] * 3, r"values from \[0 3\] to \[0 3\]"),
        ([[0, -1]] * 3, r"values from \[ 0 -1\] to \[ 0 -1\]"),
        ([0, 1, 1], r"int64 of shape \(3,\)"),
        ([[0.0, 1.0]] * 3, r"float64 of shape \(3, 2\)"),
    ],
)
def test_choices_out_of_range_are_refused(actions, came):
    env = TaskVectorEnv(Walk2(), 3)
    env.reset()
    with pytest.raises(ArgumentError, match=r"integers in \[0, \[2, 3\]\) of shape \(3, 2\); got " + came):
        env.step(actions)


@pytest.mark.parametrize("actions", [torch.zeros(3, dtype=torch.int64), torch.zeros(3, 2), torch.zeros(3, 2).bool()])
def test_choices_of_another_kind_are_refused_on_a_device(actions):
    env = TensorEnv(Walk2(), 3)
    env.reset()
    with pytest.raises(ArgumentError, match=r"actions must be integers of shape \[3, 2\], got torch"):
        env.step(TensorDict({"action": actions}, [3]))


KEPT = np.zeros(1)


@pytest.mark.parametrize(
    ("begin", "advance"),
    [
        (lambda xp, draw: {"x": draw.uniform(0, 1)}, lambda state: {"x": KEPT}),
        (lambda xp, draw: {"x": draw.uniform(0, 1)}, lambda state: {"x": np.broadcast_to(state["x"][:1], (1,))}),
        (lambda xp, draw: dict.fromkeys("xy", draw.uniform(0, 1)), lambda state: dict.fromkeys("xy", state["x"] + 1)),
    ],
    ids=["constant", "read-only", "twice"],
)
def test_arrays_that_must_not_be_written_to_are_refused(begin, advance):
    def step(xp, state, steps, actions):
        return advance(state), xp.ones(len(steps)), steps > 3

    def observe(xp, state, steps):
        return xp.astype(state["x"][:, None], xp.float32)

    with pytest.raises(
        ArgumentError, match=r"must be a new one, .* but 'x' is read-only or shares its memory with another"
    ):
        TaskVectorEnv(Walk(begin=begin, advance=step, observe=observe), 1)


def test_observations_that_are_views_of_the_state_are_refused():
    def begin(xp, draw):
        return {"place": xp.astype(draw.uniform(0, 1), xp.float32)}

    def advance(xp, state, steps, actions):
        return {"place": state["place"] * 0.5}, xp.ones(len(steps)), steps > 3

    views = Walk(begin=begin, advance=advance, observe=lambda xp, state, steps: state["place"][:, None])
    with pytest.raises(ArgumentError, match="'place' is read-only or shares its memory with another"):
        TaskVectorEnv(views, 1)


def test_functions_that_read_back_are_refused_with_their_line():
    def advance(xp, state, steps, actions):
        if xp.any(state["place"] > 100):
            raise AssertionError
        return Walk().advance(xp, state, steps, actions)

    with pytest.raises(UnsupportedError, match=r"test_dynamics\.py:\d+ does `if xp\.any\(state"):
        check_dynamics(Walk(advance=advance))


def test_functions_of_numpy_are_refused_with_their_line():
    def advance(xp, state, steps, actions):
        place = xp.asarray(np.asarray(state["place"]) * 0.5)
        return {"place": place}, place * 1.0, place > 3.0

    with pytest.raises(UnsupportedError, match=r"test_dynamics\.py:\d+ does `place = xp.*; use functions of torch"):
        check_dynamics(Walk(advance=advance))


def in_place(xp, state, steps, actions):
    state["place"] += 1
    return Walk().advance(xp, state, steps, actions)


def in_the_dict(xp, state, steps, actions):
    result = Walk().advance(xp, state, steps, actions)
    state["place"] = result[0]["place"]
    return result


def counted(xp, state, steps, actions):
    steps += 1
    return Walk().advance(xp, state, steps, actions)


def observed_in_place(xp, state, steps):
    state["place"] *= 0.5
    return Walk().observe(xp, state, steps)


CONSTANT = {"begin": lambda xp, draw: {"place": draw.uniform(1.0, 2.0)}}


@pytest.mark.parametrize("make", [lambda task: TaskVectorEnv(task, 3), lambda task: TensorEnv(task, 3), check_dynamics])
@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ({"advance": in_place}, r"Walk\.advance must not change its arguments: return new arrays"),
        ({"advance": in_the_dict}, r"Walk\.advance must not change its arguments"),
        ({"advance": counted}, r"Walk\.advance must not change its arguments"),
        ({"observe": observed_in_place, **CONSTANT}, r"Walk\.observe must not change its arguments"),
        (
            {"begin": lambda xp, draw: {"place": draw.uniform(0, 1) + random.random()}},
            r"Walk\.begin must return the same .* a second call differed: draw all random numbers in begin, with draw",
        ),
        (
            {"advance": lambda xp, state, steps, actions: (state, state["place"] * random.random(), steps > 3)},
            r"Walk\.advance must return the same for the same arguments",
        ),
        (
            {"advance": lambda xp, state, steps, actions: (state, steps > 3)},
            r"the state, the rewards and terminated; got",
        ),
        ({"begin": lambda xp, draw: draw.uniform(0, 1)}, r"Walk\.begin must return a dict of arrays; got"),
        ({"begin": lambda xp, draw: {"place": 3}}, r"Walk\.begin must return a dict of arrays; got .*'place': 'int'"),
        (
            {"advance": lambda xp, state, steps, actions: 1 / 0},
            r"Walk\.advance fails on .*, as .*test_dynamics\.py:\d+ does `.*`: ZeroDivisionError",
        ),
    ],
)
def test_functions_that_break_the_rules_are_refused(make, functions, message):
    with pytest.raises(ArgumentError, match=message):
        make(Walk(**functions))


@pytest.mark.parametrize(
    ("advance", "message"),
    [
        (
            lambda xp, state, steps, actions: (state, xp.interp(state["place"], [0, 1], [0, 1]), steps > 3),
            r"Walk\.advance fails on a device, as .*test_dynamics\.py:\d+ does .* no attribute 'interp'",
        ),
        (
            lambda xp, state, steps, actions: ({"place": np.ones(len(steps))}, state["place"], steps > 3),
            r"Walk\.advance must return arrays of xp, NumPy arrays on the host and tensors on a device",
        ),
    ],
)
def test_functions_that_only_numpy_has_are_refused_on_a_device(advance, message):
    TaskVectorEnv(Walk(advance=advance), 3)
    with pytest.raises(ArgumentError, match=message):
        TensorEnv(Walk(advance=advance), 3)
    with pytest.raises(ArgumentError, match=message):
        check_dynamics(Walk(advance=advance))


def test_states_of_another_dtype_on_a_device_are_refused():
    def begin(xp, draw):
        return {"place": draw.integers(3) * 0.5}

    def advance(xp, state, steps, actions):
        return {"place": state["place"] * 0.5}, state["place"] * 1.0, steps > 3

    with pytest.raises(ArgumentError, match=r"'place' is float64 and float32: .* xp\.astype\(array, xp\.float64\)"):
        check_dynamics(Walk(begin=begin, advance=advance))


def test_numbers_that_are_not_finite_on_both_sides_agree():
    def advance(xp, state, steps, actions):
        return {"place": state["place"] / 0.0}, xp.log(-xp.abs(state["place"]) - 1.0), steps > 3

    with np.errstate(all="ignore"):
        assert check_dynamics(Walk(advance=advance)) == 0.0


def test_functions_that_differ_are_refused():
    def advance(xp, state, steps, actions):
        state, reward, terminated = Walk().advance(xp, state, steps, actions)
        return state, reward * (1 if xp is HOST else 1 + 2**-20), terminated

    with pytest.raises(ArgumentError, match=r"on the host and on cpu, but after step 0 the rewards differ: .* ulps"):
        check_dynamics(Walk(advance=advance))


@pytest.mark.parametrize("rows", [1, 3])
def test_draws_have_the_rows_last(rows):
    generators = [np.random.default_rng(seed) for seed in range(rows)]
    for draw in (RowDraw(generators), TensorDraw(torch.Generator().manual_seed(0), rows)):
        for shape in ((), (4,), (2, 3)):
            assert tuple(draw.uniform(-2.0, -1.0, shape).shape) == (*shape, rows)
            assert tuple(draw.normal(shape).shape) == (*shape, rows)
            assert tuple(draw.integers(3, shape).shape) == (*shape, rows)
        many = draw.uniform(-2.0, -1.0, (500,))
        assert -2 <= many.min() <= -1.9 <= -1.1 <= many.max() < -1
        assert abs(float(draw.normal((4000,)).mean())) < 0.1
        assert set(draw.integers(3, (100,)).ravel().tolist()) == {0, 1, 2}


def test_draws_of_a_row_depend_on_its_generator_alone():
    one, other = (RowDraw([np.random.default_rng(seed) for seed in seeds]) for seeds in ((1, 2), (0, 2)))
    for draw in ("uniform", "normal", "integers"):
        arguments = {"uniform": (0, 1), "normal": (), "integers": (100,)}[draw]
        left, right = (getattr(rows, draw)(*arguments, (2, 3)) for rows in (one, other))
        np.testing.assert_array_equal(left[..., 1], right[..., 1])
        assert (left[..., 0] != right[..., 0]).any()


def test_both_namespaces_have_the_same_functions():
    def use(xp):
        table, index = xp.asarray(np.arange(12).reshape(4, 3)), xp.asarray(np.array([3, 0, 2]))
        mask = index > 1
        return [
            xp.pick(table, index),
            xp.take(table, index),
            xp.take(table, index[1:], axis=1),
            xp.stack((index, index)),
            xp.stack((index, index), axis=1),
            xp.concat((table, table)),
            xp.astype(table.T, xp.float32),
            xp.where(mask, 1.0, 0.0),
            xp.where(mask, index, 0),
            xp.where(mask, 2, 1),
            xp.zeros(2),
            xp.ones((2, 2), dtype=xp.float32),
            xp.full((2,), 7),
            xp.full((2,), 7.0),
            xp.arange(3),
            xp.eye(2),
            xp.zeros(2, dtype=xp.bool),
            xp.clip(xp.cos(xp.asarray(np.ones(2)) * xp.pi), -0.5, 0.5),
        ]

    for left, right in zip(use(HOST), use(tensors_on("cpu")), strict=True):
        assert str(left.dtype) == str(right.dtype).removeprefix("torch.")
        np.testing.assert_array_equal(left, right.numpy())
        assert right.is_contiguous()


def test_constants_are_sent_once():
    xp = tensors_on("cpu")
    assert xp.asarray(KEPT) is xp.asarray(KEPT)
    assert xp.asarray([1.0, 2.0]).dtype == torch.float64

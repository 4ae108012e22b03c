"""Environment states as plain data: supported values, and the limits of a manipulated state."""

from __future__ import annotations

import collections
import enum
import functools
import json
import random
import threading
import time
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch

from recurl.core.errors import ArgumentError, UnsupportedError, UsageError
from recurl.envs import GymEnv, GymWrapper, ParallelEnv, SerialEnv, state_trial
from recurl.envs.gym_state import restore, save
from recurl.envs.state_graph import GraphReader, GraphWriter
from recurl.envs.state_plain import UnsavableError


class Color(enum.Enum):
    RED = 1
    BLUE = 2


Point = collections.namedtuple("Point", "x y")


class Box:
    """Object with attributes."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Closing(Box):
    def __del__(self):
        Closing.closed = getattr(Closing, "closed", 0) + 1


class Hashed(Box):
    def __hash__(self):
        return 0


class Holder(gym.Env):
    """Environment with arbitrary attributes."""

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}


def copied(used, fresh):
    """Restore the state of ``used`` into ``fresh``, in the form given to ``torch.save``."""
    GraphReader(GraphWriter().written(used)).restore(fresh)
    return fresh


def test_sets_of_classes_have_those_of_the_fresh_object():
    fresh = Holder(kinds=[{Holder, dict}, {Holder, dict}])
    assert copied(Holder(kinds=[{Holder}, {1, dict}]), fresh).kinds == [{Holder}, {1, dict}]
    with pytest.raises(ArgumentError, match=r"has builtins\.dict where a fresh environment has None"):
        copied(Holder(kinds={dict}), Holder(kinds={list}))


def counting():
    count = 0

    def following():
        nonlocal count
        count += 1
        return count

    return following


def test_values_of_every_kind_are_kept():
    values = {
        "plain": [
            None,
            True,
            -3,
            2**130,
            -0.0,
            float("inf"),
            "\ud800é",
            b"\0\xff",
            1 - 2j,
            ...,
            slice(1, None),
            range(3),
        ],
        "nested": (
            Point(1, (2,)),
            frozenset({1, (2, 3)}),
            {"k": {3: [4]}},
            Color.BLUE,
            np.float32(0.1),
            np.bool_(True),
        ),
        "sets": {1, "a", Color.RED},
        "ordered": collections.OrderedDict(b=1, a=2),
        "counter": collections.Counter("aab"),
        "queue": collections.deque([1, 2, 3], 3),
        "raw": bytearray(b"ab"),
        "arrays": [np.arange(6.0).reshape(2, 3), np.array(3, np.int8), np.zeros((0, 2)), np.array(["x", "yz"])],
        "columns": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "when": np.array("2026-01-02", "M8[D]"),
        "objects": np.array([[1], None], object),
        "tensor": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,
        "dtype": np.dtype("float16"),
    }
    found = copied(Holder(**values), Holder()).__dict__
    assert found.pop("sets") == values.pop("sets")
    assert repr(found) == repr(values)
    assert found["columns"].flags.f_contiguous
    assert found["tensor"].stride() == values["tensor"].stride()


def test_generators_continue():
    def holding(seed):
        return Box(
            numbers=np.random.default_rng(seed),
            twister=np.random.Generator(np.random.MT19937(seed)),
            philox=np.random.Generator(np.random.Philox(seed)),
            legacy=np.random.RandomState(seed),
            python=random.Random(seed),
            torch=torch.Generator().manual_seed(seed),
        )

    def drawn(box):
        children = [child.random() for child in box.numbers.spawn(2)]
        arrays = [box.numbers.normal(), box.twister.random(), box.philox.random(), box.legacy.normal()]
        return [*children, *arrays, box.python.random(), torch.rand(2, generator=box.torch).tolist()]

    used, fresh = holding(1), holding(2)
    drawn(used)
    copied(used, fresh)
    assert drawn(used) == drawn(fresh)


def test_aliases_and_views_stay_such():
    cells, tensor = np.arange(12.0).reshape(3, 4), torch.arange(6.0)
    used = Box(cells=cells, same=cells, part=cells[1:, ::-2], tensor=tensor, tail=tensor[2:].view(2, 2))
    used.me, used.pair = used, [[1]] * 2
    fresh = copied(used, Box(cells=np.zeros((3, 4)), same=None, alias_once=0))
    assert fresh.cells is fresh.same
    assert np.array_equal(fresh.part, used.part)
    fresh.cells += 1
    assert np.array_equal(fresh.part, used.part + 1)
    fresh.tensor += 1
    assert torch.equal(fresh.tail, used.tail + 1)
    assert fresh.me is fresh
    assert fresh.pair[0] is fresh.pair[1]
    assert not hasattr(fresh, "alias_once")


def test_sharing_in_the_fresh_object_alone():
    shared = np.zeros(2)
    fresh = copied(Box(a=np.array([1.0, 2.0]), b=np.array([3.0, 4.0])), Box(a=shared, b=shared))
    assert (fresh.a.tolist(), fresh.b.tolist()) == ([1, 2], [3, 4])


def test_functions_are_those_of_the_fresh_object():
    def holding():
        box = Box(count=counting(), kind=dict, module=json, partial=functools.partial(sum, [1]), lock=threading.Lock())
        box.method = box.__init__
        return box

    used, fresh = holding(), holding()
    used.count(), used.count()
    used.partial.args[0].append(4)
    before = fresh.lock
    copied(used, fresh)
    assert (used.count(), fresh.count()) == (3, 3)
    assert fresh.partial() == 5
    assert fresh.method.__self__ is fresh
    assert fresh.lock is before


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ((n for n in range(3)), r"Holder\.thing is of type generator"),
        (memoryview(b"a"), r"Holder\.thing is of type memoryview"),
        ([1, iter([1])], r"Holder\.thing\[1\] is of type list_iterator"),
        (Box(inner=Box(x=ValueError())), r"Box\.x is of type ValueError"),
        (np.zeros(2, [("a", "i4")]), r"Holder\.thing holds NumPy values of dtype"),
        (
            torch.ones(2, requires_grad=True) * 2,
            r"Holder\.thing is a tensor that is sparse, on cpu, or part of a graph",
        ),
        (np.zeros(2**27, np.uint8), r"its state is larger than 64 MiB"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_unsavable_values_are_named(value, words):
    with pytest.raises(UnsavableError, match=words):
        GraphWriter().written(Holder(thing=value))


def tampered(env, change):
    state = GraphWriter().written(env)
    begin, nodes = json.loads(state["objects"])
    change(nodes)
    return {**state, "objects": json.dumps([begin, nodes])}


def put(value):
    """Return a modification of nodes that sets the attribute ``thing``."""

    def change(nodes):
        (attribute,) = [pair for pair in nodes[0][3] if pair[0] == "thing"]
        if isinstance(value, list) and value[:1] == ["node"]:
            nodes.append(value[1])
            attribute[1] = ["ref", len(nodes) - 1]
        else:
            attribute[1] = value

    return change


HOSTILE = {
    "a function": ["same", "posix", "system"],
    "a class": ["same", "subprocess", "Popen"],
    "an object of another package": ["node", ["object", "subprocess", "Popen", []]],
    "an object of recurl": ["node", ["object", "recurl.envs.gym", "GymEnv", []]],
    "a class that isn't imported": ["node", ["object", "tests.envs.evil", "Evil", []]],
    "no class": ["node", ["object", __name__, "counting", []]],
    "an environment": ["node", ["object", __name__, "Holder", []]],
    "a space": ["node", ["object", "gymnasium.spaces.discrete", "Discrete", []]],
    "an object with a finalizer": ["node", ["object", __name__, "Closing", []]],
    "a method": ["node", ["method", "close", ["ref", 0]]],
    "a function elsewhere": ["node", ["function", "os", "system", []]],
    "a partial": ["node", ["partial", [["same", "posix", "system"], ["tuple", ["x"]], None]]],
    "an emulator": ["node", ["foreign", "ale_py._ale_py.ALEInterface", ["bytes", 0, 1]]],
    "something foreign": ["node", ["foreign", "os.system", 1]],
    "an unknown kind": ["node", ["restore", 1]],
    "a kind of the reader": ["node", ["_empty", "os", "system"]],
    "a node that isn't there": ["ref", 10**6],
    "a negative node": ["ref", "x"],
    "an array larger than its bytes": ["node", ["array", "<f8", [10**9], False, 0, 1, True]],
    "an array of negative size": ["node", ["array", "<f8", [-1, -1], False, 0, 8, True]],
    "an array of objects": ["node", ["array", "|O", [1], False, 0, 1, True]],
    "a scalar object": ["number", "|O", 0, 8],
    "bytes that aren't there": ["bytes", -4, 2],
    "a view beyond its base": ["node", ["view", ["ref", 2], "<f8", [100], [8], 0, True]],
    "a hash": ["node", ["set", [["ref", 3]]]],
    "an enum": ["enum", __name__, "Color", "GREEN"],
    "a generator beyond its words": [
        "node",
        [
            "foreign",
            "numpy.random._generator.Generator",
            [
                "dict",
                [
                    ["bits", ["dict", [["bit_generator", "MT19937"], ["state", ["dict", [["pos", 10**6]]]]]]],
                    ["seeds", None],
                ],
            ],
        ],
    ],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_state_that_was_tampered_with_runs_nothing(name):
    def holding():
        return Holder(thing=None, array=np.zeros(1), hashed=Hashed())

    state = tampered(holding(), put(HOSTILE[name]))
    fresh = holding()
    with pytest.raises(ArgumentError):
        GraphReader(state).restore(fresh)
    assert getattr(Closing, "closed", 0) == 0


@pytest.mark.parametrize("name", ["step", "reset", "__class__", "unwrapped"])
def test_methods_are_not_hidden(name):
    state = tampered(Holder(), lambda nodes: nodes[0][3].append([name, 1]))
    with pytest.raises(ArgumentError, match=f"has the attribute '{name}', which the class .* defines"):
        GraphReader(state).restore(Holder())


def test_deeply_nested_states_are_refused():
    value = 1
    for _ in range(100):
        value = ["tuple", [value]]
    state = tampered(Holder(thing=None), put(value))
    GraphReader(state).restore(Holder())  # this depth is supported
    state["objects"] = "[" * 10**5
    with pytest.raises(ArgumentError, match="RecursionError"):
        GraphReader(state).restore(Holder())


def test_the_state_of_another_environment_is_refused():
    state = save(gym.make("CartPole-v1"))
    with pytest.raises(ArgumentError, match="other"):
        restore(gym.make("Pendulum-v1"), state)
    with pytest.raises(ArgumentError, match="other"):
        restore(gym.make("CartPole-v1").unwrapped, state)
    with pytest.raises(ArgumentError, match="restores only states"):
        GymEnv("CartPole-v1").set_state({})
    with pytest.raises(ArgumentError, match="restores only states"):
        SerialEnv(1, lambda: GymEnv("CartPole-v1")).set_state({})


class Slow(Holder):
    def step(self, action):
        time.sleep(0.02)
        return super().step(action)


class Global(Holder):
    def step(self, action):
        return np.float32([random.random()]), 0.0, False, False, {}


class Shared(Holder):
    count: ClassVar = [0]

    def step(self, action):
        self.count[0] += 1
        return np.zeros(1, np.float32), float(self.count[0]), False, False, {}


class Quits(Holder):
    def step(self, action):
        raise OSError("no such machine")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Slow, "a trial of it takes longer than 0.1 s"),
        (Global, "'observation' of step 1 after saving differs once the state is restored"),
        (Shared, "'reward' of step 1 after saving differs once the state is restored"),
        (Quits, "a trial of it raised OSError: no such machine"),
    ],
)
def test_a_trial_names_the_missing_part_of_a_state(kind, words, monkeypatch):
    monkeypatch.setattr(state_trial, "_TIMEOUT_SECONDS", 0.1 if kind is Slow else 60.0)
    random.seed(1)
    state = random.getstate(), torch.get_rng_state()
    env = GymWrapper(kind(), create_env=kind)
    assert (env.can_save_state, env.state_obstacle) == (False, words)
    assert random.getstate() == state[0]
    assert torch.equal(torch.get_rng_state(), state[1])
    with pytest.raises(UnsupportedError, match=f"can't save its state: {words}"):
        env.get_state()


def test_a_trial_needs_other_environments():
    assert "needs a function that creates such" in str(GymWrapper(Holder()).state_obstacle)
    one = Holder()
    env = GymWrapper(one, create_env=lambda: one)
    assert "must create a new one at every call" in str(env.state_obstacle)
    assert GymWrapper(gym.make("CartPole-v1")).can_save_state
    env.step(env.rand_action(env.reset()))  # it has not been closed


@pytest.mark.slow
@pytest.mark.usefixtures("shared_interpreter")
def test_one_worker_of_each_kind_makes_the_trial(tmp_path):
    def make(name):
        def create():
            (tmp_path / name).open("a").write("x")
            return Holder()

        return lambda: GymWrapper(create(), create_env=create)

    alone, other = make("a"), make("b")
    with ParallelEnv(3, [alone, other, alone]) as env:
        assert env.can_save_state
        env.reset()
        env.set_state(env.get_state())
    assert [(tmp_path / name).read_text() for name in "ab"] == ["x" * 4, "x" * 3]
    with ParallelEnv(2, lambda: GymWrapper(Holder())) as env:
        assert "needs a function" in str(env.state_obstacle)
        with pytest.raises(UnsupportedError, match="can't save its state: it was passed as an object"):
            env.get_state()
    with pytest.raises(UsageError):
        env.set_state({"envs": []})


@pytest.mark.slow
@pytest.mark.usefixtures("shared_interpreter")
def test_a_trial_may_take_longer_than_a_step():
    with ParallelEnv(1, lambda: GymWrapper(Slow(), create_env=Slow), timeout=0.3) as env:
        assert env.can_save_state  # two seconds of steps
        env.step(env.rand_action(env.reset()))

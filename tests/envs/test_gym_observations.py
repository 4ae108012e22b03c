from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array

from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.core.specs import Categorical, MultiCategorical, OneHot
from recurl.envs import GymEnv, GymWrapper, check_env_specs
from recurl.envs.gym_spaces import ObservationReader
from tests.envs.small import CountEnv

spaces = gym.spaces
PARTS = spaces.Dict(
    {
        "image": spaces.Box(0, 255, (5, 4, 3), np.uint8),
        "pair": spaces.Tuple(
            [
                spaces.Discrete(3, start=4),
                spaces.Dict({"deep": spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 0], [0, 2]])}),
            ]
        ),
        "mission": spaces.Text(10),
        "graph": spaces.Graph(spaces.Box(0, 1, (2,)), None),
        "words": spaces.Dict({"list": spaces.Sequence(spaces.Discrete(3)), "size": spaces.Box(0, 9, (1,), np.int16)}),
    }
)
DROPPED = ["mission", "graph", "words.list"]


class Parts(CountEnv):
    """CountEnv with all kinds of spaces in its observations."""

    observation_space = PARTS


class NativeParts(VectorEnv):
    """Two rows with equal observations, which end after three steps and reset within the step."""

    single_observation_space = PARTS
    single_action_space = spaces.Discrete(3)

    def __init__(self, num_envs=2):
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.observation_space = batch_space(PARTS, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.time = 0

    def _observe(self):
        rows = [PARTS.sample() for _ in range(self.num_envs)]
        return concatenate(PARTS, rows, create_empty_array(PARTS, self.num_envs))

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return self._observe(), {}

    def step(self, actions):
        self.time += 1
        over = np.full(self.num_envs, self.time % 3 == 0)
        info = {"final_obs": self._observe()} if over.any() else {}
        return self._observe(), np.zeros(self.num_envs), over, np.zeros_like(over), info


@pytest.fixture(scope="module")
def registered():
    gym.register("SpacesParts-v0", entry_point=Parts)
    yield "SpacesParts-v0"
    del gym.registry["SpacesParts-v0"]


def check_parts(env):
    check_env_specs(env)
    batch = env.rollout(7, break_when_any_done=False)
    assert set(batch["next"].keys()) - {"reward", "done", "terminated", "truncated"} == {"image", "pair", "words"}
    assert batch["image"].dtype == torch.uint8
    assert batch["pair", "0"].shape == (*batch.shape, 3)
    assert batch["pair", "1", "deep"].shape == (*batch.shape, 4)
    assert (batch["pair", "1", "deep"] < torch.tensor([2, 3, 4, 5])).all()
    assert list(batch["words"].keys()) == ["size"]
    env.close()


@pytest.mark.parametrize("options", [{}, {"num_envs": 2, "vectorization_mode": "sync"}], ids=["single", "sync"])
def test_nested_spaces_in_gymnasium_environments(registered, options):
    check_parts(GymEnv(registered, drop_observations=DROPPED, **options))


@pytest.mark.slow
@pytest.mark.usefixtures("forked_environments")
def test_nested_spaces_in_processes(registered):
    env = GymEnv(registered, num_envs=2, vectorization_mode="async", drop_observations=DROPPED)
    check_parts(env)


def test_nested_spaces_in_native_vector_environments():
    check_parts(GymWrapper(NativeParts(), drop_observations=DROPPED))


@pytest.mark.parametrize(("key", "name"), [("mission", "Text"), ("graph", "Graph"), ("words.list", "Sequence")])
def test_entries_without_tensors_are_refused_by_key(key, name):
    others = [dropped for dropped in DROPPED if dropped != key]
    with pytest.raises(
        UnsupportedError, match=rf"observation '{key}' is {name}.*\(--drop-observations {key}\), or wrap"
    ):
        ObservationReader(PARTS, [], "env", others)


def test_a_space_without_tensors_is_refused():
    with pytest.raises(
        UnsupportedError, match=r"'observation' is Text.*: wrap the environment to return Box, Discrete"
    ):
        ObservationReader(spaces.Text(3), [], "env")


def test_a_name_drops_all_below_it():
    spec = ObservationReader(PARTS, [], "env", [("words",), "mission", "graph", "pair.1"]).spec
    assert set(spec.keys(True, True)) == {"image", ("pair", "0")}


@pytest.mark.parametrize(
    ("space", "drop", "match"),
    [
        (PARTS, ["misson"], r"no observation 'misson' to drop.*which has graph, image.*did you mean mission\?"),
        (spaces.Discrete(3), ["mission"], r"no observation 'mission' to drop.*which is Discrete\(3\)\."),
        (spaces.Dict({"a": spaces.Text(2)}), ["a"], "At least one observation must be kept, but a of"),
        (spaces.Dict({}), [], "At least one observation must be kept, but nothing of"),
    ],
)
def test_drops_that_dont_fit_are_refused(space, drop, match):
    with pytest.raises(ArgumentError, match=match):
        ObservationReader(space, [], "env", drop)


@pytest.mark.parametrize(
    "dtype",
    ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"],
)
@pytest.mark.parametrize("rows", [[], [2]], ids=str)
def test_boxes_of_every_dtype(dtype, rows):
    kind = np.dtype(dtype)
    low, high = (0, 1) if kind.kind in "bf" else (np.iinfo(kind).min, np.iinfo(kind).max)
    reader = ObservationReader(spaces.Box(low, high, (2, 3), kind.type), rows, "env")
    spec = reader.spec["observation"].expand(*rows, 2, 3)
    value = np.full((*rows, 2, 3), 1, kind)
    found = reader.read(value)["observation"]
    assert spec.is_in(found)
    assert found.tolist() == value.tolist()
    wider = {"uint16": "int32", "uint32": "int64", "uint64": "int64", "float64": "float32"}
    assert found.dtype == getattr(torch, wider.get(dtype, dtype))
    assert torch.equal(found * 0 if kind.kind != "b" else found & False, torch.zeros_like(found))


def test_numbers_that_dont_fit_into_int64_are_refused():
    reader = ObservationReader(spaces.Box(0, np.iinfo(np.uint64).max, (1,), np.uint64), [], "env")
    with pytest.raises(ArgumentError, match="out of the range of int64"):
        reader.read(np.array([2**63 + 5], np.uint64))


@pytest.mark.parametrize("rows", [[], [2]], ids=str)
def test_choices_count_from_zero(rows):
    def read(space, value):
        reader = ObservationReader(space, rows, "env")
        value = np.array(value)
        return reader.spec["observation"], reader.read(np.stack([value] * 2) if rows else value)["observation"]

    spec, found = read(spaces.Discrete(4, start=-2), 1)
    assert spec == OneHot(4, dtype=torch.float32)
    assert found.expand(2, 4)[1].tolist() == [0, 0, 0, 1]
    spec, found = read(spaces.Discrete(100_000, start=5), 99_999)
    assert spec == Categorical(100_000)
    assert found.unique().tolist() == [99_994]
    spec, found = read(spaces.MultiDiscrete([[2, 3]], start=[[7, 0]]), [[8, 2]])
    assert spec == MultiCategorical([2, 3])
    assert found.reshape(-1, 2)[0].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (spaces.Discrete(1000, start=2), 1),
        (spaces.Discrete(1000, start=2), 1002),
        (spaces.Discrete(1000), 1.0),
        (spaces.MultiDiscrete([2, 3]), np.array([0, 3])),
        (spaces.MultiDiscrete([2, 3]), np.array([-1, 0])),
        (spaces.MultiDiscrete([2, 3]), np.array([0.0, 0.0])),
        (spaces.MultiDiscrete([2, 3]), np.array([0, 0, 0])),
        (spaces.MultiDiscrete([2, 3]), np.array([[0, 0]])),
    ],
    ids=str,
)
def test_choices_outside_the_space_are_refused(space, value):
    with pytest.raises(ArgumentError, match="An observation must fit the observation space: 'observation'"):
        ObservationReader(space, [], "env").read(value)


def test_final_observations_that_are_tuples_in_an_array():
    space = spaces.Tuple([spaces.Box(0, 1, (2,)), spaces.Discrete(3)])
    rows = [lambda: CountEnv(length=2, observation_space=space)] * 2
    env = GymWrapper(gym.vector.SyncVectorEnv(rows, autoreset_mode=AutoresetMode.SAME_STEP))
    check_env_specs(env)
    batch = env.rollout(5, break_when_any_done=False)
    assert set(batch["next"].keys(True, True)) >= {"0", "1"}
    assert not torch.equal(batch["next", "0"][:, 1], batch["0"][:, 2])

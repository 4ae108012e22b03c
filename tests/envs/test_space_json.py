import json

import gymnasium as gym
import numpy as np
import pytest

from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.envs.space_json import space_from_json, space_to_json

spaces = gym.spaces
SPACES = [
    spaces.Box(-np.inf, np.inf, (3,)),
    spaces.Box(0, 255, (4, 5, 1), np.uint8),
    spaces.Box(np.array([-1, 0.0]), np.array([1, np.inf]), dtype=np.float64),
    spaces.Box(-1, 1, ()),
    spaces.Discrete(3, start=2),
    spaces.Discrete(4, dtype=np.int32),
    spaces.MultiDiscrete([[2, 3], [1, 4]]),
    spaces.MultiDiscrete([2, 3], start=[1, 0], dtype=np.int32),
    spaces.MultiBinary(3),
    spaces.MultiBinary((2, 3)),
    spaces.Text(4, charset="abc"),
    spaces.Dict(b=spaces.Discrete(2), a=spaces.Tuple([spaces.Box(0, 1, (2,)), spaces.Dict(c=spaces.MultiBinary(1))])),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_a_space_is_the_same_after_json(space):
    again = space_from_json(json.loads(json.dumps(space_to_json(space), allow_nan=False)))
    assert again == space
    assert again.dtype == space.dtype


def test_an_image_takes_one_number_per_bound():
    assert len(json.dumps(space_to_json(spaces.Box(0, 255, (210, 160, 3), np.uint8)))) < 100


def test_mistakes():
    with pytest.raises(UnsupportedError, match=r"one of Box, Discrete, .*, Tuple to be written as JSON, got Sequence"):
        space_to_json(spaces.Sequence(spaces.Discrete(2)))
    for values in ({}, {"kind": "Graph"}, {"kind": "Box", "low": 0}, {"kind": "Discrete", "n": -1, "start": 0}):
        with pytest.raises(ArgumentError, match="A space must be written as space_to_json does, got"):
            space_from_json(values)

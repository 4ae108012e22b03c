import random

import numpy as np
import torch

from recurl.seeding import rng_state, seed_everything, set_rng_state
from recurl.trainers.checkpoint import load_checkpoint, save_checkpoint


def draw():
    return random.random(), random.gauss(0, 1), np.random.normal(), np.random.rand(), *torch.randn(3).tolist()  # noqa: NPY002 - what is tested


def test_same_seed_same_numbers():
    seed_everything(2**40 + 3)
    first = draw()
    seed_everything(2**40 + 3)
    assert draw() == first


def test_state_survives_a_checkpoint(tmp_path):
    seed_everything(1)
    draw()  # leaves a cached normal number in Python's and NumPy's generators
    path = save_checkpoint(tmp_path, 0, {"rng": rng_state()})
    expected = [draw() for _ in range(3)]
    set_rng_state(load_checkpoint(path)["rng"])
    assert [draw() for _ in range(3)] == expected

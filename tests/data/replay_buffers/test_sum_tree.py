from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from recurl.data.replay_buffers.sum_tree import PriorityTree


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 40), st.integers(0, 10_000), st.integers(1, 8))
def test_against_plain_sums(size, seed, rounds):
    random = np.random.default_rng(seed)
    tree, values = PriorityTree(size), np.zeros(size)
    assert tree.total == 0.0
    assert tree.minimum == np.inf
    for _ in range(rounds):
        index = random.integers(0, size, random.integers(0, 2 * size))
        new = random.choice([0.0, 1.0, 2.5, 1e-6, 1e3], index.size) * random.random(index.size)
        tree.set(index, new)
        for place, value in zip(index, new, strict=True):
            values[place] = value
        np.testing.assert_array_equal(tree[np.arange(size)], values)
        np.testing.assert_allclose(tree.total, values.sum(), rtol=1e-13)
        assert tree.minimum == min(values[values > 0], default=np.inf)
        if tree.total:
            mass = random.random(50) * values.sum()
            ends = values.cumsum()
            found = tree.find(mass)
            assert (values[found] > 0).all()
            slack = 1e-12 * values.sum()
            assert (mass < ends[found] + slack).all()
            assert (mass >= ends[found] - values[found] - slack).all()


def test_the_end_of_the_range_is_never_an_absent_number():
    tree = PriorityTree(6)
    tree.set(np.array([0, 3]), np.array([0.1, 0.2]))
    assert tree.find(np.array([0.0, tree.total, 1.0])).tolist() == [0, 3, 3]


def test_errors_do_not_add_up():
    tree = PriorityTree(1000)
    random = np.random.default_rng(0)
    for _ in range(300):
        tree.set(random.integers(0, 1000, 64), random.random(64) * 10.0 ** random.integers(-8, 8))
    values = tree[np.arange(1000)]
    np.testing.assert_allclose(tree.total, values.sum(), rtol=1e-14)

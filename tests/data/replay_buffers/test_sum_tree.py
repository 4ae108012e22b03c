from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recurl.data.replay_buffers.sum_tree import PriorityTree


@settings(deadline=None, max_examples=100)
@given(
    st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 200, 5000])), st.integers(0, 10_000), st.integers(1, 8)
)
def test_against_plain_sums(size, seed, rounds):
    random = np.random.default_rng(seed)
    tree, values = PriorityTree(size), np.zeros(size)
    assert tree.total == 0.0
    assert tree.minimum == np.inf
    for round_ in range(rounds):
        index = random.permutation(size)[: random.integers(0, 2 * size)]
        new = random.choice([0.0, 1.0, 2.5, 1e-6, 1e3], index.size) * random.random(index.size)
        again = random.integers(0, max(index.size, 1), index.size // 2)  # equal values may be repeated
        index, new = np.concatenate([index, index[again]]), np.concatenate([new, new[again]])
        tree.set(torch.from_numpy(index), torch.from_numpy(new))
        values[index] = new
        if round_ == rounds // 2:
            whole, tree = tree, PriorityTree(size)
            tree.leaves.copy_(whole.leaves)
            tree.restore(whole.inner_sums())
            assert torch.equal(tree.total, whole.total)
        np.testing.assert_array_equal(tree.leaves, values)
        np.testing.assert_allclose(tree.total, values.sum(), rtol=1e-13)
        assert tree.minimum == min(values[values > 0], default=np.inf)
        if tree.total:
            mass = random.random(50) * values.sum()
            ends = values.cumsum()
            found = tree.find(torch.from_numpy(mass)).numpy()
            assert (values[found] > 0).all()
            slack = 1e-12 * values.sum()
            assert (mass < ends[found] + slack).all()
            assert (mass >= ends[found] - values[found] - slack).all()


def test_the_end_of_the_range_is_never_an_absent_number():
    tree = PriorityTree(6)
    tree.set(torch.tensor([0, 3]), torch.tensor([0.1, 0.2]))
    mass = torch.tensor([0.0, tree.total, 1.0], dtype=torch.float64)
    assert tree.find(mass).tolist() == [0, 3, 3]


def test_errors_do_not_add_up():
    tree = PriorityTree(1000)
    random = np.random.default_rng(0)
    for _ in range(300):
        index = random.permutation(1000)[:64]
        tree.set(torch.from_numpy(index), torch.from_numpy(random.random(64) * 10.0 ** random.integers(-8, 8)))
    np.testing.assert_allclose(tree.total, tree.leaves.sum(), rtol=1e-14)

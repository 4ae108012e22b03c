from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from recurl.core.errors import ArgumentError
from recurl.data import SequenceMinibatches


def make_batch(shape, seed=0, is_init=True):
    """Tokens numbered in row-major order, with random resets and a multi-dimensional entry."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel()
    batch = TensorDict({"token": torch.arange(count).reshape(shape)}, shape)
    batch["state"] = torch.randn(*shape, 2, 3, generator=generator)
    batch["next", "reward"] = torch.randn(*shape, 1, generator=generator)
    if is_init:
        batch["is_init"] = torch.rand(*shape, 1, generator=generator) < 0.2
    return batch


@settings(deadline=None, max_examples=80)
@given(
    st.one_of(st.just(()), st.tuples(st.integers(1, 5)), st.tuples(st.integers(1, 3), st.integers(1, 3))),
    st.integers(1, 17),
    st.one_of(st.none(), st.integers(1, 20)),
    st.booleans(),
    st.data(),
)
def test_an_epoch_is_every_token_once_and_every_cut_marked(rows, steps, slice_len, is_init, data):
    batch = make_batch((*rows, steps), is_init=is_init)
    before = batch.clone()
    slices = torch.Size(rows).numel() * (-(-steps // (slice_len or steps)))
    number = data.draw(st.integers(1, slices))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 100)))
    minibatches = SequenceMinibatches(batch, number, slice_len, generator)
    for _ in range(2):
        epoch = list(minibatches)
        assert len(epoch) == len(minibatches) == number
        assert sorted(torch.cat([part["token"] for part in epoch]).tolist()) == list(range(batch.numel()))
        for part in epoch:
            check_minibatch(part, before, steps, slice_len)
    assert (before == batch).all()
    assert set(before.keys(True, True)) == set(batch.keys(True, True))


def check_minibatch(part, batch, steps, slice_len):
    assert part.batch_dims == 1
    flat = batch.reshape(-1)
    token, marks = part["token"], part["is_init"].reshape(-1)
    own = flat["is_init"][token].reshape(-1) if "is_init" in flat else torch.zeros_like(marks)
    continues = torch.zeros_like(marks)
    continues[1:] = (token[1:] == token[:-1] + 1) & (token[1:] % steps != 0)
    assert marks[~continues].all(), "a discontinuity without a mark"
    slice_start = (token % steps) % (slice_len or steps) == 0
    assert torch.equal(marks, own | slice_start), "a mark inside a sequence"
    assert torch.equal(part["collector", "stored", "is_init"].reshape(-1), own)
    torch.testing.assert_close(part["state"], flat["state"][token])
    torch.testing.assert_close(part["next", "reward"], flat["next", "reward"][token])


def test_batch_memory_is_untouched():
    batch = make_batch((3, 8))
    sums = {key: (value.data_ptr(), value.double().sum().item()) for key, value in batch.items(True, True)}
    for part in SequenceMinibatches(batch, 2, slice_len=3):
        for value in part.values(True, True):
            value.zero_()
    assert sums == {key: (value.data_ptr(), value.double().sum().item()) for key, value in batch.items(True, True)}


@pytest.mark.parametrize("trailing", [True, False])
def test_shape_of_the_flag_is_kept(trailing):
    batch = make_batch((2, 4))
    if not trailing:
        batch["is_init"] = batch["is_init"].squeeze(-1)
    part = next(iter(SequenceMinibatches(batch, 1)))
    assert part["is_init"].shape == ((8, 1) if trailing else (8,))
    assert part["is_init"].dtype == torch.bool


def test_epochs_differ_and_a_generator_repeats_them():
    batch = make_batch((64, 2))

    def orders(seed):
        minibatches = SequenceMinibatches(batch, 4, generator=torch.Generator().manual_seed(seed))
        return [[part["token"].tolist() for part in minibatches] for _ in range(2)]

    assert orders(1) == orders(1)
    assert orders(1) != orders(2)
    assert orders(1)[0] != orders(1)[1]


def test_sequences_are_dealt_evenly():
    sizes = [len(part) for part in SequenceMinibatches(make_batch((10, 6)), 4)]
    assert sorted(sizes) == [12, 12, 18, 18]


def test_every_minibatch_gets_one_of_each_stratum():
    parts = [set((part["token"] // 6).tolist()) for part in SequenceMinibatches(make_batch((12, 6)), 4)]
    for first in (0, 4, 8):
        stratum = set(range(first, first + 4))
        assert [len(part & stratum) for part in parts] == [1] * 4


def test_minibatches_of_ranks_are_those_of_the_whole_batch():
    batch = make_batch((12, 6))

    def epochs(part, **ranks):
        minibatches = SequenceMinibatches(part, 2, 3, torch.Generator().manual_seed(0), **ranks)
        return [[minibatch["token"].tolist() for minibatch in minibatches] for _ in range(2)]

    whole = epochs(batch)
    of_ranks = [epochs(part, rank=number, ranks=3) for number, part in enumerate(batch.split(4))]
    for epoch in range(2):
        for number in range(2):
            assert [token for rank in of_ranks for token in rank[epoch][number]] == whole[epoch][number]


@pytest.mark.parametrize(("number", "slice_len"), [(3, 3), (2, 4)])
def test_ranks_need_minibatches_of_one_size(number, slice_len):
    with pytest.raises(ArgumentError, match="With 2 ranks, all minibatches must have the same size"):
        SequenceMinibatches(make_batch((4, 6)), number, slice_len, ranks=2)


def test_errors():
    batch = make_batch((2, 4))
    with pytest.raises(ArgumentError, match="time dimension"):
        SequenceMinibatches(batch[0, 0], 1)
    with pytest.raises(ArgumentError, match="slice_len must be positive"):
        SequenceMinibatches(batch, 1, slice_len=0)
    for number in (0, 3):
        with pytest.raises(ArgumentError, match=rf"got {number} for 2 sequences of 4 tokens"):
            SequenceMinibatches(batch, number)


def test_nothing_is_read_back_from_the_device():
    """A meta tensor has no data: any operation that would wait for a device raises."""
    for part in SequenceMinibatches(make_batch((3, 8)).to("meta"), 2, slice_len=3):
        assert part["state"].device.type == part["is_init"].device.type == "meta"

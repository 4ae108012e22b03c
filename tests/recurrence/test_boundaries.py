from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from recurl.core.errors import ArgumentError, UsageError
from recurl.recurrence import Boundaries, boundaries_of


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor | None]:
    rows = draw(st.lists(st.integers(0, 3), max_size=2))
    time = draw(st.integers(0, 12))
    shape = (*rows, time)
    count = torch.Size(shape).numel()
    flags = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    is_init = torch.tensor(flags, dtype=torch.bool).reshape(shape)
    ids = None
    if draw(st.booleans()):
        values = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
        ids = torch.tensor(values, dtype=torch.int64).reshape(shape)
    if draw(st.booleans()):
        is_init = is_init.unsqueeze(-1)
    return is_init, ids


def naive_starts(is_init: Tensor, ids: Tensor | None, shape: tuple[int, ...]) -> list[bool]:
    flags = is_init.reshape(-1).tolist()
    flat_ids = None if ids is None else ids.reshape(-1).tolist()
    return [
        n % shape[-1] == 0 or flag or (flat_ids is not None and flat_ids[n] != flat_ids[n - 1])
        for n, flag in enumerate(flags)
    ]


@settings(max_examples=150, deadline=None)
@given(batches())
def test_starts_are_row_starts_flags_and_id_changes(batch: tuple[Tensor, Tensor | None]) -> None:
    is_init, ids = batch
    for shape in {tuple(is_init.shape), tuple(is_init.shape[:-1])} if is_init.shape[-1:] == (1,) else {is_init.shape}:
        if len(shape) == 0 or (ids is not None and tuple(ids.shape) != tuple(shape)):
            continue
        boundaries = Boundaries.from_is_init(is_init, ids, shape)
        assert boundaries.starts.tolist() == naive_starts(is_init, ids, tuple(shape))
        assert boundaries.num_tokens == torch.Size(shape).numel()


@settings(max_examples=150, deadline=None)
@given(batches(), st.booleans())
def test_split_then_stitch_is_the_identity(batch: tuple[Tensor, Tensor | None], features: bool) -> None:
    is_init, _ = batch
    is_init = is_init.reshape(is_init.shape[:-1] if is_init.shape[-1:] == (1,) and is_init.ndim > 1 else is_init.shape)
    boundaries = Boundaries.from_is_init(is_init, batch_shape=is_init.shape)
    values = torch.arange(is_init.numel() * 2.0).reshape(*is_init.shape, 2)
    values = values if features else values[..., 0]
    segments = boundaries.split(values)
    assert sum(len(segment) for segment in segments) == is_init.numel()
    if segments:
        assert torch.equal(boundaries.stitch(segments), values)


@settings(max_examples=150, deadline=None)
@given(batches())
def test_no_segment_crosses_a_boundary(batch: tuple[Tensor, Tensor | None]) -> None:
    is_init, _ = batch
    boundaries = Boundaries.from_is_init(is_init, batch_shape=is_init.shape)
    token = torch.arange(boundaries.num_tokens)
    starts = boundaries.starts.tolist()
    for segment in boundaries.split(token):
        first, *rest = segment.tolist()
        assert starts[first]
        assert not any(starts[n] for n in rest)
        assert rest == list(range(first + 1, first + 1 + len(rest)))
        assert (boundaries.start_index[segment] == first).all()
        assert len(set(boundaries.row_ids[segment].tolist())) == 1
        assert boundaries.ends[segment].tolist() == [False] * len(rest) + [True]
    assert boundaries.segment_ids.tolist() == [
        k for k, length in enumerate(boundaries.lengths.tolist()) for _ in range(length)
    ]
    assert int(boundaries.num_segments) == len(boundaries.lengths)
    assert boundaries.flipped.starts.tolist() == boundaries.ends.tolist()[::-1]


@settings(max_examples=150, deadline=None)
@given(batches())
def test_host_plan_packs_like_packed_sequence(batch: tuple[Tensor, Tensor | None]) -> None:
    is_init, _ = batch
    boundaries = Boundaries.from_is_init(is_init, batch_shape=is_init.shape)
    plan = boundaries.host()
    token = torch.arange(boundaries.num_tokens)
    segments = boundaries.split(token)
    assume(len(segments) > 0)
    packed = torch.nn.utils.rnn.pack_sequence(sorted(segments, key=len, reverse=True))
    assert torch.equal(plan.order, packed.data)
    assert torch.equal(plan.batch_sizes, packed.batch_sizes)
    assert sorted(plan.starts.tolist()) == [segment[0].item() for segment in segments]
    assert sorted(plan.ends.tolist()) == [segment[-1].item() for segment in segments]


def test_host_plan_of_an_empty_batch_is_empty() -> None:
    for shape in ((0,), (3, 0)):
        assert (
            Boundaries.from_is_init(torch.zeros(shape, dtype=torch.bool), batch_shape=shape).host().order.numel() == 0
        )


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_cu_seqlens_with_empty_segments(lengths: list[int]) -> None:
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    boundaries = Boundaries.from_cu_seqlens(cu_seqlens, sum(lengths))
    assert boundaries.lengths.tolist() == [length for length in lengths if length]


def test_flattened_rows_do_not_leak_when_ids_are_given() -> None:
    ids = torch.tensor([[7, 7, 8], [9, 9, 9]])
    boundaries = Boundaries.from_is_init(torch.zeros(6, dtype=torch.bool), ids.reshape(-1))
    assert boundaries.lengths.tolist() == [2, 1, 3]
    assert torch.equal(Boundaries.from_traj_ids(ids).starts, boundaries.starts)


def test_a_trailing_one_is_the_feature_dimension_unless_the_shape_is_given() -> None:
    is_init = torch.tensor([[True], [False], [False]])
    assert Boundaries.from_is_init(is_init).lengths.tolist() == [3]
    assert Boundaries.from_is_init(is_init, batch_shape=(3, 1)).lengths.tolist() == [1, 1, 1]


def test_uint8_flags_are_accepted() -> None:
    assert Boundaries.from_is_init(torch.tensor([0, 1, 0], dtype=torch.uint8)).lengths.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Boundaries.from_is_init(torch.zeros(3)), UsageError, "must be boolean, got torch.float32"),
        (lambda: Boundaries.from_is_init(torch.tensor(True)), ArgumentError, "needs a time dimension"),
        (
            lambda: Boundaries.from_is_init(torch.zeros(3, dtype=torch.bool), batch_shape=(2, 2)),
            ArgumentError,
            r"is_init must have the batch shape \(2, 2\).*got shape \(3,\)",
        ),
        (
            lambda: Boundaries.from_is_init(torch.zeros(3, dtype=torch.bool), torch.zeros(4, dtype=torch.int64)),
            ArgumentError,
            "traj_ids must have the batch shape",
        ),
        (lambda: Boundaries.from_traj_ids(torch.tensor(1)), ArgumentError, "must have a time dimension"),
        (lambda: Boundaries.from_cu_seqlens(torch.zeros(2), 3), ArgumentError, "1-d integer tensor"),
        (
            lambda: Boundaries.from_is_init(torch.zeros(3, dtype=torch.bool)).split(torch.zeros(4)),
            ArgumentError,
            "values must start with the batch shape",
        ),
    ],
)
def test_bad_input(call: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_every_edit_is_seen() -> None:
    is_init = torch.zeros(2, 3, dtype=torch.bool)
    ids = torch.zeros(2, 3, dtype=torch.int64)
    assert boundaries_of(is_init, ids, (2, 3)).lengths.tolist() == [3, 3]
    is_init[0, 1] = True
    edited = boundaries_of(is_init, ids, (2, 3))
    assert edited.lengths.tolist() == [1, 2, 3]
    ids[1, 2] = 5
    assert boundaries_of(is_init, ids, (2, 3)).lengths.tolist() == [1, 2, 2, 1]


def test_an_edit_through_a_view_is_seen() -> None:
    batch = torch.zeros(4, 3, dtype=torch.bool)
    row = batch[1]
    assert boundaries_of(row, None, (3,)).lengths.tolist() == [3]
    batch[1, 2] = True
    assert boundaries_of(row, None, (3,)).lengths.tolist() == [2, 1]


def test_edits_of_inference_tensors_are_seen() -> None:
    with torch.inference_mode():
        is_init = torch.zeros(3, dtype=torch.bool)
        assert boundaries_of(is_init, None, (3,)).lengths.tolist() == [3]
        is_init[1] = True
        assert boundaries_of(is_init, None, (3,)).lengths.tolist() == [1, 2]

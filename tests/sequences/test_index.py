"""The index of a batch is that of its entries as they are now, however the batch was changed."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from recurl.core.errors import ArgumentError, MissingKeyError, UsageError
from recurl.execution.readback import refuse_read_back
from recurl.recurrence import Boundaries, boundaries_of
from recurl.sequences.entries import Entries
from recurl.sequences.index import SequenceIndex, begins_sequence

KEYS = ("is_init", ("collector", "traj_ids"), ("collector", "traj_steps"))


def oracle(shape: tuple[int, ...], entries: dict[str, list[Any]]) -> list[bool]:
    """The definition as a plain loop over the tokens."""
    starts = []
    for token in range(torch.Size(shape).numel()):
        before, start = token - 1, token % shape[-1] == 0
        if not start:
            start |= bool(entries["is_init"][token]) if "is_init" in entries else False
            start |= entries["done"][before] if "done" in entries else False
            start |= entries["mask"][before] != entries["mask"][token] if "mask" in entries else False
            start |= entries["ids"][before] != entries["ids"][token] if "ids" in entries else False
            start |= entries["steps"][before] + 1 != entries["steps"][token] if "steps" in entries else False
        starts.append(start)
    return starts


@st.composite
def numbered(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[str, list[Any]]]:
    shape = (*draw(st.lists(st.integers(0, 3), max_size=2)), draw(st.integers(0, 9)))
    count = torch.Size(shape).numel()

    def values(kind: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(kind, min_size=count, max_size=count))

    entries = {"is_init": values(st.booleans()), "done": values(st.booleans()), "mask": values(st.booleans())}
    entries |= {"ids": values(st.integers(0, 1)), "steps": values(st.integers(0, 2))}
    names = draw(st.sets(st.sampled_from(list(entries)), min_size=1))
    names |= set() if names & {"is_init", "done"} else {"is_init"}
    return shape, {name: value for name, value in entries.items() if name in names}


@settings(max_examples=300, deadline=None)
@given(numbered(), st.booleans(), st.booleans())
def test_starts_are_those_of_a_plain_loop(batch: tuple[Any, Any], trailing: bool, as_entries: bool) -> None:
    shape, given_entries = batch
    dtypes = {"ids": torch.int64, "steps": torch.int64}
    tensors = {n: torch.tensor(v, dtype=dtypes.get(n, torch.bool)).reshape(shape) for n, v in given_entries.items()}
    tensors = {name: value.unsqueeze(-1) if trailing else value for name, value in tensors.items()}
    made: Any = Entries({}, torch.Size(shape)) if as_entries else TensorDict({}, shape)
    for name, key in zip(("is_init", "ids", "steps"), KEYS, strict=True):
        if name in tensors:
            made.set(key, tensors[name])
    index = SequenceIndex.of(made, done=tensors.get("done"), mask=tensors.get("mask"))
    assert index.starts.tolist() == oracle(shape, given_entries)
    assert index.batch_shape == torch.Size(shape)


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_the_definition_takes_arrays_of_both_libraries(kind: Callable[[Any], Any]) -> None:
    """Six tokens: a continuation, a new id, a skipped step, a flag, a continuation, and the end of an episode."""
    ids, steps = kind([4, 4, 5, 5, 5, 5, 5]), kind([7, 8, 0, 2, 3, 4, 5])
    init, done = kind([True, False, False, False, True, False, False]), kind([False] * 5 + [True, True])
    begins = begins_sequence([init[1:], done[:-1]], [(ids[:-1], ids[1:])], (steps[:-1], steps[1:]))
    assert begins.tolist() == [False, True, True, True, False, True]
    assert begins_sequence([], [], (steps[:-1], steps[1:])).tolist() == [False, True, True, False, False, False]


def make_batch(kind: type = TensorDict) -> Any:
    """Two rows of six steps: a row that continues a trajectory, and one that ends and begins trajectories."""
    is_init = torch.tensor([[False] * 6, [True, False, False, True, False, False]]).unsqueeze(-1)
    ids = torch.tensor([[3] * 6, [4, 4, 4, 5, 5, 5]])
    steps = torch.tensor([[7, 8, 9, 10, 11, 12], [0, 1, 2, 0, 1, 2]])
    batch = TensorDict({"is_init": is_init, "collector": {"traj_ids": ids, "traj_steps": steps}}, [2, 6])
    return Entries.of(batch) if kind is Entries else batch


def starts_of(batch: Any) -> list[int]:
    return SequenceIndex.of(batch).starts.nonzero().squeeze(-1).tolist()


def saved(batch: TensorDictBase) -> TensorDictBase:
    torch.save(batch, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


CHANGES: dict[str, tuple[Callable[[Any], Any], list[int]]] = {
    "as it is": (lambda b: b, [0, 6, 9]),
    "first steps": (lambda b: b[:, :4], [0, 4, 7]),
    "last steps": (lambda b: b[:, 4:], [0, 2]),
    "every other step": (lambda b: b[:, ::2], [0, 1, 2, 3, 4, 5]),
    "flat": (lambda b: b.reshape(-1), [0, 6, 9]),
    "flat part": (lambda b: b.reshape(-1)[4:10], [0, 2, 5]),
    "rows in halves": (lambda b: b.reshape(4, 3), [0, 3, 6, 9]),
    "backwards": (lambda b: b.flip(1), list(range(12))),
    "put end to end": (lambda b: torch.cat([b, b], 1), [0, 6, 12, 15, 18, 21]),
    "continued": (lambda b: torch.cat([b[:1, :3], b[:1, 3:]], 1), [0]),
    "moved": (lambda b: b.to("cpu"), [0, 6, 9]),
    "copied": (lambda b: b.copy(), [0, 6, 9]),
    "cloned": (lambda b: b.clone(), [0, 6, 9]),
    "deeply copied": (copy.deepcopy, [0, 6, 9]),
    "pickled": (lambda b: pickle.loads(pickle.dumps(b)), [0, 6, 9]),
    "saved": (saved, [0, 6, 9]),
    "selected": (lambda b: b.select("is_init"), [0, 6, 9]),
    "without numbers": (lambda b: b.exclude("collector").set("is_init", ~b["is_init"]), [*range(7), 7, 8, 10, 11]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_attached_index_is_that_of_the_changed_batch(change: str) -> None:
    batch = make_batch()
    SequenceIndex.of(batch).attach(batch)
    apply, expected = CHANGES[change]
    changed = apply(batch)
    assert starts_of(changed) == expected
    assert starts_of(batch) == [0, 6, 9]
    assert set(changed.keys()) <= {"is_init", "collector"}


EDITS: dict[str, Callable[[Tensor, int], None]] = {
    "in place": lambda tensor, at: tensor.view(-1).__setitem__(at, 1),
    "numpy": lambda tensor, at: tensor.numpy().reshape(-1).__setitem__(at, 1),
    "data": lambda tensor, at: tensor.data.view(-1).__setitem__(at, 1),
    "dlpack": lambda tensor, at: torch.from_dlpack(tensor.view(torch.uint8)).view(-1).__setitem__(at, 1),
}


@pytest.mark.parametrize("kind", [TensorDict, Entries])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_batch_has_another_index(edit: str, kind: type) -> None:
    batch = make_batch(kind)
    index = SequenceIndex.of(batch)
    index.attach(batch)
    _ = index.segment_ids, index.host()
    assert SequenceIndex.of(batch) is index
    EDITS[edit](batch.get("is_init"), 2)
    edited = SequenceIndex.of(batch)
    assert edited is not index
    assert edited.lengths.tolist() == [2, 4, 3, 3]
    assert edited.segment_ids.tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert edited.host().batch_sizes.tolist() == [4, 4, 3, 1]


@pytest.mark.parametrize("key", KEYS)
def test_a_replaced_entry_is_seen(key: Any) -> None:
    for kind in (TensorDict, Entries):
        batch = make_batch(kind)
        SequenceIndex.of(batch).attach(batch)
        batch.set(key, torch.ones_like(batch.get(key)))
        assert starts_of(batch) == (list(range(12)) if key != KEYS[1] else [0, 6, 9])


@pytest.mark.parametrize("kind", [TensorDict, Entries])
def test_the_index_of_a_batch_is_kept_while_it_is_unchanged(kind: type) -> None:
    batch = make_batch(kind)
    index = SequenceIndex.of(batch)
    assert SequenceIndex.of(batch) is index
    assert SequenceIndex.of(batch, done=torch.zeros(2, 6, dtype=torch.bool)) is not index
    batch.set("observation", torch.zeros(2, 6))
    assert SequenceIndex.of(batch) is index
    assert SequenceIndex.of(make_batch(kind)) is not index


def test_a_locked_batch_has_an_index() -> None:
    batch = make_batch().lock_()
    assert SequenceIndex.of(batch) is SequenceIndex.of(batch)
    assert starts_of(batch[:, 1:]) == [0, 5, 7]
    stack = torch.stack([make_batch()[row] for row in range(2)])
    assert starts_of(stack) == [0, 6, 9]


def test_without_reading_the_device_the_tensors_and_their_edits_count() -> None:
    """A meta tensor has no data: any operation that would wait for a device raises."""
    batch = make_batch().to("meta")
    index = SequenceIndex.of(batch)
    assert SequenceIndex.of(batch) is not index
    for key in KEYS:
        index.attach(batch)
        assert SequenceIndex.of(batch) is index
        batch[key].view(-1)[3:] = 1
        assert SequenceIndex.of(batch) is not index
        index.attach(batch)
        batch[key] = batch[key].clone()
        assert SequenceIndex.of(batch) is not index
    index.attach(batch)
    assert SequenceIndex.of(batch.reshape(-1)) is not index
    batch["collector"].pop("traj_steps")
    assert SequenceIndex.of(batch) is not index


def test_nothing_is_read_back() -> None:
    batch = make_batch()
    with refuse_read_back():
        index = SequenceIndex.of(batch, done=torch.ones(2, 6, dtype=torch.bool))
        again = SequenceIndex.of(batch), SequenceIndex.of(batch)
        ends, positions = again[0].ends, again[1].positions
    assert index.starts.all()
    assert ends.nonzero().squeeze(-1).tolist() == [5, 8, 11]
    assert positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1, 2]


@pytest.mark.filterwarnings("ignore")  # torch.jit.trace is deprecated, and warns of the comparison of shapes
def test_a_trace_has_the_index_of_other_data() -> None:
    def starts(is_init: Tensor, steps: Tensor) -> Tensor:
        return Boundaries.from_is_init(is_init, traj_steps=steps).starts

    zeros = torch.zeros(4, dtype=torch.bool)
    traced: Any = torch.jit.trace(starts, (zeros, torch.arange(4)))
    assert traced(~zeros, torch.arange(4)).all()
    assert traced(zeros, torch.tensor([0, 1, 3, 4])).tolist() == [True, False, True, False]


def test_under_transforms_nothing_attached_is_used() -> None:
    batch = make_batch(Entries)
    wrong = SequenceIndex(torch.ones(12, dtype=torch.bool), (2, 6))
    wrong.attach(batch)
    assert starts_of(batch) == [0, 6, 9]
    SequenceIndex.of(batch).attach(batch)

    def count(flags: Tensor) -> Tensor:
        batch.set("is_init", flags)
        return SequenceIndex.of(batch).starts.sum()

    assert torch.vmap(count)(torch.zeros(2, 2, 6, 1, dtype=torch.bool)).tolist() == [3, 3]


def test_compiled_code_derives_the_index() -> None:
    compiled: Any = torch.compile(lambda batch: SequenceIndex.of(batch).starts, backend="eager", fullgraph=True)
    batch = make_batch()
    assert starts_of(batch) == compiled(batch).nonzero().squeeze(-1).tolist() == [0, 6, 9]
    batch["is_init"].numpy()[0, 2] = True
    assert compiled(batch).nonzero().squeeze(-1).tolist() == [0, 2, 6, 9]


def test_a_batch_is_shared_safely_by_threads() -> None:
    batch = TensorDict({"is_init": torch.zeros(64, 16, dtype=torch.bool)}, [64, 16])

    def work(_: int) -> int:
        return min(len(SequenceIndex.of(batch).lengths) for _ in range(200))

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, range(4))) == [64] * 4


def test_parts_of_a_flat_index() -> None:
    index = SequenceIndex.of(make_batch().reshape(-1))
    parts = index.parts([6, 3, 3])
    assert [part.lengths.tolist() for part in parts] == [[6], [3], [3]]
    assert [part.batch_shape for part in parts] == [torch.Size([6]), torch.Size([3]), torch.Size([3])]


def test_the_names_of_earlier_versions() -> None:
    assert Boundaries is SequenceIndex
    is_init = torch.tensor([True, False, True])
    assert boundaries_of(is_init, None, (3,), torch.tensor([0, 2, 0])).lengths.tolist() == [1, 1, 1]


def test_bad_batches() -> None:
    with pytest.raises(MissingKeyError, match="needs the entry 'is_init'"):
        SequenceIndex.of(TensorDict({}, [3]))
    with pytest.raises(UsageError, match=r"must be boolean, got torch.float32"):
        SequenceIndex.of(TensorDict({"is_init": torch.zeros(3)}, [3]))
    with pytest.raises(ArgumentError, match="needs a time dimension"):
        SequenceIndex.of(TensorDict({"is_init": torch.tensor(True)}, []))
    with pytest.raises(ArgumentError, match=r"traj_ids must have the batch shape \(3,\)"):
        SequenceIndex.of(TensorDict({"is_init": torch.ones(3).bool()}, [3]).set(KEYS[1], torch.zeros(3, 2).long()))
    with pytest.raises(ArgumentError, match=r"done must have the batch shape \(3,\)"):
        SequenceIndex.of(TensorDict({}, [3]), done=torch.zeros(2).bool())


def test_flags_for_kernels_are_contiguous() -> None:
    starts = torch.tensor([True, False, False, True, True, False])
    index = SequenceIndex(starts, (6,))
    assert index.flags.data_ptr() == starts.data_ptr()
    strided = SequenceIndex(starts[::2], (3,))
    assert strided.flags.is_contiguous()
    assert strided.flags.tolist() == [1, 0, 1]

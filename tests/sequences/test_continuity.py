"""There is a boundary wherever a token isn't the next step of its trajectory, for any indexing of a batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase

from recurl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector, OverlappedCollector
from recurl.data import (
    LazyTensorStorage,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)
from recurl.envs import GymEnv
from recurl.modules import (
    set_recurrent_mode,
)
from recurl.objectives import ClipPPOLoss
from recurl.objectives.value import GAE
from recurl.sequences.continuity import boundaries_in
from tests.continuous import CELLS, collected, make_env, make_policy, memory

CREATE = partial(GymEnv, "recurl/MaskedCartPole-v1", num_envs=3)


INDEXINGS: dict[str, Callable[[TensorDict], TensorDictBase]] = {
    "as it is": lambda b: b,
    "flat": lambda b: b.reshape(-1),
    "shuffled": lambda b: b.reshape(-1)[torch.randperm(b.numel())],
    "some shuffled": lambda b: b.reshape(-1)[torch.randperm(b.numel())[: b.numel() // 4]],
    "shuffled in time": lambda b: b[:, torch.randperm(b.shape[1])],
    "every other step": lambda b: b[:, ::2],
    "every other step, flat": lambda b: b.reshape(-1)[::2],
    "backwards": lambda b: b.flip(1),
    "repeated": lambda b: b.reshape(-1)[torch.arange(b.numel()) // 2],
    "rows put end to end": lambda b: torch.cat([b[1], b[0], b[2]]),
    "in time put end to end": lambda b: torch.cat([b[:, 20:], b[:, :20]], 1),
    "transposed": lambda b: b.transpose(0, 1).contiguous(),
    "one column": lambda b: b[:, 7],
}


@pytest.mark.parametrize("indexing", INDEXINGS)
@pytest.mark.parametrize("cell", CELLS)
def test_ratios_are_one_however_a_batch_is_indexed(cell: str, indexing: str) -> None:
    policy = make_policy(cell)
    batches = collected(policy)
    loss = ClipPPOLoss(policy[0], policy[1])
    gae = GAE(gamma=0.9, lmbda=0.8, value_network=policy[1])
    for batch in batches:
        assert batch["done"].any() or batch["next", "done"].any()
        assert (batch["collector", "traj_steps"] > 0).any()
        index = INDEXINGS[indexing](gae(batch))
        out = loss(index)
        assert abs(out["max_ratio"].item() - 1) < 1e-4
        assert abs(out["kl_approx"].item()) < 1e-6


@pytest.mark.parametrize("pair", [(0, 1), (1, 0)])
def test_batches_put_end_to_end(pair: tuple[int, int]) -> None:
    policy = make_policy()
    batches = collected(policy)
    for dim in (0, 1):
        batch = torch.cat([batches[index] for index in pair], dim)
        GAE(gamma=0.9, lmbda=0.8, value_network=policy[1])(batch)
        assert abs(ClipPPOLoss(policy[0], policy[1])(batch)["max_ratio"].item() - 1) < 1e-4
        starts = boundaries_in(batch).starts.reshape(batch.shape)
        if dim == 1 and pair == (0, 1):
            assert torch.equal(starts[:, 40], batches[1]["is_init"][:, 0, 0])
        elif dim == 1:
            assert starts[:, 40].all()


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_boundaries_are_those_of_the_definition(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    ints = st.lists(st.integers(0, 3), min_size=count, max_size=count)
    ids, steps = data.draw(ints), data.draw(ints)
    init = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    rows = data.draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
    batch = TensorDict(
        {
            "is_init": torch.tensor(init).reshape(rows, -1, 1),
            "collector": {
                "traj_ids": torch.tensor(ids).reshape(rows, -1),
                "traj_steps": torch.tensor(steps).reshape(rows, -1),
            },
        },
        [rows, count // rows],
    )
    expected = [
        n % (count // rows) == 0 or init[n] or ids[n] != ids[n - 1] or steps[n] != steps[n - 1] + 1
        for n in range(count)
    ]
    assert boundaries_in(batch).starts.tolist() == expected


def assert_numbered(batches: list[TensorDictBase]) -> None:
    """Check that the steps of each id are numbered 0, 1, 2, ... in order of execution."""
    seen: dict[int, int] = {}
    for batch in batches:
        ids, steps = batch["collector", "traj_ids"], batch["collector", "traj_steps"]
        assert steps.dtype == torch.int64
        assert steps.shape == ids.shape == batch.shape
        rows = zip(ids.reshape(-1, batch.shape[-1]), steps.reshape(-1, batch.shape[-1]), strict=True)
        for row_ids, row_steps in rows:
            for traj, step in zip(row_ids.tolist(), row_steps.tolist(), strict=True):
                assert step == seen.get(traj, 0)
                seen[traj] = step + 1


@pytest.mark.parametrize("options", [{}, {"set_truncated": True}, {"reset_at_each_iter": True}])
@pytest.mark.parametrize("rows", [None, 1, 3])
def test_a_collector_numbers_the_steps_of_each_trajectory(rows: int | None, options: dict[str, bool]) -> None:
    collector = Collector(make_env(rows), frames_per_batch=30 * (rows or 1), **options)
    batches = [collector.collect() for _ in range(4)]
    assert_numbered(batches)
    carried = any((batch["collector", "traj_steps"][..., 0] > 0).any() for batch in batches[1:])
    assert carried == (not options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector, OverlappedCollector])
@pytest.mark.usefixtures("shared_interpreter")
def test_collectors_in_processes_number_them_too(kind: type) -> None:
    creates = CREATE if kind is OverlappedCollector else [CREATE, CREATE]
    with kind(creates, frames_per_batch=120, total_frames=480) as collector:
        batches = [batch.clone() for batch in collector]
    assert_numbered([row for batch in batches for row in (batch if batch.ndim > 2 else [batch])])


@pytest.mark.slow
@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.usefixtures("shared_interpreter")
def test_numbers_are_saved(overlapped: bool) -> None:
    def make() -> Collector | OverlappedCollector:
        return (
            OverlappedCollector(CREATE, frames_per_batch=60)
            if overlapped
            else Collector(make_env(), frames_per_batch=60)
        )

    torch.manual_seed(0)
    first, second = make(), make()
    try:
        batches = [first.collect()]
        assert second.load_state_dict(first.state_dict())
        batches += [second.collect(), second.collect()]
    finally:
        first.shutdown(), second.shutdown()
    assert_numbered(batches)


def test_a_state_without_numbers_begins_new_trajectories() -> None:
    first, second = (Collector(make_env(), frames_per_batch=60) for _ in range(2))
    batch, state = first.collect(), first.state_dict()
    del state["traj_steps"]
    assert second.load_state_dict(state)
    after = second.collect()
    assert after["collector", "traj_steps"][:, 0].eq(0).all()
    assert after["collector", "traj_ids"].min() > batch["collector", "traj_ids"].max()
    assert not after["is_init"][:, 0].all()  # the number does not imply the start of an episode


@pytest.mark.parametrize("rows", [None, 3])
def test_rollouts_take_new_ids_and_number_steps(rows: int | None) -> None:
    env = make_env(rows)
    first = env.rollout(60, break_when_any_done=False)
    root = first[..., -1].exclude("next")
    second = env.rollout(30, auto_reset=False, tensordict=root, break_when_any_done=False)
    for batch in (first, second):
        assert_numbered([batch])
        changes = batch["collector", "traj_ids"].diff(dim=-1) != 0
        assert torch.equal(changes, batch["next", "done"][..., :-1, 0])
    assert first["collector", "traj_ids"].max() < second["collector", "traj_ids"].min()


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("sampler", [None, SamplerWithoutReplacement, lambda: SliceSampler(slice_len=2)])
def test_samples_of_indexed_data(sampler: Callable | None, ndim: int, shuffled: bool) -> None:
    policy = make_policy()
    options = {} if sampler is None else {"sampler": sampler()}
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(500, ndim=ndim), batch_size=16, **options)
    gae, loss = GAE(gamma=0.9, lmbda=0.8, value_network=policy[1]), ClipPPOLoss(policy[0], policy[1])
    for batch in collected(policy):
        batch = gae(batch)
        if shuffled:
            order = torch.randperm(40)
            order[:8] = torch.arange(8) + 3  # some that can be sampled as slices
            batch = batch[:, order]
        buffer.extend(batch if ndim == 2 else batch.reshape(-1))
    for _ in range(5):
        sample = buffer.sample()
        assert abs(loss(sample)["max_ratio"].item() - 1) < 1e-4
        assert abs(loss(sample[torch.randperm(16)])["max_ratio"].item() - 1) < 1e-4


# -- modifications that torch's version counter misses


EDITS: dict[str, Callable[[torch.Tensor, int], None]] = {
    "in place": lambda tensor, at: tensor.view(-1).__setitem__(at, 1),
    "numpy": lambda tensor, at: tensor.numpy().reshape(-1).__setitem__(at, 1),
    "data": lambda tensor, at: tensor.data.view(-1).__setitem__(at, 1),
    "dlpack": lambda tensor, at: torch.from_dlpack(tensor.view(torch.uint8)).view(-1).__setitem__(at, 1),
}


@pytest.mark.parametrize("edit", EDITS)
def test_every_edit_made_before_a_call_is_seen(edit: str) -> None:
    gru = memory("gru", "a", "loop")
    batch = TensorDict({"observation": torch.randn(2, 6, 2), "is_init": torch.zeros(2, 6, 1, dtype=torch.bool)}, [2, 6])
    with set_recurrent_mode(True), torch.no_grad():
        gru(batch)
        for at in (3, 8):
            EDITS[edit](batch["is_init"], at)
            found = gru(batch.copy())["a_features"]
            expected = gru(batch.clone())["a_features"]
            assert torch.equal(found, expected)
    assert boundaries_in(batch).starts.nonzero().squeeze(-1).tolist() == [0, 3, 6, 8]


@pytest.mark.parametrize("key", ["traj_ids", "traj_steps"])
def test_edits_of_ids_and_steps_are_seen(key: str) -> None:
    batch = TensorDict({"is_init": torch.zeros(6, 1, dtype=torch.bool)}, [6])
    batch["collector"] = TensorDict({"traj_ids": torch.zeros(6).long(), "traj_steps": torch.arange(6)}, [6])
    assert boundaries_in(batch).starts.sum() == 1
    batch["collector", key].numpy()[3:] += 7
    assert boundaries_in(batch).starts.nonzero().squeeze(-1).tolist() == [0, 3]
    assert boundaries_in(batch) is boundaries_in(batch)

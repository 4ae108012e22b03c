from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from recurl.core.errors import ArgumentError, MissingKeyError, UsageError
from recurl.data import (
    BurnIn,
    LazyTensorStorage,
    PrioritizedSliceSampler,
    SliceSampler,
    TensorDictReplayBuffer,
    ZeroStart,
    refresh_states,
    slice_priorities,
)
from recurl.modules import set_recurrent_mode
from tests.data.replay_buffers.collected import KNOWN, check_features, make_collector, make_policy, recomputed, segments
from tests.pairs import paired


def filled(policy, sampler, batch_size=32, rows=None, max_size=1000, batches=4):
    ndim = 1 if rows is None else 2
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(max_size, ndim=ndim), sampler=sampler, batch_size=batch_size
    )
    collector = make_collector(policy, rows, frames=96)
    for _ in range(batches):
        buffer.extend(collector.collect())
    collector.shutdown()
    return buffer


RAGGED = {"strict_length": False, "slice_len": 16}
CELLS_AND_BACKENDS = [("lstm", "pad"), ("gru", "pad"), *((cell, "loop") for cell in KNOWN)]
SAMPLERS = [
    lambda: SliceSampler(slice_len=8),
    lambda: SliceSampler(**RAGGED),
    lambda: SliceSampler(**RAGGED, pad_output=True),
    lambda: PrioritizedSliceSampler(1000, 1.0, 1.0, slice_len=8),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "sampler"), paired(CELLS_AND_BACKENDS, SAMPLERS))
def test_burn_in_changes_nothing_for_the_policy_that_collected(kind, sampler):
    cell, backend = kind
    policy = make_policy(cell, backend)
    buffer = filled(policy, sampler())
    sample = buffer.sample()
    before = sample.clone()
    rest = BurnIn(policy, 3)(sample)
    lengths = segments(sample)
    assert segments(rest) == [max(1, length - 3) for length in lengths]
    check_features(policy, rest)
    assert (sample == before).all()
    assert set(sample.keys(True, True)) == set(before.keys(True, True)) == set(rest.keys(True, True))


@pytest.mark.parametrize("steps", [2, 3, 50])
def test_burn_in_leaves_the_last_step_of_a_short_slice(steps):
    policy = make_policy()
    sample = filled(policy, SliceSampler(slice_len=3), batch_size=12).sample()
    rest = BurnIn(policy, steps)(sample)
    assert segments(rest) == [1] * 4
    assert torch.equal(rest["observation"], sample["observation"][2::3])
    check_features(policy, rest)


def test_burn_in_under_another_policy():
    """States at the cut are those of the new policy run from the stored state; gradients don't reach the prefix."""
    buffer = filled(make_policy(), SliceSampler(slice_len=8))
    other = make_policy()
    sample = buffer.sample()
    with set_recurrent_mode(True), torch.no_grad():
        whole = other[0](sample.clone())
    rest = BurnIn(other, 5)(sample)
    kept = (torch.arange(32) % 8) >= 5
    torch.testing.assert_close(recomputed(other, rest), whole["features"][kept])
    assert (rest["h"][::3] != sample["h"][kept][::3]).any()
    assert not rest["h"].requires_grad
    torch.testing.assert_close(rest["h"][1:3], sample["h"][kept][1:3])
    index = buffer.extend(rest)
    assert torch.equal(buffer[index]["is_init"], rest["collector", "stored", "is_init"])


def test_burn_in_runs_only_the_modules_that_compute_the_states():
    policy = make_policy()
    buffer = filled(policy, SliceSampler(slice_len=8))
    policy[1].module.register_forward_hook(lambda *_: pytest.fail("the head ran"))
    buffer.append_transform(BurnIn(policy, 3))
    assert len(buffer.sample()) == 4 * 5


def test_burn_in_without_stored_states_or_without_steps():
    policy = make_policy()
    sample = filled(policy, SliceSampler(slice_len=8)).sample()
    assert (BurnIn(policy, 0)(sample) == sample).all()
    rest = BurnIn(policy, 3)(sample.exclude("h", "c"))
    zeros = ZeroStart(policy)(sample)
    torch.testing.assert_close(recomputed(policy, rest), recomputed(policy, zeros)[(torch.arange(32) % 8) >= 3])


def test_zero_start():
    policy = make_policy()
    sample = filled(policy, SliceSampler(slice_len=8)).sample()
    before = sample.clone()
    zero = ZeroStart(policy)(sample)
    assert not zero["h"][::8].any()
    assert torch.equal(zero["h"][1::8], sample["h"][1::8])
    assert (sample == before).all()
    assert "h" not in ZeroStart(policy)(sample.exclude("h", "c"))


@pytest.mark.parametrize("rows", [None, 3])
@pytest.mark.parametrize(
    "sampler",
    [
        lambda: SliceSampler(slice_len=8),
        lambda: SliceSampler(**RAGGED),
        lambda: SliceSampler(**RAGGED, pad_output=True),
    ],
)
def test_refresh(sampler, rows):
    """A pass over whole trajectories gives all states of the new policy; next and root states stay equal."""
    buffer = filled(make_policy(), sampler(), rows=rows, max_size=200)
    other = make_policy()
    before = buffer[:].clone()
    for _ in range(5):
        refresh_states(buffer, buffer.sample(), other)
    after = buffer[:]
    for key in before.keys(True, True):
        leaf = key if isinstance(key, str) else key[-1]
        assert torch.equal(before[key], after[key]) == (leaf not in ("h", "c")), key
    positions = buffer._index.all_positions()
    following, exists = buffer._index.successors(positions)
    for key in ("h", "c"):
        here, there = (buffer[each[exists]] for each in (positions, following))
        assert torch.equal(here["next", key], there[key])
    assert not after["h"][after["is_init"].squeeze(-1)].any()


def test_refreshed_states_give_the_new_policys_features():
    policy, other = make_policy(), make_policy()
    buffer = filled(policy, SliceSampler(slice_len=400, strict_length=False, replacement=False), batch_size=400)
    for sample in buffer:
        refresh_states(buffer, sample, other)
    sample = buffer.sample(4000)
    begun = sample["is_init"] & sample["collector", "stored", "is_init"]
    assert begun.any()
    single = buffer[sample["index"]]
    with torch.no_grad():
        stepped = other[0](single.select(*other[0].in_keys))
    torch.testing.assert_close(stepped["next", "h"], single["next", "h"], rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("cell", KNOWN)
def test_refreshed_states_of_every_cell(cell):
    policy, other = make_policy(cell), make_policy(cell)
    buffer = filled(policy, SliceSampler(slice_len=400, strict_length=False, replacement=False), batch_size=400)
    if KNOWN[cell].states_at_ends:
        with pytest.raises(UsageError, match="returns them at segment ends only: leave it out, or use a cell with"):
            refresh_states(buffer, buffer.sample(), other)
        return
    for sample in buffer:
        refresh_states(buffer, sample, other)
    single = buffer[:]
    with torch.no_grad():
        stepped = other[0](single.select(*other[0].in_keys))
    for key in other[0].out_keys[1:]:
        torch.testing.assert_close(stepped[key], single[key], rtol=1e-5, atol=1e-5)


def test_refresh_leaves_overwritten_steps_alone():
    policy, other = make_policy(), make_policy()
    buffer = filled(policy, SliceSampler(slice_len=8), max_size=96, batches=1)
    sample = buffer.sample()
    collector = make_collector(policy, frames=96)
    buffer.extend(collector.collect())
    before = buffer[:].clone()
    refresh_states(buffer, sample, other)
    assert (buffer[:] == before).all()


def test_errors_of_refresh():
    policy = make_policy(backend="pad")
    buffer = filled(policy, SliceSampler(slice_len=8))
    sample = buffer.sample()
    with pytest.raises(UsageError, match="'pad' returns them at segment ends only"):
        refresh_states(buffer, sample, policy)
    policy = make_policy()
    with pytest.raises(MissingKeyError, match="The sample must have its 'index'"):
        refresh_states(buffer, sample.exclude("index"), policy)
    small = TensorDictReplayBuffer(storage=LazyTensorStorage(32))
    small.extend(sample.exclude("h"))
    with pytest.raises(ArgumentError, match="no entry 'h' in the storage"):
        refresh_states(small, sample.clone().set("index", torch.arange(32)), policy)


def test_priorities_of_slices():
    policy = make_policy()
    buffer = filled(policy, PrioritizedSliceSampler(1000, 1.0, 1.0, 1e-9, slice_len=8))
    sample = buffer.sample()
    rest = BurnIn(policy, 3)(sample)
    error = torch.randn(len(rest), 1)
    got = slice_priorities(sample, error, rest, eta=0.7)
    rows = error.abs().reshape(4, 5)
    wanted = 0.7 * rows.amax(1) + 0.3 * rows.mean(1)
    torch.testing.assert_close(got.reshape(4, 8), wanted.unsqueeze(-1).expand(4, 8))
    buffer.update_priority(sample["index"], got, sample["collector", "write_step"])
    tree = buffer.sampler.state_dict()["priorities"]
    assert tree[sample["index"][0]] >= wanted[0] - 1e-6


def test_other_errors():
    policy = make_policy()
    with pytest.raises(ArgumentError, match="burn-in steps must not be negative, got -1"):
        BurnIn(policy, -1)
    plain = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["observation"], out_keys=["action"])
    for make in (lambda: BurnIn(plain, 2), lambda: ZeroStart(plain)):
        with pytest.raises(ArgumentError, match="must have a recurrent module"):
            make()
    sample = TensorDict({"is_init": torch.zeros(2, 3, 1, dtype=torch.bool)}, [2, 3])
    with pytest.raises(ArgumentError, match=r"A flat sample \[N\] is needed"):
        BurnIn(policy, 2)(sample)
    with pytest.raises(ArgumentError, match=r"eta must be in \[0, 1\]"):
        slice_priorities(sample, torch.zeros(6), eta=1.5)
    with pytest.raises(ArgumentError, match="one error per step, 6, got shape"):
        slice_priorities(sample, torch.zeros(5))


@pytest.mark.parametrize("cell", KNOWN)
def test_zero_start_and_refresh_of_every_cell(cell):
    """Zeros at slice starts only; a refresh with the collecting policy does not change the stored states."""
    policy = make_policy(cell)
    buffer = filled(policy, SliceSampler(slice_len=8))
    sample = buffer.sample()
    zero, starts = ZeroStart(policy)(sample), sample["is_init"].reshape(-1)
    for key in KNOWN[cell].state_names:
        assert not zero[key][starts].any()
        assert torch.equal(zero[key][~starts], sample[key][~starts])
    before = buffer[:].clone()
    if KNOWN[cell].states_at_ends:
        return  # refused
    refresh_states(buffer, sample, policy)
    for key in KNOWN[cell].state_names:
        size = before[key].abs().max().clamp_min(1).item()
        torch.testing.assert_close(buffer[:][key], before[key], rtol=0, atol=1e-6 * size)

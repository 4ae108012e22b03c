"""A boundary wherever a token isn't the next step of its trajectory, however a collected batch is indexed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from recurl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector, OverlappedCollector
from recurl.continuity import boundaries_in, check_order, check_starts
from recurl.data import (
    LazyTensorStorage,
    SamplerWithoutReplacement,
    SequenceMinibatches,
    SliceSampler,
    TensorDictReplayBuffer,
)
from recurl.envs import GymEnv, InitTracker, TransformedEnv
from recurl.errors import MissingKeyError, UsageError
from recurl.modules import (
    Categorical,
    GRUModule,
    LSTMModule,
    ProbabilisticActor,
    ValueOperator,
    set_recurrent_mode,
)
from recurl.objectives import ClipPPOLoss
from recurl.objectives.value import GAE

CELLS = {"lstm": (LSTMModule, ("h", "c")), "gru": (GRUModule, ("h",))}
Policy = tuple[ProbabilisticActor, TensorDictSequential, TensorDictSequential]


def make_env(rows: int | None = 3) -> TransformedEnv:
    env = GymEnv("recurl/MaskedCartPole-v1", num_envs=rows, categorical_action_encoding=True)
    env.set_seed(1)
    return TransformedEnv(env, InitTracker())


CREATE = partial(GymEnv, "recurl/MaskedCartPole-v1", num_envs=3)


def memory(cell: str, prefix: str, backend: str) -> LSTMModule | GRUModule:
    kind, names = CELLS[cell]
    states = [f"{prefix}_{name}" for name in names]
    return kind(
        2,
        6,
        in_keys=["observation", *states],
        out_keys=[f"{prefix}_features", *(("next", state) for state in states)],
        recurrent_backend=backend,
    )


def make_policy(cell: str = "gru", backend: str = "loop") -> Policy:
    """Actor, critic with a memory of its own, and both in one, whose weights make states matter."""
    torch.manual_seed(0)
    head = TensorDictModule(nn.Linear(6, 2), ["a_features"], ["logits"])
    actor = ProbabilisticActor(
        TensorDictSequential(memory(cell, "a", backend), head),
        ["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
        default_interaction_type="random",
    )
    critic = TensorDictSequential(memory(cell, "v", backend), ValueOperator(nn.Linear(6, 1), ["v_features"]))
    with torch.no_grad():
        for parameter in [*actor.parameters(), *critic.parameters()]:
            parameter.mul_(3.0)
    return actor, critic, TensorDictSequential(critic, actor)


def collected(policy: Policy, batches: int = 2, steps: int = 40, rows: int | None = 3) -> list[TensorDict]:
    collector = Collector(make_env(rows), policy[2], frames_per_batch=steps * (rows or 1))
    return [collector.collect() for _ in range(batches)]


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
    """Each id's steps are numbered 0, 1, 2, ... in the order in which they were made."""
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
def test_collectors_in_processes_number_them_too(kind: type) -> None:
    creates = CREATE if kind is OverlappedCollector else [CREATE, CREATE]
    with kind(creates, frames_per_batch=120, total_frames=480) as collector:
        batches = [batch.clone() for batch in collector]
    assert_numbered([row for batch in batches for row in (batch if batch.ndim > 2 else [batch])])


@pytest.mark.slow
@pytest.mark.parametrize("overlapped", [False, True])
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
    assert not after["is_init"][:, 0].all()  # the number is no sign of an episode's start


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


# -- sequences that begin within a trajectory


def without(batch: TensorDictBase, prefix: str) -> TensorDictBase:
    return batch.exclude(f"{prefix}_h", ("next", f"{prefix}_h"))


@pytest.mark.parametrize("prefix", ["a", "v"])
def test_a_cut_without_states_to_start_from_is_refused(prefix: str) -> None:
    policy = make_policy()
    batch = without(GAE(gamma=0.9, lmbda=0.8, value_network=policy[1])(collected(policy)[1]), prefix)
    loss, gae = ClipPPOLoss(policy[0], policy[1]), GAE(gamma=0.9, lmbda=0.8, value_network=policy[1])
    loss(batch)  # rows as they were collected
    for cut in (batch[:, ::2], batch.reshape(-1)[torch.randperm(120)], batch.flip(1)):
        with pytest.raises(MissingKeyError, match=rf"begin in the middle of episodes, but the states \['{prefix}_h'\]"):
            loss(cut)
        if prefix == "v":
            with pytest.raises(MissingKeyError, match="to start from are not in the batch"):
                gae(cut)
    gae(batch)


def test_true_episode_starts_need_no_state() -> None:
    policy = make_policy()
    batch = without(collected(policy)[0], "v")
    starts = batch["is_init"].squeeze(-1)
    assert starts[:, 1:].any()
    check_starts(batch, ["v_h"])
    check_starts(batch.reshape(-1), ["v_h"])


# -- batches that nothing marks


def unmarked(batch: TensorDictBase) -> TensorDictBase:
    return batch.exclude("collector")


def test_unmarked_batches_are_read_as_they_always_were() -> None:
    policy = make_policy()
    for batch in collected(policy, rows=1):
        data = unmarked(batch[0])
        GAE(gamma=0.9, lmbda=0.8, value_network=policy[1])(data)
        assert abs(ClipPPOLoss(policy[0], policy[1])(data)["max_ratio"].item() - 1) < 1e-4
    batch = unmarked(collected(policy)[1])
    GAE(gamma=0.9, lmbda=0.8, value_network=policy[1])(batch)
    ClipPPOLoss(policy[0], policy[1])(batch)


BROKEN: dict[str, Callable[[list[TensorDict]], TensorDictBase]] = {
    "a flattened continued rollout": lambda batches: batches[1].reshape(-1),
    "shuffled": lambda batches: batches[1].reshape(-1)[torch.randperm(120)],
    "some shuffled": lambda batches: batches[1].reshape(-1)[torch.randperm(120)[:30]],
    "every other step": lambda batches: batches[0][0][::2],
    "backwards": lambda batches: batches[0][0].flip(0),
    "a gap": lambda batches: torch.cat([batches[0][0][:20], batches[0][0][22:]]),
    "rows shuffled in time": lambda batches: batches[1][:, torch.randperm(40)],
}


@pytest.mark.parametrize("keep_ids", [False, True])
@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("cell", CELLS)
def test_states_tell_that_tokens_dont_belong_together(cell: str, how: str, keep_ids: bool) -> None:
    policy = make_policy(cell)
    batches = collected(policy)
    gae, loss = GAE(gamma=0.9, lmbda=0.8, value_network=policy[1]), ClipPPOLoss(policy[0], policy[1])
    batches = [gae(batch) for batch in batches]
    data = BROKEN[how](batches)
    data = data.exclude(("collector", "traj_steps")) if keep_ids else unmarked(data)
    if how == "a flattened continued rollout" and keep_ids:
        assert abs(loss(data)["max_ratio"].item() - 1) < 1e-4
        return
    message = "tokens of this batch don't follow each other.*Keep.*or keep rows separate"
    entries: list[Callable[[TensorDictBase], object]] = [
        loss,
        lambda data: GAE(gamma=0.9, lmbda=0.8, value_network=policy[1])(data),
        lambda data: SequenceMinibatches(data, 2, 5),
        lambda data: TensorDictReplayBuffer(storage=LazyTensorStorage(500, ndim=data.ndim)).extend(data),
    ]
    for enter in entries:
        with pytest.raises(UsageError, match=message):
            enter(data.clone())


def test_what_states_cannot_tell_is_let_pass() -> None:
    policy = make_policy("gru", "pad")
    batch = collected(policy)[1]
    flat = unmarked(batch.reshape(-1))
    constant = flat.clone()
    for key in ("a_h", "v_h"):
        constant["next", key] = torch.full_like(constant["next", key], 0.5)
    replayed = unmarked(batch[0]).clone()
    with set_recurrent_mode(True), torch.no_grad():
        policy[2](replayed)  # writes zeros under next, but at the ends of segments
    for data in (flat.exclude(("next", "a_h"), ("next", "v_h")), constant, replayed):
        check_order(data)


def test_a_recurrent_pass_with_other_weights_is_no_sign_of_disorder() -> None:
    policy = make_policy("gru", "loop")
    data = unmarked(collected(policy, rows=1)[1][0])
    with torch.no_grad():
        for parameter in policy[2].parameters():
            parameter.mul_(0.9)
    with set_recurrent_mode(True), torch.no_grad():
        policy[2](data)
    check_order(data)  # observations follow each other
    with pytest.raises(UsageError, match="don't follow each other"):
        check_order(data[torch.randperm(40)])


def test_nan_states_are_equal() -> None:
    policy = make_policy()
    data = unmarked(collected(policy, rows=1)[1][0])
    data["next", "a_h"][10] = torch.nan
    data["a_h"][11] = torch.nan
    check_order(data)


def test_padding_holds_anything() -> None:
    data = unmarked(collected(make_policy())[1])
    mask = torch.ones(data.batch_size, dtype=torch.bool)
    mask[:, 30:] = False
    for key in ("a_h", "v_h", "observation"):
        data[key][:, 30:] = 7.0
    with pytest.raises(UsageError, match="don't follow each other"):
        check_order(data)
    data["collector", "mask"] = mask
    check_order(data)
    data["a_h"][0, 20] = data["observation"][0, 20] = 7.0
    with pytest.raises(UsageError, match="token 20 of row 0"):
        check_order(data)


def test_nothing_is_read_under_transforms() -> None:
    policy = make_policy()
    data = unmarked(collected(policy)[1].reshape(-1))
    loss = ClipPPOLoss(policy[0], policy[1])
    data["advantage"] = data["value_target"] = torch.zeros(120, 1)

    def value(scale: torch.Tensor) -> torch.Tensor:
        return loss(data)["loss_critic"] * scale

    assert torch.vmap(value)(torch.ones(2)).shape == (2,)


# -- edits that torch doesn't count


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

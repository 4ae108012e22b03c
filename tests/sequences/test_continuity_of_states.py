"""Batches without marks or states: accepted as they are, or rejected because of their states."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from recurl.core.errors import MissingKeyError, UsageError
from recurl.data import (
    LazyTensorStorage,
    SequenceMinibatches,
    TensorDictReplayBuffer,
)
from recurl.modules import (
    set_recurrent_mode,
)
from recurl.objectives import ClipPPOLoss
from recurl.objectives.value import GAE
from recurl.sequences.continuity import check_order, check_starts
from tests.continuous import CELLS, PAIRED, collected, make_policy

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


# -- unmarked batches


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


@pytest.mark.slow
@pytest.mark.parametrize("keep_ids", [False, True])
@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("cell", [*CELLS, *PAIRED])
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


def test_breaks_invisible_in_the_states_are_accepted() -> None:
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
    check_order(data)  # observations are consecutive
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

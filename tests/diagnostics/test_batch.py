"""Checks of a batch on user data, correct and corrupted."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule as Mod
from torch import nn

from recurl.collectors import Collector
from recurl.diagnostics import (
    CheckResult,
    check_batch,
    check_feedback,
    check_gradient,
    check_is_init,
    check_leak,
    check_memory,
    check_mode,
    check_replay,
    check_reset,
    check_traj_ids,
)
from recurl.envs import step_mdp
from recurl.sequences.mode import set_recurrent_mode
from tests.diagnostics.policies import SERVED, each_served, make_env, make_policy, policy_of, randomize, wired

pytestmark = pytest.mark.slow

IDS = ("collector", "traj_ids")
STEPS = ("collector", "traj_steps")


def collected(policy: nn.Module, rows: int | None = 3, batches: int = 2, steps: int = 40) -> TensorDict:
    """Return the last of several batches, whose rows begin in mid-episode."""
    collector = Collector(make_env(rows), policy, frames_per_batch=steps * (rows or 1))
    return [collector.collect() for _ in range(batches)][-1]


def failing(policy: object, batch: TensorDict) -> dict[str, CheckResult]:
    return {result.name: result for result in check_batch(policy, batch) if not result.passed}


@pytest.mark.parametrize(
    ("served", "rows"), each_served([*SERVED, ("lstm", "reference"), ("gru", "reference")], [None, 3])
)
def test_collected_batches_pass(served: tuple[str, str], rows: int | None) -> None:
    cell, backend = served
    policy = make_policy(cell, recurrent_backend=backend)
    batch = collected(policy, rows)
    assert batch["next", "done"].any()
    before = batch.clone()
    assert failing(policy, batch) == {}
    assert (before == batch).all()
    assert failing(policy, batch.reshape(-1)) == {}
    assert failing(policy, batch.exclude("collector")) == {}


def test_rollouts_pass() -> None:
    policy = make_policy()
    batch = wired(policy).rollout(40, policy, break_when_any_done=False)
    assert failing(policy, batch) == {}


def test_a_loop_that_carries_nothing() -> None:
    policy = make_policy()
    env = wired(policy, None)
    steps, td = [], env.reset()
    for _ in range(20):
        with torch.no_grad():
            td = env.step(policy(td.exclude("next")))
        steps.append(td.clone())
        td = td.copy().update(td["next"].select("observation"))  # the states are not carried
        td["is_init"] = torch.zeros(1, dtype=torch.bool)
        if steps[-1]["next", "done"].any():
            td = env.reset()
    batch = torch.stack(steps, 0)
    failed = failing(policy, batch)
    assert {"feedback", "replay"} <= set(failed)
    assert "step_mdp(td)" in failed["feedback"].fix
    assert step_mdp(batch[0])["recurrent_state"].any()


def test_flattened_rows_without_ids() -> None:
    """Lost boundaries between rows are revealed by the continuity of states."""
    policy = make_policy()
    failed = failing(policy, collected(policy).exclude("collector").reshape(-1))
    assert {"feedback", "replay"} <= set(failed)


def test_other_weights() -> None:
    policy = randomize(make_policy())
    batch = collected(policy)
    failed = failing(randomize(policy), batch)
    assert {"feedback", "replay"} <= set(failed)
    assert "with the weights used for collection" in failed["replay"].fix


def test_a_recurrent_pass_before() -> None:
    policy = make_policy("gru", recurrent_backend="pad")
    batch = collected(policy)
    with set_recurrent_mode(True), torch.no_grad():
        policy(batch)
    failed = failing(policy, batch)
    assert set(failed) == {"feedback"}
    assert "a pass in recurrent mode overwrites ('next', state)" in failed["feedback"].fix


def test_feed_forward_policies() -> None:
    policy = policy_of(Mod(nn.Linear(4, 8), ["observation"], ["features"]))
    batch = collected(policy)
    results = check_batch(policy, batch)
    assert all(result.passed for result in results)
    assert "feed-forward" in results[0].detail
    assert set(failing(randomize(policy), batch)) == {"replay"}  # not the weights used for collection


# -- is_init


def spoilt(value: object) -> TensorDict:
    batch = collected(make_policy())
    return batch.set("is_init", value(batch["is_init"]))


def test_is_init() -> None:
    batch = collected(make_policy())
    result = check_is_init(batch)
    assert result.passed
    assert f"True at {int(batch['is_init'].sum())} of 120 steps" in result.detail
    for value, words in (
        (torch.zeros_like, "is always False"),
        (torch.ones_like, "is always True"),
        (lambda flags: flags.float(), "must be bool of shape [3, 40, 1], got torch.float32"),
        (lambda flags: flags.unsqueeze(-1), "got torch.bool [3, 40, 1, 1]"),
    ):
        result = check_is_init(spoilt(value))
        assert not result.passed
        assert words in result.detail
        assert "InitTracker" in result.fix
    assert "has no is_init" in check_is_init(batch.exclude("is_init")).detail


def test_is_init_against_ends() -> None:
    batch = collected(make_policy())
    flags = batch["is_init"]
    row, step, _ = flags[:, 1:].nonzero()[0]
    missed, invented = flags.clone(), flags.clone()
    missed[row, step + 1] = False
    quiet = (~flags[0, 1:, 0]).nonzero()[0] + 1
    invented[0, quiet] = True
    assert "False at the first step of 1 of" in check_is_init(batch.copy().set("is_init", missed)).detail
    assert "True at 1 steps in the middle" in check_is_init(batch.copy().set("is_init", invented)).detail


# -- trajectory ids


def test_traj_ids() -> None:
    batch = collected(make_policy())
    assert check_traj_ids(batch).passed
    assert check_traj_ids(batch.reshape(-1)).passed
    assert "don't flatten" in check_traj_ids(batch.exclude("collector")).detail
    ids = batch[IDS]
    begins = batch["is_init"].squeeze(-1)
    quiet = (~begins[0, 1:]).nonzero()[0] + 1
    invented = ids.clone()
    invented[0, quiet:] += 10_000
    for value, words in (
        (torch.zeros_like(ids), "does not change at"),
        (begins.long().cumsum(-1), "an id is used for two trajectories"),
        (invented, "changes at 1 steps where no episode begins"),
        (ids.float(), "must be integers of shape [3, 40], got torch.float32"),
        (ids.unsqueeze(-1), "got torch.int64 [3, 40, 1]"),
    ):
        result = check_traj_ids(batch.copy().set(IDS, value))
        assert not result.passed
        assert words in result.detail
        assert "recurl.collectors.Collector" in result.fix


def test_traj_steps() -> None:
    batch = collected(make_policy())
    assert "numbered steps" in check_traj_ids(batch).detail
    assert "numbered" not in check_traj_ids(batch.exclude(STEPS)).detail
    steps = batch[STEPS]
    inner = (steps[0] > 0).nonzero()[3]
    skipped = steps.clone()
    skipped[0, inner] += 7
    for value, words in (
        (skipped, "traj_steps does not increase by one at"),
        (torch.zeros_like(steps), "traj_steps does not increase by one at"),
        (steps.double(), "steps must be integers of shape [3, 40], got torch.float64"),
    ):
        result = check_traj_ids(batch.copy().set(STEPS, value))
        assert not result.passed
        assert words in result.detail


# -- single checks


def test_leak_of_a_policy_that_ignores_is_init() -> None:
    class Blind(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module, self.in_keys, self.out_keys = module, module.in_keys, module.out_keys

        def forward(self, tensordict: object) -> object:
            blind = tensordict.exclude("collector").set("is_init", torch.zeros_like(tensordict["is_init"]))
            out = self.module(blind)
            return tensordict.update(out.select(*self.out_keys))

    module = make_policy()[0]
    policy = policy_of(Blind(module))
    batch = collected(policy)
    assert not check_leak(policy, batch).passed
    failed = failing(policy, batch)
    assert {"leak", "reset"} <= set(failed)
    assert "with other data before the boundary" in failed["leak"].detail
    assert "InitTracker" in failed["leak"].fix


def test_missing_states_are_named() -> None:
    policy = make_policy()
    batch = collected(policy)
    for key in ("recurrent_state", ("next", "recurrent_state")):
        result = check_feedback(policy, batch.exclude(key))
        assert f"the batch has no {key!r}" in result.detail
        assert "get_primers_from_module" in result.fix


def test_an_error_inside_a_check_is_a_failure() -> None:
    policy = make_policy()
    batch = collected(policy)
    result = check_replay(policy, batch.exclude("observation"))
    assert not result.passed
    assert "raised " in result.detail
    assert "observation" in result.detail


def test_a_batch_of_another_policy() -> None:
    policy = make_policy()
    batch = collected(policy).select("observation", "is_init", ("next", "done"))
    result = check_replay(policy, batch)
    assert "has no entry that the policy writes" in result.detail
    assert "collect the batch with the policy" in result.fix


def test_nothing_to_compare_is_said() -> None:
    policy = make_policy()
    batch = collected(policy, None, steps=1)
    batch["is_init"] = torch.ones_like(batch["is_init"])
    assert "nothing to compare" in check_memory(policy, batch).detail
    assert "nothing to compare" in check_leak(policy, batch).detail
    assert "nothing to compare" in check_gradient(policy, batch).detail
    batch["is_init"] = torch.zeros_like(batch["is_init"])
    assert "nothing to compare" in check_reset(policy, batch).detail
    assert check_mode(policy, batch).passed

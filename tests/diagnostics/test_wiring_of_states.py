"""States that are lost, zeroed or detached, and the checks that must detect it."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule as Mod

from recurl.collectors import Collector
from recurl.core.specs import Unbounded
from recurl.diagnostics import (
    check_batch,
)
from recurl.envs import InitTracker, TensorDictPrimer, Transform, TransformedEnv
from recurl.modules import GRUModule
from recurl.sequences.mode import set_recurrent_mode
from tests.diagnostics.failing import failing
from tests.diagnostics.policies import make_env, make_policy, policy_of, wired

pytestmark = pytest.mark.slow


class Forgetting(Transform):
    """Transform that overwrites the new state with the old one, as a primer that always copies would."""

    def _step(self, tensordict: object, next_tensordict: object) -> object:
        return next_tensordict.set("recurrent_state", tensordict["recurrent_state"])


def test_state_overwritten_after_the_policy() -> None:
    policy = make_policy()
    failed = failing(policy, wired(policy).append_transform(Forgetting()))
    assert {"feedback", "memory"} <= set(failed)
    assert "the one that the policy computes" in failed["feedback"].detail
    assert "remove what overwrites ('next', 'recurrent_state')" in failed["feedback"].fix
    assert "zero after every step" in failed["memory"].detail


class NotPromoting(TransformedEnv):
    """Environment that starts every step from the initial state, as a loop without step_mdp does."""

    def carry(self, tensordict: object) -> object:
        root = super().carry(tensordict)
        return root.set("recurrent_state", torch.zeros_like(root["recurrent_state"]))


@pytest.mark.parametrize("rows", [None, 3])
def test_states_not_promoted(rows: int | None) -> None:
    policy = make_policy()
    env = NotPromoting(wired(policy, rows))
    # The wrapper of the experiment carries states correctly. This fault is in the user's loop and shows in their batch.
    batch = Collector(env, policy, frames_per_batch=30 * (rows or 1)).collect()
    failed = {r.name: r for r in check_batch(policy, batch) if not r.passed}
    assert {"feedback", "replay"} <= set(failed)
    assert "next state of the previous step differ" in failed["feedback"].detail
    assert "step_mdp(td)" in failed["feedback"].fix
    assert "feedback" in failing(policy, env)


def test_state_written_elsewhere() -> None:
    gru = GRUModule(4, 8, in_keys=["observation", "h"], out_keys=["features", "h_out"])
    primer = TensorDictPrimer({"h": Unbounded(1, 8)})
    policy = policy_of(gru)
    failed = failing(policy, make_env(2, InitTracker(), primer))
    assert "reads its state from 'h' but writes it to 'h_out'" in failed["state_keys"].detail
    assert "out_keys=[..., ('next', 'h')]" in failed["state_keys"].fix
    assert "state_keys" in failing(policy, make_env(2), auto_register_policy_transforms=True)


@pytest.mark.parametrize("rows", [None, 3])
def test_policy_that_zeroes_its_new_state(rows: int | None) -> None:
    key = ("next", "recurrent_state")
    policy = make_policy("gru", Mod(torch.zeros_like, [key], [key]))
    failed = failing(policy, wired(policy, rows))
    assert "zero after every step" in failed["memory"].detail
    assert "don't modify the state" in failed["memory"].fix


def test_policy_that_zeroes_the_state_it_reads() -> None:
    gru = GRUModule(4, 8, in_keys=["observation", "h"], out_keys=["features", ("next", "h")])
    policy = policy_of(Mod(torch.zeros_like, ["h"], ["h"]), gru)
    failed = failing(policy, wired(gru))
    assert "altering the state 'h' changes nothing" in failed["memory"].detail
    assert "don't modify the state" in failed["memory"].fix


class Detaching(GRUModule):
    """Module that runs a sequence step by step and detaches the state between steps."""

    def forward(self, tensordict: object = None, *_: object, **__: object) -> object:
        if not self.recurrent_mode:
            return super().forward(tensordict)
        state, steps = None, []
        for step in tensordict.unbind(-1):
            step = step.copy()
            if state is not None:
                init = step["is_init"].unsqueeze(-1)
                step["recurrent_state"] = torch.where(init, step["recurrent_state"], state.detach())
            with set_recurrent_mode(False):
                super().forward(step)
            state = step["next", "recurrent_state"]
            steps.append(step)
        for key in self.out_keys:
            tensordict.set(key, torch.stack([step[key] for step in steps], tensordict.ndim - 1))
        return tensordict


def test_policy_that_detaches_its_state() -> None:
    policy = policy_of(Detaching(4, 8, in_key="observation", out_key="features"))
    env = TransformedEnv(make_env(None), InitTracker()).append_transform(policy[0].make_tensordict_primer())
    failed = failing(policy, env)
    assert set(failed) == {"gradient"}
    assert "no gradient to the previous step" in failed["gradient"].detail
    assert "don't detach" in failed["gradient"].fix

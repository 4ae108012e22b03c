"""VMAS: rows of agents against the simulator itself."""

from __future__ import annotations

import itertools
import re
import sys

import pytest
import torch

from recurl.core.errors import ArgumentError, MissingDependencyError
from recurl.envs import InitTracker, TransformedEnv, VmasEnv, check_env_specs

vmas = pytest.importorskip("vmas")


def test_rows_are_those_of_the_simulator():
    env = VmasEnv("balance", 2, max_steps=6, return_state=True, agent_ids=True)
    check_env_specs(env)
    env.set_seed(3)
    batch = TransformedEnv(env, InitTracker()).rollout(8, break_when_any_done=False)
    peer = vmas.make_env("balance", num_envs=2, seed=3, max_steps=6, terminated_truncated=True, clamp_actions=True)
    seen = peer.reset(seed=3)
    rows = batch.reshape(2, 3, 8)
    for t in range(6):
        assert torch.equal(rows["observation"][:, :, t], torch.stack(seen, 1))
        assert torch.equal(rows["state"][:, 1, t], torch.cat(seen, -1))
        seen, rewards, terminated, truncated, _ = peer.step(list(rows["action"][:, :, t].unbind(1)))
        assert torch.equal(rows["next", "observation"][:, :, t], torch.stack(seen, 1))
        assert torch.equal(rows["next", "reward"][:, :, t, 0], torch.stack(rewards, 1))
        assert torch.equal(rows["next", "terminated"][:, 2, t, 0], terminated)
        assert torch.equal(rows["next", "truncated"][:, 2, t, 0], truncated)
        assert torch.equal(rows["next", "state"][:, 0, t], torch.cat(seen, -1))
    assert batch["is_init"][:, 6].all()
    assert not torch.equal(batch["observation"][:, 6], batch["next", "observation"][:, 5])
    assert not torch.equal(batch["observation"][:, 6], batch["observation"][:, 0])  # places are drawn anew
    assert "agent_mask" not in batch


def test_a_restored_state_goes_on_alike():
    env, other = (VmasEnv("balance", 2, max_steps=9, n_agents=2) for _ in range(2))
    env.set_seed(2)
    torch.manual_seed(0)
    root = env.reset()
    for _ in range(5):
        root = env.step_and_maybe_reset(env.rand_action(root))[1]
    other.set_state(env.get_state())
    found = []
    for each in (env, other):
        torch.manual_seed(0)
        found.append(each.rollout(12, break_when_any_done=False, auto_reset=False, tensordict=root.clone()))
    assert (found[0] == found[1]).exclude("collector").all()
    assert found[0]["next", "done"].any()
    assert env.state_obstacle is None


def test_environments_end_singly_and_have_their_own_random_numbers():
    env, other = VmasEnv("balance", 3), VmasEnv("balance", 3)
    roots = [each.reset()["observation"] for each in (env, env, other)]
    assert not any(torch.equal(*pair) for pair in itertools.combinations(roots, 2))
    torch.manual_seed(0)
    env.set_seed(1)
    first = env.rollout(60, break_when_any_done=False)
    ended = first["next", "terminated"].reshape(3, 3, 60)
    assert ended.any()
    assert torch.equal(ended[:, :1].expand(3, 3, 60), ended)
    assert not torch.equal(ended[0], ended[1])
    torch.manual_seed(0)
    env.set_seed(1)
    root, again = env.reset(), []
    for _ in range(60):  # steps of another environment change nothing
        other.rollout(1, policy=lambda td: td.set("action", torch.zeros(9, 2)))
        stepped, root = env.step_and_maybe_reset(env.rand_action(root))
        again.append(stepped["observation"])
    assert torch.equal(torch.stack(again, 1), first["observation"])


def test_actions_and_observations():
    assert VmasEnv("balance", continuous_actions=False).action_spec.n == 9
    tag = VmasEnv("simple_tag", 2, pad_observations=True)
    root = tag.reset()
    assert root["observation"].shape == (8, 16)
    assert not root["observation"].reshape(2, 4, 16)[:, 3, 14:].any()
    assert VmasEnv("wheel", 2).rollout(3)["next", "reward"].isfinite().all()  # each agent's has the shape [N, 1]
    named = VmasEnv("balance", 2, n_agents=2).rollout(2, policy=lambda td: td.set("action", torch.full((4, 2), 5.0)))
    assert named["observation"].isfinite().all()  # clamped


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: VmasEnv("balanc"), "VMAS has no scenario 'balanc'. Did you mean balance?"),
        (lambda: VmasEnv("simple_tag"), "same observation space, as they are rows of one batch"),
        (lambda: VmasEnv("balance", 0), "num_envs must be an integer of at least 1"),
    ],
)
def test_refusals(make, said):
    with pytest.raises(ArgumentError, match=re.escape(said)):
        make()


def test_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "vmas", None)
    with pytest.raises(MissingDependencyError, match="needs the module 'vmas': pip install vmas"):
        VmasEnv("balance")

"""Agents as rows: episodes of their own, absence, states for central critics, refusals."""

from __future__ import annotations

import copy
import itertools
import re

import numpy as np
import pytest
import torch
from gymnasium import spaces

from recurl.collectors import Collector
from recurl.core.errors import ArgumentError, ArgumentTypeError, UnfitStateError, UnsupportedError, UsageError
from recurl.envs import (
    AgentsReset,
    AgentsStep,
    InitTracker,
    MultiAgentEnv,
    ParallelEnv,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)
from tests.envs.agents import LIMIT, Walkers, alone

STEPS = 40


def rollout(env, steps=STEPS):
    return TransformedEnv(env, InitTracker()).rollout(steps, break_when_any_done=False)


def episodes(batch):
    """Return row, first token and end (exclusive) of every stretch between ``is_init`` and ``done``, by definition."""
    found = []
    for row in range(batch.shape[0]):
        first = 0
        for t in range(batch.shape[1]):
            if batch["next", "done"][row, t, 0] or t == batch.shape[1] - 1:
                found.append((row, first, t + 1))
                first = t + 1
    return found


@pytest.mark.parametrize("action", ["box", "discrete"])
def test_every_episode_is_that_of_the_agent_alone(action):
    torch.manual_seed(0)
    env = Walkers(action=action, limits=[LIMIT, 7])
    batch = rollout(env)
    counts = torch.zeros(6)
    for row, a, b in episodes(batch):
        assert batch["is_init"][row, a:b, 0].tolist() == [True] + [False] * (b - a - 1)
        present = batch["collector", "mask"][row, a:b]
        assert present.all() or not present.any()
        own, after = batch[row, a:b], batch["next"][row, a:b]
        if not present.any():
            assert not own["observation"].any()
            assert not after["observation"].any()
            assert not after["reward"].any()
            assert not after["terminated"].any()
            continue
        counts[row] += 1
        observations, rewards = alone(row % 3, own["action"])
        assert torch.equal(own["observation"], observations[:-1])
        assert torch.equal(after["observation"], observations[1:])
        assert torch.equal(after["reward"][:, 0], rewards)
        life = env.lives[row % 3]
        assert after["terminated"][-1, 0] == (b - a == life)
        assert not after["terminated"][:-1].any()
        if b < STEPS:
            assert after["truncated"][-1, 0] == (b - a < life)
    # agent 0 lives 3 of every 5 steps and begins anew with its environment, agent 1 with it alone, agent 2 lives 5
    assert counts.tolist() == [11, 4, 11, 11, 6, 11]
    assert batch["agent_mask"].data_ptr() == batch["collector", "mask"].data_ptr()
    assert env.resets == [[0, 1], *([env] for t in range(1, STEPS + 1) for env in (0, 1) if t % (LIMIT, 7)[env] == 0)]


def test_absent_agents_by_hand():
    batch = rollout(Walkers(1, lives=(3, None), waits=(2, None), limits=[9]), 11)
    ones = "11100111011"  # dies at step 2, waits 3 and 4, lives again until 7, waits 8, the environment ends, begins
    assert [int(x) for x in ones] == batch["collector", "mask"][0].int().tolist()
    assert batch["collector", "mask"][1].all()
    assert [int(x) for x in "00101001100"] == batch["next", "done"][0, :, 0].int().tolist()
    assert [int(x) for x in "10010100110"] == batch["is_init"][0, :, 0].int().tolist()
    assert [int(x) for x in "00000000100"] == batch["next", "done"][1, :, 0].int().tolist()
    assert [int(x) for x in "00100001000"] == batch["next", "terminated"][0, :, 0].int().tolist()
    assert [int(x) for x in "00001000100"] == batch["next", "truncated"][0, :, 0].int().tolist()


class InPlace(Walkers):
    """Every result is memory that the next step, or reset, overwrites."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.results = {}

    def _written(self, found):
        kept = self.results.setdefault(type(found), found)
        for memory, value in zip(kept, found, strict=True):
            memory.copy_(value)
        return kept

    def _reset_envs(self, envs, seed):
        found = super()._reset_envs(envs, seed)
        return self._written(found._replace(active=self.active | envs[:, None]))

    def _step_envs(self, actions):
        return self._written(super()._step_envs(actions))


def test_results_may_be_overwritten():
    batches = []
    for kind in (Walkers, InPlace):
        torch.manual_seed(0)
        batches.append(rollout(kind(return_state=True)))
    assert (batches[0] == batches[1]).exclude(("collector", "traj_ids")).all()


def test_agents_that_all_begin_anew_do_not_end_their_environment():
    env = Walkers(1, lives=(3, 3), waits=(0, 0))
    batch = rollout(env, 14)
    assert env.resets == [[0], [0]]
    assert batch["is_init"][..., 0].nonzero()[:5, 1].tolist() == [0, 3, 6, 9, 11]
    assert batch["collector", "mask"].all()


def test_state_and_ids():
    torch.manual_seed(0)
    batch = rollout(Walkers(agent_ids=True, return_state=True))
    rows = batch.reshape(2, 3, STEPS)
    assert torch.equal(rows["agent_id"], torch.eye(3)[:, None].expand(2, 3, STEPS, 3))
    present = rows["collector", "mask"]
    for env in range(2):
        for t in range(STEPS):
            shown = torch.where(present[env, :, t, None], rows["observation"][env, :, t], 0).flatten()
            for agent in range(3):
                assert torch.equal(rows["state"][env, agent, t], shown)  # the same for all agents
                after, own = rows["next", "state"][env, agent, t], rows["next", "observation"][env, agent, t]
                assert torch.equal(after[2 * agent : 2 * agent + 2], own)
                ended = rows["next", "done"][env, :, t, 0]
                if not ended[agent]:
                    assert torch.equal(after, rows["state"][env, agent, t + 1] if t + 1 < STEPS else after)
                elif ended.all() and present[env, :, t].all():  # the last observations of all
                    assert torch.equal(after, rows["next", "observation"][env, :, t].flatten())
    assert rows["state"].isfinite().all()
    assert rows["next", "state"].isfinite().all()


def test_agents_that_stay_have_no_mask():
    env = Walkers(lives=(None, None), waits=(None, None), agents_leave=False)
    check_env_specs(env)
    batch = rollout(env)
    assert "agent_mask" not in batch
    assert ("collector", "mask") not in batch
    assert batch["next", "truncated"][:, LIMIT - 1].all()
    assert batch["is_init"][:, LIMIT].all()


def test_specs_seeds_and_names():
    env = Walkers(agent_ids=True, return_state=True)
    check_env_specs(env)
    shapes = {key: tuple(spec.shape) for key, spec in env.observation_spec.items()}
    assert shapes == {"observation": (6, 2), "agent_id": (6, 3), "state": (6, 6), "agent_mask": (6, 1)}
    env.reset(seed=7)
    env.reset()
    assert env.seeds[-2:] == [7, None]
    assert repr(env) == "Walkers(num_envs=2, agents=['agent_0', 'agent_1', 'agent_2'], device=cpu)"
    other = copy.deepcopy(env)
    torch.manual_seed(1)
    first = rollout(env)
    torch.manual_seed(1)
    second = rollout(other)
    assert (first == second).exclude(("collector", "traj_ids")).all()


def test_several_processes_and_batches_are_the_same():
    torch.manual_seed(2)
    whole = next(iter(Collector(Walkers(), None, frames_per_batch=6 * STEPS)))
    torch.manual_seed(2)
    collector = Collector(Walkers(), None, frames_per_batch=6 * 8)
    parts = torch.cat([batch for batch, _ in zip(collector, range(STEPS // 8), strict=False)], -1)
    for key in ("observation", ("next", "done"), ("collector", "mask"), "action"):
        assert torch.equal(whole[key], parts[key])
    for kind in (SerialEnv, ParallelEnv):
        with kind(2, Walkers, **({"concatenate": True} if kind is ParallelEnv else {})) as env:
            batch = TransformedEnv(env, InitTracker()).rollout(12, break_when_any_done=False)
            rows = batch.reshape(-1, 12)
            assert torch.equal(rows["collector", "mask"][:6], whole["collector", "mask"][:, :12])
            assert torch.equal(rows["collector", "mask"][6:], whole["collector", "mask"][:, :12])


def test_rows_cut_by_a_transform():
    env = Walkers(lives=(None, None), waits=(None, None))
    cut = TransformedEnv(env, StepCounter(4)).rollout(9, break_when_any_done=False)
    assert cut["next", "truncated"][:, 3].all()
    assert torch.equal(cut["observation"][:, 4], cut["observation"][:, 0])
    # agent 0 waits when the others are cut: it takes part again from the step after next
    env = Walkers(1, lives=(2, None), waits=(None, None))
    cut = TransformedEnv(TransformedEnv(env, InitTracker()), StepCounter(4)).rollout(9, break_when_any_done=False)
    assert cut["collector", "mask"][0].int().tolist() == [1, 1, 0, 0, 0, 1, 0, 0, 0]
    assert cut["is_init"][0, :, 0].int().tolist() == [1, 0, 1, 0, 0, 1, 1, 0, 0]
    assert cut["next", "done"][0, :, 0].int().tolist() == [0, 1, 0, 0, 1, 1, 0, 0, 1]


class Hunt(Walkers):
    """Agents leave marks, objects of a list, until none is left of their places."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.marks, self.random = [], torch.Generator()

    def _reset_envs(self, envs, seed):
        if seed is not None:
            self.random.manual_seed(seed)
        return super()._reset_envs(envs, seed)

    def _step_envs(self, actions):
        self.marks = [*self.marks, Mark(self.place.clone())][-3:]
        self.place = self.place + sum(mark.place for mark in self.marks) / 9 + torch.rand(1, generator=self.random)
        return super()._step_envs(actions)


class Mark:
    def __init__(self, place):
        self.place = place


class Unsaved(Walkers):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.draws = (number for number in itertools.count())


def continued(env, root, steps=LIMIT + 4):
    """Return steps from ``root`` with actions of a seed, across the end of an environment."""
    torch.manual_seed(4)
    return env.rollout(steps, break_when_any_done=False, auto_reset=False, tensordict=root.clone())


def restored(env, fresh, tmp_path):
    """Return an environment that has the state of another, from a file."""
    torch.save(env.get_state(), tmp_path / "state")
    fresh.set_state(torch.load(tmp_path / "state", weights_only=True))
    return fresh


@pytest.mark.parametrize("kind", [Walkers, Hunt])
@pytest.mark.parametrize("transformed", [False, True])
def test_a_restored_state_goes_on_alike(kind, transformed, tmp_path):
    def make():
        env = kind(return_state=True)
        return TransformedEnv(env, InitTracker()) if transformed else env

    env = make()
    assert env.can_save_state
    env.set_seed(3)
    root = env.reset()
    for _ in range(4):  # agent 0 waits, agent 2 is about to begin anew
        root = env.step_and_maybe_reset(env.rand_action(root))[1]
    assert not root["agent_mask"].all()
    fresh, generator = make(), torch.get_rng_state()
    restored(env, fresh, tmp_path)
    assert torch.equal(torch.get_rng_state(), generator)
    found = continued(fresh, root)
    assert (continued(env, root) == found).exclude("collector").all()
    assert found["next", "done"].reshape(2, 3, -1).all(1).any()


def test_states_that_cannot_be_saved_or_restored():
    env = Unsaved()
    assert env.state_obstacle == "a trial of it raised TypeError: cannot pickle 'generator' object"
    with pytest.raises(UnsupportedError, match=r"can't save its state: a trial of it raised TypeError: cannot pickle"):
        env.get_state()
    state = Walkers().get_state()
    with pytest.raises(ArgumentError, match=r"got \['agents', 'shape'\] of shape \[2, 3\]"):
        Walkers(3).set_state(state)
    with pytest.raises(ArgumentError, match=r"got \['gym'\]"):
        Walkers().set_state({"gym": {}})
    with pytest.raises(UnfitStateError, match=r"an object of .*Walkers, which the environment's package lacks"):
        Hunt().set_state(state)


def test_some_rows_of_an_environment_cannot_be_reset():
    env = Walkers()
    root = env.reset()
    with pytest.raises(UsageError, match=r"environments \[1\] are reset: reset rows e \* 3 to e \* 3 \+ 2"):
        env.reset(root.set("_reset", torch.tensor([False, False, False, True, False, False])))
    env.reset(root.set("_reset", torch.tensor([False, False, False, True, True, True])))
    assert env.resets[-1] == [1]
    with pytest.raises(UsageError, match="needs a reset of all rows first"):
        Walkers().step(root.set("action", env.action_spec.rand()))


class Broken(MultiAgentEnv):
    def __init__(self, wrong, **options):
        box = spaces.Box(-1, 1, (1,), np.float32)
        space = options.pop("space", box)
        super().__init__(["a", "b"], 1, observation_space=space, action_space=spaces.Discrete(2), **options)
        self.wrong = wrong

    def _reset_envs(self, envs, seed):
        return AgentsReset(torch.zeros(1, 2, 1), self.wrong.get("at_reset"))

    def _step_envs(self, actions):
        none = torch.zeros(1, 2, dtype=torch.bool)
        found = {
            "observation": torch.zeros(1, 2, 1),
            "reward": torch.zeros(1, 2),
            "terminated": none,
            "truncated": none,
        }
        return AgentsStep(**{**found, **self.wrong})


AWAY = torch.tensor([[True, False]])


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"reward": torch.zeros(2)}, ArgumentError, "reward of Broken must have shape [1, 2], got [2]"),
        ({"observation": torch.zeros(2, 1)}, ArgumentError, "'observation' of Broken must have shape [1, 2, 1]"),
        ({"observation": {"x": torch.zeros(1, 2, 1)}}, ArgumentTypeError, "must be ['observation'], as in its"),
        ({"terminated": torch.zeros(1, 2)}, ArgumentError, "terminated of Broken must be bool of shape [1, 2] or [1]"),
        (
            {"active": torch.ones(1, dtype=torch.bool)},
            ArgumentError,
            "active of Broken must be bool of shape [1, 2], got",
        ),
        ({"active": AWAY}, ArgumentError, "must be terminated or truncated, but agents ['b'] are neither"),
        ({"terminated": ~AWAY}, ArgumentError, "agents_leave=False, but agents ['b'] left an environment that goes on"),
        ({"at_reset": ~AWAY & AWAY}, ArgumentError, "An agent of every environment of Broken must be active"),
    ],
)
def test_results_that_are_refused(wrong, error, said):
    env = Broken(wrong)
    with pytest.raises(error, match=re.escape(said)):
        env.rollout(1)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Walkers(0), "num_envs must be an integer of at least 1"),
        (lambda: Walkers(lives=(), waits=()), "at least one agent"),
        (
            lambda: Broken({}, space=spaces.Dict(state=spaces.Box(-1, 1, (1,))), return_state=True),
            "'state' of Broken has the name of an optional entry",
        ),
        (
            lambda: Broken({}, space=spaces.MultiBinary(2), return_state=True),
            "but 'observation' of Broken is torch.int8",
        ),
    ],
)
def test_arguments_that_are_refused(make, said):
    with pytest.raises(ArgumentError, match=said):
        make()


def test_actions_are_checked():
    env = Walkers()
    with pytest.raises(ArgumentError, match=r"floating-point numbers of shape \[6, 2\]"):
        env.step(env.reset().set("action", torch.zeros(6, 1)))


def test_dict_observations():
    box = spaces.Box(-1, 1, (1,), np.float32)

    class Two(Broken):
        def _reset_envs(self, envs, seed):
            return AgentsReset({("arm", "joint"): torch.ones(1, 2, 1), "x": torch.zeros(1, 2, 1)})

    space = spaces.Dict(arm=spaces.Dict(joint=box), x=box)
    root = Two({}, space=space, return_state=True).reset()
    assert root["arm", "joint"].tolist() == [[1.0], [1.0]]
    assert root["state"].tolist() == [[1.0, 0.0, 1.0, 0.0]] * 2

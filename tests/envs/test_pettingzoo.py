"""PettingZoo's parallel environments, with agents that die, are truncated, appear and return."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
import torch
from gymnasium import spaces

from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingDependencyError
from recurl.envs import InitTracker, PettingZooEnv, TransformedEnv, check_env_specs

pettingzoo = pytest.importorskip("pettingzoo")

NAMES = "abcx"
LISTED = {0: "ab", 2: "abc", 3: "bc", 5: "abc", 6: "ac", 8: ""}


class Game(pettingzoo.ParallelEnv):
    """Scripted: 'a' dies at step 3 and returns at 5; 'b' is truncated at 6; 'c' appears at 2; all end at 8."""

    def __init__(self, space=None, action=None, last=8, listed=None):
        self.metadata, self.possible_agents = {"name": "game"}, ["a", "b", "c"]
        self.listed = LISTED if listed is None else listed
        self.space, self.action, self.last = space or spaces.Box(-np.inf, np.inf, (2,), np.float64), action, last
        self.closed = False
        self.actions = []

    def observation_space(self, agent):
        return self.space

    def action_space(self, agent):
        return self.action or spaces.Discrete(3, start=4)

    def reset(self, seed=None, options=None):
        self.seed, self.time, self.agents = seed, 0, ["a", "b"]
        return self.seen(), {}

    def seen(self):
        return {a: np.array([self.time, NAMES.index(a)], np.float64) for a in self.agents}

    def step(self, actions):
        assert set(actions) == set(self.agents)
        self.actions.append(dict(actions))
        self.time += 1
        before = self.agents
        after = list(self.listed.get(self.time, before))
        self.agents = [*before, *(a for a in after if a not in before)]
        seen = self.seen()
        self.agents = [] if self.time == self.last else after
        left = [a for a in before if a not in self.agents]
        return (
            seen,
            {a: float(self.time) for a in before},
            {a: a in left and self.time == 3 for a in before},
            {a: a in left and self.time != 3 for a in before},
            {},
        )


def test_agents_that_come_and_go():
    env = PettingZooEnv(Game, num_envs=2, agent_ids=True, return_state=True)
    check_env_specs(env)
    for game in env.envs:
        game.actions.clear()
    batch = TransformedEnv(env, InitTracker()).rollout(10, break_when_any_done=False)

    def row(key, agent):
        return "".join(str(int(x)) for x in batch[key][agent].flatten())

    assert [row(("collector", "mask"), a) for a in range(3)] == ["1110011111", "1111110011", "0011111100"]
    assert [row("is_init", a) for a in range(3)] == ["1001010010", "1000001010", "1010000010"]
    assert [row(("next", "terminated"), a) for a in range(3)] == ["0010000000", "0000000000", "0000000000"]
    # waiting rows end, too, when their agent returns, or with the environment
    assert [row(("next", "truncated"), a) for a in range(3)] == ["0000100100", "0000010100", "0100000101"]
    assert torch.equal(batch["observation"][0, :, 0], torch.tensor([0, 1, 2, 0, 0, 5, 6, 7, 0, 1.0]))
    assert torch.equal(batch["next", "observation"][0, :, 0], torch.tensor([1, 2, 3, 0, 0, 6, 7, 8, 1, 2.0]))
    assert torch.equal(batch["next", "reward"][2, :, 0], torch.tensor([0, 0, 3, 4, 5, 6, 7, 8, 0, 0.0]))
    assert torch.equal(batch["state"][1, 6:8], batch["state"][0, 6:8])
    assert batch["state"][0, 6].tolist() == [6, 0, 0, 0, 6, 2]
    assert batch["next", "state"][1, 5].tolist() == [6, 0, 6, 1, 6, 2]  # its own last observation
    assert batch["next", "state"][0, 5].tolist() == [6, 0, 0, 0, 6, 2]
    assert torch.equal(batch[:3].exclude("action", "collector")["observation"], batch[3:]["observation"])
    for number, game in enumerate(env.envs):
        for t, actions in enumerate(game.actions[:10]):
            for agent, value in actions.items():
                assert value == batch["action"][3 * number + NAMES.index(agent), t] + 4
    env.set_seed(5)
    env.reset()
    assert [game.seed for game in env.envs] == [5, 8]  # as in worker processes, which step an environment each
    env.close()


def test_agents_that_stay():
    class Stays(Game):
        def reset(self, seed=None, options=None):
            self.time, self.agents = 0, ["a", "b", "c"]
            return self.seen(), {}

    env = PettingZooEnv(Stays(action=spaces.Box(-1, 1, (2,)), listed={}), agents_leave=False)
    batch = env.rollout(9, break_when_any_done=False)
    assert "agent_mask" not in batch
    assert batch["next", "truncated"][:, 7].all()
    assert batch["action"].shape == (3, 9, 2)
    with pytest.raises(ArgumentError, match="agents_leave=False, but agents"):
        PettingZooEnv(Game, agents_leave=False).rollout(2)


def test_dict_and_discrete_observations():
    class Named(Game):
        def seen(self):
            return {a: {"place": np.zeros(2, np.float32), "kind": np.int64(1)} for a in self.agents}

    space = spaces.Dict(place=spaces.Box(-1, 1, (2,)), kind=spaces.Discrete(3))
    root = PettingZooEnv(Named, space=space).reset()
    assert root["kind"].tolist() == [[0, 1, 0], [0, 1, 0], [0, 0, 0]]  # 'c' is absent
    assert root["place"].shape == (3, 2)


ONE = Game()


PUSH = spaces.Box(-1, 1, (2,), np.float32)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Dict(gait=spaces.Discrete(3, start=1), push=PUSH),
        spaces.Tuple([spaces.Discrete(2), spaces.Dict(push=PUSH)]),
    ],
)
def test_actions_of_several_parts(space):
    class Checked(Game):
        def step(self, actions):
            assert all(space.contains(action) for action in actions.values())
            return super().step(actions)

    env = PettingZooEnv(Checked, 2, action=space)
    batch = env.rollout(10, break_when_any_done=False)
    for row, game in enumerate(env.envs):
        for t, actions in enumerate(game.actions):
            for agent, action in actions.items():
                push = action["push"] if isinstance(space, spaces.Dict) else action[1]["push"]
                key = ("action", "push") if isinstance(space, spaces.Dict) else ("action", "1", "push")
                assert torch.equal(torch.from_numpy(push), batch[key][3 * row + NAMES.index(agent), t])


def test_agents_with_numbers_for_names():
    class Numbered(Game):
        def __init__(self):
            super().__init__(listed={2: [7]})
            self.possible_agents = [7, 8]

        def reset(self, seed=None, options=None):
            self.time, self.agents = 0, [8, 7]
            return self.seen(), {}

        def seen(self):
            return {a: np.array([self.time, a], np.float64) for a in self.agents}

    env = PettingZooEnv(Numbered)
    batch = env.rollout(4, break_when_any_done=False)
    assert env.agents == ["7", "8"]
    assert batch["observation"][..., 1].tolist() == [[7, 7, 7, 7], [8, 8, 0, 0]]
    assert batch["collector", "mask"].tolist() == [[True] * 4, [True, True, False, False]]


def test_a_saved_state():
    env, other = PettingZooEnv(Game, 2, return_state=True), PettingZooEnv(Game, 2, return_state=True)
    root = env.reset()
    for _ in range(4):
        root = env.step_and_maybe_reset(env.rand_action(root))[1]
    assert env.state_obstacle is None
    other.set_state(env.get_state())
    found = []
    for each in (env, other):
        torch.manual_seed(0)
        found.append(each.rollout(9, break_when_any_done=False, auto_reset=False, tensordict=root.clone()))
    assert (found[0] == found[1]).exclude("collector").all()
    assert not found[0]["collector", "mask"].all()
    assert PettingZooEnv(lambda: Game(action=spaces.Discrete(3), space=Unsaved())).state_obstacle is not None


class Unsaved(spaces.Box):
    def __init__(self):
        super().__init__(-np.inf, np.inf, (2,), np.float64)
        self.lines = (line for line in ())


class Unequal(Game):
    def observation_space(self, agent):
        return spaces.Box(-1, 1, (3 if agent == "a" else 2,))


class Forgets(Game):
    def step(self, actions):
        seen, _rewards, *more = super().step(actions)
        return (seen, {}, *more)


class Unseen(Game):
    """The agent that appears isn't seen; nor, with ``at_reset``, is the one that begins last."""

    def __init__(self, at_reset):
        super().__init__(listed={2: "abc"})
        self.at_reset = at_reset

    def reset(self, seed=None, options=None):
        seen, infos = super().reset(seed, options)
        return {agent: seen[agent] for agent in list(seen)[: len(seen) - self.at_reset]}, infos

    def step(self, actions):
        seen, *more = super().step(actions)
        return ({agent: seen[agent] for agent in actions}, *more)


class InTurn(pettingzoo.AECEnv):
    possible_agents = ("a",)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: PettingZooEnv(Unequal), ArgumentError, "same observation space, as they are rows of one batch"),
        (
            lambda: PettingZooEnv(Forgets).rollout(1),
            ArgumentError,
            "Forgets.step must return the reward of all agents that act, or act next, but ['a', 'b']",
        ),
        (
            lambda: PettingZooEnv(Unseen, at_reset=True).reset(),
            ArgumentError,
            "Unseen.reset must return the observation of all agents that act, or act next, but ['b'] have none",
        ),
        (
            lambda: PettingZooEnv(Unseen, at_reset=False).rollout(3),
            ArgumentError,
            "Unseen.step must return the observation of all agents that act, or act next, but ['c'] have none",
        ),
        (
            lambda: PettingZooEnv(Game, listed={1: "abx"}).rollout(1),
            ArgumentError,
            "possible_agents, ['a', 'b', 'c'], but ['x'] aren't",
        ),
        (lambda: PettingZooEnv(InTurn), ArgumentTypeError, "InTurn is an AECEnv, whose agents act in turn"),
        (lambda: PettingZooEnv(dict), ArgumentTypeError, "dict lacks possible_agents"),
        (
            lambda: PettingZooEnv(pettingzoo),
            ArgumentTypeError,
            "must be a function that creates an environment, or a na",
        ),
        (lambda: PettingZooEnv(lambda: ONE, num_envs=2), ArgumentError, "must create a new one at every call"),
        (lambda: PettingZooEnv(Game, agents_leave="false"), ArgumentError, "agents_leave must be True or False; got"),
        (lambda: PettingZooEnv(Game(), num_envs=2), ArgumentError, "need a function that creates an environment"),
        (lambda: PettingZooEnv("sisl/nothing"), ArgumentError, "PettingZoo has no parallel environment 'sisl/nothing'"),
    ],
)
def test_refusals(make, error, said):
    with pytest.raises(error, match=re.escape(said)):
        make()


def test_missing_package(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "pettingzoo"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pettingzoo", None)
    with pytest.raises(
        MissingDependencyError, match=r"needs PettingZoo 1.27 or newer: pip install -U 'pettingzoo>=1.27'"
    ):
        PettingZooEnv("sisl/multiwalker_v9")

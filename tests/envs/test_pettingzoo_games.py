"""Games that come with PettingZoo, compared with the same games stepped directly; their names."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
import torch

from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingDependencyError
from recurl.envs import InitTracker, PettingZooEnv, TransformedEnv, check_env_specs
from recurl.envs.multi_agent_named import named_multi_agent_env
from recurl.trainers import PPO, PPOConfig

pettingzoo = pytest.importorskip("pettingzoo")
pytest.importorskip("pygame")

ZOMBIES = "butterfly/knights_archers_zombies_v11"
LETHAL = {"line_death": True, "spawn_delay": 3, "max_zombies": 30, "max_cycles": 40}
GAMES = [(ZOMBIES, LETHAL, 60), ("sisl/pursuit_v5", {"n_pursuers": 3, "max_cycles": 5}, 12)]


@pytest.fixture(autouse=True)
def _settings_that_games_change(monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", sys.dont_write_bytecode)


def stepped_directly(name, arguments, seed, actions):
    """Return what the game shows, entries ``[A, T, ...]``: zeros for agents that take no part."""
    game = pettingzoo.make("parallel", name, **arguments)
    agents, steps = game.possible_agents, actions.shape[1]
    size = game.observation_space(agents[0]).shape
    found = {key: np.zeros((len(agents), steps, *size), np.float32) for key in ("observation", "after")}
    found |= {key: np.zeros((len(agents), steps, 1), np.float32) for key in ("reward", "terminated", "truncated")}
    mask, is_init = np.zeros((len(agents), steps), bool), np.ones((len(agents), steps + 1), bool)
    seen, _ = game.reset(seed=seed)
    for step, chosen in enumerate(actions.T.tolist()):
        acting = list(game.agents)
        outcome = game.step({agent: chosen[agents.index(agent)] for agent in acting})[:4]
        for row, agent in enumerate(agents):
            mask[row, step] = agent in acting
            if agent in acting:
                for values, what in zip(found.values(), (seen, *outcome), strict=True):
                    values[row, step] = what[agent]
            is_init[row, step + 1] = agent not in game.agents if agent in acting else not game.agents
        seen = outcome[0] if game.agents else game.reset()[0]
    game.close()
    return {key: torch.from_numpy(values) for key, values in {**found, "mask": mask, "is_init": is_init}.items()}


@pytest.mark.parametrize(("name", "arguments", "steps"), GAMES, ids=["zombies", "pursuit"])
def test_a_rollout_is_the_game(name, arguments, steps):
    torch.manual_seed(0)
    games = PettingZooEnv(name, 2, **arguments)
    games.set_seed(5)
    batch = TransformedEnv(games, InitTracker()).rollout(steps, break_when_any_done=False)
    each = [
        stepped_directly(name, arguments, 5 + e * games.n_agents, a) for e, a in enumerate(batch["action"].chunk(2))
    ]
    check_env_specs(games)  # last, as a reset of zombies with a seed doesn't restart when the next of them appears
    games.close()
    game = {key: torch.cat([one[key] for one in each]) for key in each[0]}
    mask = game["mask"]
    assert torch.equal(batch["collector", "mask"], mask)
    assert torch.equal(batch["is_init"][..., 0], game["is_init"][:, :-1])
    assert torch.equal(batch["next", "done"][..., 0], game["is_init"][:, 1:])
    assert torch.equal(batch["observation"], game["observation"])
    assert torch.equal(batch["next", "observation"][mask], game["after"][mask])
    assert torch.equal(batch["next", "reward"], game["reward"])
    assert torch.equal(batch["next", "terminated"].float(), game["terminated"])
    assert torch.equal(batch["next", "truncated"][mask].float(), game["truncated"][mask])
    assert (batch["is_init"][:, 1:, 0] & mask[:, 1:]).any()  # a game began anew
    if name == ZOMBIES:
        assert not mask.all()
        assert game["terminated"].any()
        assert game["truncated"].any()


def test_seeds():
    def rollout(seed):
        torch.manual_seed(0)
        games = PettingZooEnv(ZOMBIES, 2, **LETHAL)
        games.set_seed(seed)
        return games.rollout(30, break_when_any_done=False)["observation"]

    first = rollout(1)
    assert torch.equal(first, rollout(1))
    assert not torch.equal(first, rollout(2))
    assert not torch.equal(first[:4], first[4:])


def test_training():
    options = {"rollout_steps": 40, "total_steps": 640, "hidden_size": 8, "cell": "gru"}
    learner = PPO(
        PPOConfig(
            env=f"pettingzoo/{ZOMBIES}",
            env_kwargs=tuple(f"{name}={value}" for name, value in LETHAL.items()),
            num_envs=8,
            **options,
        )
    )
    batch = learner.collect()
    assert not batch["collector", "mask"].all()
    learned = learner.learn(batch)
    assert all(np.isfinite(value) for value in learned.values())
    learner.close()
    with pytest.raises(ArgumentError, match="set --num-envs to 8, a multiple of the number of agents"):
        PPO(PPOConfig(env=f"pettingzoo/{ZOMBIES}", num_envs=6, **options))


def test_functions_by_name():
    with named_multi_agent_env("pettingzoo/pettingzoo.classic.rps.rps:parallel_env", 3) as env:
        assert env.batch_size == (4,)
        assert env.rollout(3)["observation"].shape == (4, 3, 4)
    with pytest.raises(ArgumentError, match=re.escape("the module 'pettingzoo.classic.rps.rps' has no 'paralel_env'")):
        PettingZooEnv("pettingzoo.classic.rps.rps:paralel_env")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sisl/pursuit_v4", "mpe2.simple_spread_v3:parallel_env. Did you mean sisl/pursuit_v5?"),
        ("mpe/spread", "has no parallel environment 'mpe/spread'; others are named module:function, such as mpe2.si"),
        ("classic/tictactoe_v3", "The agents of PettingZoo's 'classic/tictactoe_v3' act in turn: name one with the pa"),
    ],
)
def test_unknown_names(name, said):
    with pytest.raises(ArgumentError, match=re.escape(said)):
        PettingZooEnv(name)


def test_agents_that_act_in_turn():
    with pytest.raises(ArgumentTypeError, match="OrderEnforcingWrapper is an AECEnv, whose agents act in turn"):
        PettingZooEnv("pettingzoo.classic.rps.rps:env")


def test_missing_packages(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("pettingzoo.butterfly.pistonball")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pymunk", None)
    with pytest.raises(MissingDependencyError, match=re.escape("'pymunk': pip install 'pettingzoo[butterfly]'")):
        PettingZooEnv("butterfly/pistonball_v6")
    monkeypatch.setitem(sys.modules, "pettingzoo.env_registry.exceptions", None)  # as before PettingZoo 1.27
    with pytest.raises(MissingDependencyError, match=re.escape("needs PettingZoo 1.27 or newer: pip install -U")):
        PettingZooEnv("butterfly/pistonball_v6")

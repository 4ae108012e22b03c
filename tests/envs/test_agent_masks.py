"""Action masks of several agents: in observations and infos, of absent agents, and in training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

import recurl
from recurl.core.errors import ArgumentError, ArgumentTypeError, UsageError
from recurl.envs import AgentsReset, AgentsStep, MultiAgentEnv, PettingZooEnv, check_env_specs
from recurl.trainers import PPO, PPOConfig, R2D2Config, RunFolder, evaluate_run
from tests.trainers.run.test_trainer import train

pettingzoo = pytest.importorskip("pettingzoo")

CHOICES, LIFE, LAST = 4, {"a": 3, "b": 6}, 6


def allowed(agent, time):
    """Two of four choices, others for each agent and at each time; none after the agent's last step."""
    ended = time >= LIFE[agent]
    return np.array([(choice - time - "ab".index(agent)) % CHOICES < 2 and not ended for choice in range(CHOICES)])


class Doors(pettingzoo.ParallelEnv):
    """Rejects forbidden choices; agent 'a' dies at step 3, and 'b' at step 6, or is cut off."""

    def __init__(self, where="observation", name="action_mask", cut=False, lacks=None):
        self.metadata, self.possible_agents = {"name": "doors"}, ["a", "b"]
        self.where, self.name, self.cut, self.lacks = where, name, cut, lacks

    def observation_space(self, agent):
        box, mask = spaces.Box(0, np.inf, (1,), np.float32), spaces.Box(0, 1, (CHOICES,), np.int8)
        if self.where == "info":
            return box
        return spaces.Dict(
            {"time": box, self.name: mask}
            if self.where == "observation"
            else {"in": spaces.Dict({"time": box, self.name: mask})}
        )

    def action_space(self, agent):
        return spaces.Discrete(CHOICES)

    def reset(self, seed=None, options=None):
        self.time, self.agents = 0, ["a", "b"]
        return self.seen()

    def seen(self):
        times = np.array([self.time], np.float32)
        masks = {a: allowed(a, self.time).astype(np.int8) for a in self.agents}
        given = {a: {self.name: mask} for a, mask in masks.items() if (a, self.time) != self.lacks}
        if self.where == "info":
            return dict.fromkeys(self.agents, times), given
        observed = {a: {"time": times, self.name: mask} for a, mask in masks.items()}
        return (observed if self.where == "observation" else {a: {"in": each} for a, each in observed.items()}), {}

    def step(self, actions):
        for agent, action in actions.items():
            assert allowed(agent, self.time)[action], f"{agent} can't choose {action} at {self.time}"
        self.time += 1
        seen, infos = self.seen()
        over = {a: self.time >= LIFE[a] for a in self.agents}
        cut = {a: self.cut and a == "b" and over[a] for a in self.agents}
        rewards, self.agents = dict.fromkeys(self.agents, 1.0), [a for a in self.agents if not over[a]]
        return seen, rewards, {a: over[a] and not cut[a] for a in over}, cut, infos


PLACES = {
    "observation": ({}, {}),
    "another name": ({"name": "legal"}, {"action_mask": "legal"}),
    "nested": ({"where": "nested", "name": "legal"}, {"action_mask": "in.legal"}),
    "info": ({"where": "info"}, {}),
    "another name in info": ({"where": "info", "name": "legal"}, {"action_mask": "legal"}),
}


@pytest.mark.parametrize("place", PLACES)
def test_masks_of_pettingzoo(place):
    of_game, of_env = PLACES[place]
    env = PettingZooEnv(lambda: Doors(**of_game), num_envs=2, return_state=True, **of_env)
    check_env_specs(env)
    batch = env.rollout(8, break_when_any_done=False)  # random actions, of which the games reject forbidden ones
    times = torch.arange(LAST)
    for row, agent in enumerate("abab"):
        masks = np.stack([allowed(agent, time) if time < LIFE[agent] else np.ones(CHOICES, bool) for time in times])
        assert torch.equal(batch["action_mask"][row, :LAST], torch.from_numpy(masks))
        after = np.stack([allowed(agent, time + 1) if time < LIFE[agent] else np.ones(CHOICES, bool) for time in times])
        assert torch.equal(batch["next", "action_mask"][row, :LAST], torch.from_numpy(after))
    assert batch["action_mask"].dtype == torch.bool
    assert batch["state"].shape == (4, 8, 2)  # the times of both, no masks
    assert batch["collector", "mask"].sum(-1).tolist() == [3 + 2, 6 + 2] * 2


@pytest.mark.parametrize("place", PLACES)
def test_running_episodes_are_restored(place):
    of_game, of_env = PLACES[place]
    mine, theirs = (PettingZooEnv(lambda: Doors(**of_game), num_envs=2, **of_env) for _ in range(2))
    assert mine.state_obstacle is None  # a trial, in which the games reject forbidden choices
    root = mine.reset()
    for _ in range(4):
        root = mine.step_and_maybe_reset(mine.rand_action(root))[1]
    theirs.reset()
    theirs.set_state(mine.get_state())
    for _ in range(LAST):
        step = mine.rand_action(root)
        (before, root), (other, _) = (env.step_and_maybe_reset(step.clone()) for env in (mine, theirs))
        assert all(torch.equal(value, other[key]) for key, value in before.items(True, True))


def test_an_entry_that_is_no_mask_is_an_observation():
    env = PettingZooEnv(Doors, action_mask=None)
    assert env.observation_spec["action_mask"].dtype == torch.int8
    with pytest.raises(AssertionError, match="can't choose"):
        env.rollout(50, break_when_any_done=False)


def test_masks_that_are_missing():
    with pytest.raises(ArgumentError, match="The mask 'legal' must be in the observation"):
        PettingZooEnv(Doors, action_mask="legal")
    with pytest.raises(ArgumentError, match=r"and info has \['action_mask'\]"):
        PettingZooEnv(lambda: Doors("info"), action_mask="legal")
    for cut, lacks in ((False, ("b", 2)), (True, ("b", 6))):
        env = PettingZooEnv(lambda cut=cut, lacks=lacks: Doors("info", cut=cut, lacks=lacks))
        with pytest.raises(
            ArgumentError, match="'action_mask' must be in every info, except after the last step of an"
        ):
            env.rollout(6, break_when_any_done=False)
    env = PettingZooEnv(lambda: Doors("info", lacks=("b", 6)))  # b terminates
    assert env.rollout(6, break_when_any_done=False)["action"].shape == (2, 6)


class Turns(Doors):
    """The agents act in turn, and the mask of the one that waits allows nothing."""

    def seen(self):
        seen, infos = super().seen()
        for agent in seen:
            if self.time % 2 != "ab".index(agent):
                seen[agent][self.name][:] = 0
        return seen, infos

    def step(self, actions):
        turn = "ab"[self.time % 2]
        return super().step({agent: action for agent, action in actions.items() if agent == turn})


def test_agents_that_wait_for_their_turn_may_choose_anything():
    batch = PettingZooEnv(Turns, num_envs=2).rollout(LAST, break_when_any_done=False)
    for row, agent in enumerate("abab"):
        for time in range(LIFE[agent]):
            mine = time % 2 == "ab".index(agent)
            expected = allowed(agent, time) if mine else np.ones(CHOICES, bool)
            assert torch.equal(batch["action_mask"][row, time], torch.from_numpy(expected))
    assert not batch["next", "action_mask"][1, LAST - 1].any()  # it terminated


class Gates(MultiAgentEnv):
    """Own environment; agent 0 begins anew at every second step, with a mask of its own."""

    def __init__(self, num_envs=1, masks=None, action=None, **options):
        self.masks = torch.tensor([[True, False, False], [False, True, True]]) if masks is None else masks
        box = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        super().__init__(
            ["a", "b"],
            num_envs,
            observation_space=spaces.Dict({"observation": box, "action_mask": spaces.MultiBinary(3)}),
            action_space=action or spaces.Discrete(3),
            **options,
        )
        self.time = 0

    def look(self, masks):
        ones = torch.ones(self.num_envs, 2, 1)
        return {"observation": ones * self.time, "action_mask": masks.expand(self.num_envs, 2, 3)}

    def _reset_envs(self, envs, seed):
        self.time = 0
        return AgentsReset(self.look(self.masks))

    def _step_envs(self, actions):
        self.time += 1
        ended = torch.zeros(self.num_envs, 2, dtype=torch.bool)
        ended[:, 0] = self.time % 2 == 0
        none, active = torch.zeros_like(ended), torch.ones_like(ended)
        last = self.look(torch.where(ended[..., None], 0, self.masks.to(torch.uint8)))
        return AgentsStep(last, torch.zeros(self.num_envs, 2), ended, none, active, self.look(self.masks.flip(1)))


def test_masks_of_an_own_environment():
    env = Gates(num_envs=2)
    assert env.mask_path == ("action_mask",)
    batch = env.rollout(3, break_when_any_done=False)
    first, second = batch["action_mask"][0].int().tolist(), batch["action_mask"][3].int().tolist()
    assert first == [[1, 0, 0], [1, 0, 0], [0, 0, 1]]  # the last one is that of a new episode
    assert second == [[0, 1, 1]] * 3
    assert batch["next", "action_mask"][0].int().tolist() == [[1, 0, 0], [0, 0, 0], [1, 0, 0]]
    assert batch["action"][0].tolist() == [0, 0, 2]


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: Gates(masks=torch.full((2, 3), 2.0)).reset(), ArgumentError, "must hold zeros and ones, or bools"),
        (
            lambda: Gates(masks=torch.ones(2, 1))._read(
                {"observation": torch.ones(1, 2, 1), "action_mask": torch.ones(1, 2, 2)}
            ),
            ArgumentError,
            "'action_mask' of Gates must have shape",
        ),
        (lambda: Gates(masks=torch.zeros(2, 3)).rollout(2), UsageError, "the mask of environments .* allows none"),
        (lambda: Gates(action=spaces.Box(-1, 1, (2,))), ArgumentError, "Masks are for Discrete and MultiDiscrete"),
        (lambda: Gates(action_mask="legal"), ArgumentError, "The mask 'legal' must be in the observation"),
        (lambda: Gates()._read(torch.ones(1, 2, 1)), ArgumentTypeError, r"must be \['observation', 'action_mask'\]"),
    ],
)
def test_refusals(make, error, said):
    with pytest.raises(error, match=said):
        make()


def doors(num_envs=2, **options):
    return PettingZooEnv(Doors, -(-num_envs // 2), **options)


SMALL = {"num_envs": 4, "rollout_steps": 12, "total_steps": 4 * 24, "hidden_size": 8, "eval_episodes": 4}


@pytest.mark.usefixtures("no_curves")
def test_training_evaluation_and_acting_keep_to_the_masks(tmp_path):
    config = PPOConfig(env=doors, cell="gru", **SMALL)
    assert train(config, tmp_path / "run")[0].env_steps == 96  # the games reject forbidden choices
    assert evaluate_run(RunFolder(tmp_path / "run"), episodes=4, env=doors).lengths
    policy, state = recurl.load(RunFolder(tmp_path / "run"), env=doors), None
    for time in range(5):
        observation = {"time": np.array([time], np.float32), "action_mask": allowed("b", time)}
        action, state = policy.predict(observation, state)
        assert allowed("b", time)[action]


@pytest.mark.usefixtures("no_curves")
def test_options_name_the_mask(tmp_path):
    for mask, known in (("legal", True), ("none", False)):
        config = PPOConfig(env=f"pettingzoo/{__name__}:legal_doors", action_mask=mask, cell="none", **SMALL)
        learner = PPO(config)
        assert ("action_mask" in learner.collector.env.observation_spec) == known
        learner.close()


def legal_doors():
    return Doors(name="legal")


@pytest.mark.usefixtures("no_curves")
def test_replay_and_q_learning_keep_to_the_masks(tmp_path):
    config = R2D2Config(env=lambda num_envs: Gates(-(-num_envs // 2)), cell="gru", **{**SMALL, "total_steps": 400})
    train(config, tmp_path / "run")

"""Trials of several episodes."""

import io

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary
from rich.console import Console

from recurl.core.errors import ArgumentError
from recurl.core.keys import DONE, IS_INIT, NEXT
from recurl.envs import GymWrapper, TensorEnv, TrialDynamics, Trials
from recurl.envs.tasks import Dynamics, TMaze
from recurl.sequences.mode import set_recurrent_mode
from recurl.trainers import PPO, DQNConfig, PPOConfig, RunFolder, Trainer, evaluate_run, load, make_env
from tests.trainers.run.test_trainer import config, differing, final_state, metrics, train


class Recall(Dynamics):
    """The first episode of a trial shows a bit at its first step, the others don't; its last action must be the bit."""

    def __init__(self, length=1):
        super().__init__(observation_space=Box(0.0, 1.0, (2,)), actions=2, step_limit=length)

    def begin(self, xp, draw):
        bit = draw.integers(2)
        return {"bit": bit, "shown": bit >= 0}

    def begin_again(self, xp, draw, state):
        return {"bit": state["bit"], "shown": state["bit"] < 0}

    def advance(self, xp, state, steps, actions):
        last = steps == self.step_limit - 1
        right = last & (actions == state["bit"])
        return state, xp.where(right, 1.0, 0.0), last

    def observe(self, xp, state, steps):
        shown = state["shown"] & (steps == 0)
        return xp.astype(xp.stack([shown & (state["bit"] == bit) for bit in (0, 1)], 1), xp.float32)


class Counting(gym.Env):
    """Ends after a given number of steps, by truncation; records the options of its resets."""

    def __init__(self, space=None, length=2):
        self.observation_space, self.action_space, self.length = space or Box(0, 9, (2,)), Discrete(2), length
        self.resets = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.resets.append(options)
        self.steps = 0
        return self._observed(), {}

    def step(self, action):
        self.steps += 1
        return self._observed(), 1.0, False, self.steps == self.length, {}

    def _observed(self):
        if isinstance(self.observation_space, Box):
            return np.full(self.observation_space.shape, self.steps, self.observation_space.dtype)
        if isinstance(self.observation_space, Dict):
            return {"a": np.full(1, self.steps, np.float32)}
        return self.steps if isinstance(self.observation_space, Discrete) else np.zeros(3, np.int8)


def test_a_trial_is_one_episode():
    env = Trials(plain := Counting(), 3)
    seen = [env.reset(seed=1)[0], *(env.step(0) for _ in range(6))]
    assert seen[0].tolist() == [0, 0, 1]
    assert [step[0].tolist() for step in seen[1:]] == [[1, 1, 0], [0, 0, 1], [1, 1, 0], [0, 0, 1], [1, 1, 0], [2, 2, 0]]
    assert [step[2] for step in seen[1:]] == [False] * 5 + [True]
    assert not any(step[3] for step in seen[1:])
    env.reset()
    assert plain.resets == [None, {"trial_episode": 1}, {"trial_episode": 2}, None]


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (MultiBinary(3), MultiBinary(4)),
        (Dict(a=Box(0, 9, (1,))), Dict(a=Box(0, 9, (1,)), episode_begins=Box(0, 1, (1,)))),
        (Discrete(5), Dict(observation=Discrete(5), episode_begins=Box(0, 1, (1,)))),
        (
            Box(0, 255, (8, 8), np.uint8),
            Dict(observation=Box(0, 255, (8, 8), np.uint8), episode_begins=Box(0, 1, (1,))),
        ),
    ],
)
def test_the_flag_in_every_kind_of_observation(space, expected):
    env = Trials(Counting(space), 2)
    assert env.observation_space == expected
    observations = [env.reset()[0], env.step(0)[0], env.step(0)[0]]
    assert all(observation in expected for observation in observations)
    if isinstance(expected, Dict):
        assert [float(seen["episode_begins"][0]) for seen in observations] == [1, 0, 1]


def test_trials_that_are_refused():
    with pytest.raises(ArgumentError, match="have an entry 'episode_begins' already"):
        Trials(Counting(Dict(episode_begins=Box(0, 1, (1,)))), 2)
    with pytest.raises(ArgumentError, match="is a task, whose trials are TrialDynamics"):
        Trials(gym.make("recurl/TMaze-v0"), 2)
    with pytest.raises(ArgumentError, match="episodes must be an integer of at least 1; got 0"):
        Trials(Counting(), 0)
    for options in ({"reset_memory_at": "trial"}, {"trial_episodes": 2}):
        with pytest.raises(ArgumentError, match="--reset-memory-at trial and --trial-episodes belong together"):
            PPOConfig(env="CartPole-v1", **options)
    with pytest.raises(ArgumentError, match="creates the environments of the trials: pass a function"):
        PPOConfig(env=GymWrapper(gym.make("CartPole-v1")), reset_memory_at="trial", trial_episodes=2)


def test_the_dynamics_of_trials_on_tensors():
    """Episodes end at varying steps, by a turn at the junction or at the step limit; each shows its cue at first."""
    maze = TMaze(corridor_length=2, max_episode_steps=7)
    env = TensorEnv(TrialDynamics(maze, 3), 64, device="cpu", categorical_action_encoding=True)
    root = env.reset(seed=0)
    torch.manual_seed(0)
    steps, episodes, trials = torch.zeros(64, dtype=torch.int64), torch.zeros(64, dtype=torch.int64), 0
    for _ in range(80):
        observation = root["observation"]
        assert torch.equal(observation[:, -1] == 1, steps == 0)
        assert torch.equal(observation[:, :2].sum(-1) == 1, steps == 0)
        action = torch.randint(3, (64,))
        over = ((observation[:, 3] == 1) & (action != 0)) | (steps == 6)
        stepped, root = env.step_and_maybe_reset(root.set("action", action))
        steps, episodes = torch.where(over, 0, steps + 1), episodes + over
        done = stepped["next", "done"].squeeze(-1)
        assert torch.equal(done, over & (episodes == 3))
        assert torch.equal(done, stepped["next", "terminated"].squeeze(-1))
        episodes[done] = 0
        trials += int(done.sum())
    assert trials > 100


OPTIONS = {"reset_memory_at": "trial", "trial_episodes": 2, "previous_action": True, "previous_reward": True}


@pytest.mark.parametrize("form", ["host", "wrapped", "device", "workers"])
def test_memory_and_previous_inputs_are_kept_within_a_trial_and_replayed(form):
    own = {"host": {}, "wrapped": {}, "device": {"vectorization": "device"}, "workers": {"env_workers": 2}}[form]
    env_kwargs = ("corridor_length=1", "max_episode_steps=3")
    source = {"env": "recurl/TMaze-v0", "env_kwargs": env_kwargs}
    if form == "wrapped":
        source = {"env": Counting}
    options = PPOConfig(
        num_envs=4,
        rollout_steps=32,
        cell="gru",
        hidden_size=4,
        device="cpu",
        store_states="all",
        **source,
        **own,
        **OPTIONS,
    )
    learner = PPO(options)
    batch = learner.collect()
    is_init, done = batch[IS_INIT].squeeze(-1), batch[NEXT, DONE].squeeze(-1)
    begins = batch["observation"][..., -1] == 1
    assert torch.equal(is_init[:, 1:], done[:, :-1])
    inside = begins & ~is_init
    assert inside.sum() > 4  # a second episode of a trial
    state = next(value for key, value in batch.items() if key.startswith("state_"))
    assert (state[inside] != 0).any(-1).all()
    assert not state[is_init].any()
    first = inside.clone()
    first[:, 0] = False
    previous = batch["previous_action"][first].float().argmax(-1)
    assert torch.equal(previous, batch["action"][:, :-1][first[:, 1:]])
    assert torch.equal(batch["previous_reward"][first], batch[NEXT, "reward"][:, :-1][first[:, 1:]])
    shape = batch.batch_size
    with torch.no_grad(), set_recurrent_mode(True):  # whole rows, from the state stored at their beginning
        again = learner.agent.actor.get_dist(batch.clone()).log_prob(batch["action"])
    torch.testing.assert_close(again.reshape(shape), batch["action_log_prob"].reshape(shape), rtol=1e-4, atol=1e-5)
    assert learner.learn(batch)["kl_approx"] < 1.0
    learner.close()


def vector_env(num_envs):
    return gym.make_vec("CartPole-v1", num_envs)


def small_run(path, kind=PPOConfig, **options):
    out = io.StringIO()
    created = kind(**options)
    trainer = Trainer(created, folder := RunFolder(path), console=Console(file=out))
    folder.create(created)
    trainer.run()
    trainer.close()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "least", "most"), [("gru", 1.9, 2.0), ("none", 1.3, 1.7)])
def test_the_second_episode_is_solved_by_remembering_the_first(tmp_path, cell, least, most, no_curves):
    folder = small_run(
        tmp_path / "run",
        env=lambda: Recall(),
        total_steps=40_000,
        num_envs=16,
        rollout_steps=32,
        hidden_size=16,
        learning_rate=5e-3,
        cell=cell,
        seed=1,
        device="cpu",
        reset_memory_at="trial",
        trial_episodes=2,
    )
    found = evaluate_run(folder, episodes=200, env=lambda: Recall())
    assert least <= found.mean_return <= most
    assert set(found.lengths) == {2}


@pytest.mark.slow
def test_a_replay_buffer_and_a_loaded_policy_keep_the_memory_too(tmp_path, no_curves):
    """Slices of DQN hold whole trials, and a policy is told of their beginnings only."""
    options = {"num_envs": 4, "rollout_steps": 16, "total_steps": 512, "learning_starts": 64, "slices": 4}
    options |= {"slice_length": 8, "cell": "gru", "hidden_size": 4, "device": "cpu"}
    options |= {"reset_memory_at": "trial", "trial_episodes": 2}
    folder = small_run(tmp_path / "run", DQNConfig, env=Counting, **options)
    values = folder.read_values()
    assert (values["reset_memory_at"], values["trial_episodes"]) == ("trial", 2)
    found = evaluate_run(folder, episodes=3, env=Counting)
    assert (found.mean_return, set(found.lengths)) == (4.0, {4})
    policy, env = load(folder.path, env=Counting), Trials(Counting(), 2)
    assert policy.observation_space == env.observation_space
    observation, state = env.reset()[0], None
    for _ in range(4):
        action, state = policy.predict(observation, state)
        observation, *_ = env.step(action)
    with pytest.raises(ArgumentError, match="Trials are for single Gymnasium environments and Dynamics"):
        make_env(PPOConfig(env=vector_env, device="cpu", reset_memory_at="trial", trial_episodes=2), 2)


@pytest.mark.slow
@pytest.mark.parametrize("env", ["recurl/RepeatPrevious-v0", "CartPole-v1"])
def test_a_run_of_trials_resumes_exactly(tmp_path, env, no_curves):
    own = {} if env.startswith("recurl") else {"env": env, "env_kwargs": ()}
    options = config(reset_memory_at="trial", trial_episodes=2, **own)
    train(options, tmp_path / "whole")
    train(options, tmp_path / "run", stop_after=3)
    _, said = train(options, tmp_path / "run", resume=True)
    assert "isn't restored" not in said
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    ends = [final_state(tmp_path / name)["algorithm"] for name in ("run", "whole")]
    assert differing(*({name: end[name] for name in ("agent", "optimizer", "scaler")} for end in ends)) == []

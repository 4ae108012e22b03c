"""Runs whose tasks are stepped as tensors: evaluation, loading and export work as for any other run."""

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch

import recurl
from recurl.cli import main
from recurl.envs import ExplorationType, TensorEnv, set_exploration_type
from recurl.envs.tasks import Bandit, Dynamics
from recurl.trainers import PPOConfig, RunFolder, evaluate_run, export_run, load_agent, make_env, play_run
from recurl.trainers.algorithms.environment import with_spaces
from tests.trainers.small_runs import trained

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_curves")]

PAST = {"vectorization": "device", "previous_action": True, "previous_reward": True}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = trained(
        tmp_path_factory.mktemp("run"), PPOConfig, "recurl/Bandit-v0", {**PAST, "env_kwargs": ("pulls=6",)}
    )
    return RunFolder(folder.path, notify=lambda _: None)


def collected(folder, steps=20):
    config, agent = load_agent(folder)
    with (
        make_env(config, 3, policy=agent.policy) as env,
        set_exploration_type(ExplorationType.DETERMINISTIC),
    ):
        assert isinstance(with_spaces(env), TensorEnv)
        env.set_seed(5)
        return env.rollout(steps, agent.actor, break_when_any_done=False)


@pytest.mark.usefixtures("brief_verification")
def test_a_loaded_policy_acts_as_in_collection(run):
    expected = collected(run)
    files = [recurl.load(run), recurl.load(export_run(run, "torch"))]
    for number, policy in enumerate(files):
        state, start, reward = None, None, None
        for step in expected.unbind(-1):
            action, state = policy.predict(step["observation"].numpy(), state, start, reward=reward)
            assert np.array_equal(action, step["action"].numpy())
            hidden = state["state_h"]
            assert np.array_equal(hidden, step["next", "state_h"].numpy()) or number == 1
            np.testing.assert_allclose(hidden, step["next", "state_h"].numpy(), rtol=1e-5, atol=1e-6)
            start, reward = step["next", "done"][:, 0].numpy(), step["next", "reward"][:, 0].numpy()
    assert expected["next", "done"].any()
    assert expected["previous_reward"].any()


def test_evaluations_are_those_of_the_seed(run):
    for deterministic in (True, False):
        first, again, other = (
            evaluate_run(run, episodes=60, seed=seed, deterministic=deterministic) for seed in (1, 1, 2)
        )
        assert first == again != other
        assert first.lengths == [6] * 60


def test_commands_take_it(run, tmp_path, capsys):
    for words in (
        ["doctor", str(run.path)],
        ["evaluate", str(run.path), "--episodes", "3"],
        ["play", str(run.path), "--video", str(tmp_path / "out.mp4")],
    ):
        assert main(words) == 0, capsys.readouterr()
    assert (tmp_path / "out.mp4").exists()


def test_dynamics_given_in_python(tmp_path):
    make = partial(Bandit, 3, pulls=6)
    folder = trained(tmp_path / "run", PPOConfig, make, PAST)
    assert evaluate_run(folder, episodes=3, env=make).lengths == [6] * 3
    with pytest.warns(UserWarning, match="Nothing is shown because .*Bandit"):
        assert play_run(folder, env=make)[0].lengths == [6]
    assert recurl.load(folder, env=make).predict(np.zeros(1, np.float32))[0] in range(3)


class Lamp(Dynamics):
    """Report whether an image is bright or dark."""

    def __init__(self):
        super().__init__(observation_space=gym.spaces.Box(0, 255, (8, 8, 3), np.uint8), actions=2, step_limit=5)

    def begin(self, xp, draw):
        return {"bright": draw.integers(2)}

    def advance(self, xp, state, steps, actions):
        return state, xp.astype(actions == state["bright"], xp.float64), steps < 0

    def observe(self, xp, state, steps):
        shape = (len(steps), 8, 8, 3)
        return xp.astype(state["bright"][:, None, None, None] * 255 + xp.zeros(shape, dtype=xp.int64), xp.uint8)


def test_pictures(tmp_path):
    folder = trained(tmp_path / "run", PPOConfig, Lamp, {"vectorization": "device"})
    config, agent = load_agent(folder, env=Lamp)
    assert any(isinstance(module, torch.nn.Conv2d) for module in agent.modules())
    assert make_env(config, 2).reset()["observation"].dtype == torch.uint8
    assert evaluate_run(folder, episodes=3, env=Lamp).lengths == [5] * 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--env", "CartPole-v1"], "needs a task written as Dynamics, and CartPole-v1 is not one"),
        (["--eval-every", "128", "--eval-env", "CartPole-v1"], "written as Dynamics, and CartPole-v1 is not one"),
        (["--encoder", "nature"], "--encoder nature needs an image"),
        (["--action-mask", "legal"], "doesn't support --action-mask: leave it out, or choose another vectorization"),
        (
            ["--action-mask", "legal", "--env-workers", "2"],
            "doesn't support --env-workers, --action-mask: leave them",
        ),
    ],
)
def test_invalid_options_are_refused_in_a_line(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    env = [] if "--env" in words else ["--env", "recurl/Bandit-v0"]
    assert main(["train", "ppo", *env, "--vectorization", "device", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not list(tmp_path.iterdir())

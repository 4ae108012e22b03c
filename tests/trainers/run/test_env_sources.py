"""Runs whose environment is a function or an object, and runs with previous-step inputs."""

import io
import json
from functools import partial

import gymnasium as gym
import pytest
import torch
from rich.console import Console

import recurl
from recurl.core.errors import ArgumentError
from recurl.envs import GymEnv
from recurl.envs.tasks import Bandit, MaskedArm
from recurl.trainers import (
    PPOConfig,
    R2D2Config,
    RunFolder,
    Trainer,
    check_export,
    evaluate_run,
    export_run,
    load_agent,
)
from recurl.trainers.checkpoint import latest_checkpoint, load_checkpoint

pytestmark = pytest.mark.usefixtures("no_curves")

SMALL = {"hidden_size": 4, "num_envs": 4, "rollout_steps": 8, "total_steps": 96}
PAST = {"previous_action": True, "previous_reward": True}
KINDS = {
    "ppo": (PPOConfig, {"sequence_length": 4}),
    "overlap": (PPOConfig, {"sequence_length": 4, "overlap": True}),
    "r2d2": (R2D2Config, {"slices": 2, "slice_length": 6, "burn_in": 2, "learning_starts": 8, "buffer_size": 64}),
}
ON_DEVICE = {"env": partial(Bandit, 3, 5), "vectorization": "device"}
KINDS |= {f"device-{name}": (kind, {**options, **ON_DEVICE}) for name, (kind, options) in KINDS.items()}
ARM = {"env": partial(MaskedArm, max_episode_steps=5), "sequence_length": 4}
KINDS |= {
    f"arm-{mode}{'-all' * (not dropped)}": (PPOConfig, {**ARM, "vectorization": mode, "drop_observations": dropped})
    for mode, dropped in (("native", ()), ("device", ("privileged",)), ("device", ()))
}


def make(**options):
    return gym.make("recurl/RepeatPrevious-v0", k=1, episode_length=5, **options)


def train(config, folder, *, resume=False, updates=3):
    trainer, count = Trainer(config, folder, console=Console(file=io.StringIO())), iter(range(updates))
    if resume:
        trainer.resume()
    trainer.run(lambda: next(count) == updates - 1)
    trainer.close()
    return load_checkpoint(latest_checkpoint(folder.checkpoints))["algorithm"]["agent"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("shared_interpreter")
def test_a_stopped_run_resumes_bit_for_bit(kind, tmp_path):
    algorithm, options = KINDS[kind]
    config = algorithm(**{"env": make, **SMALL, **PAST, **options})
    whole, stopped = RunFolder(tmp_path / "whole", pytest.fail), RunFolder(tmp_path / "stopped", pytest.fail)
    for folder in (whole, stopped):
        folder.create(config)
    expected = train(config, whole)
    train(config, stopped, updates=1)
    again = stopped.read_config(env=options.get("env", make))
    found = train(again, stopped, resume=True, updates=2)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(stopped.metrics.read_text().splitlines()) == 1 + 3


@pytest.fixture
def folder(tmp_path):
    config = PPOConfig(env=make, env_kwargs=("num_symbols=3",), cell="gru", **SMALL, **PAST, sequence_length=4)
    folder = RunFolder(tmp_path / "run", pytest.fail)
    folder.create(config)
    train(config, folder)
    return folder


def test_the_folder_keeps_the_name_and_needs_the_function(folder):
    name = f"{__name__}.make()"
    assert json.loads(folder.config.read_text())["env"] == name
    for use in (
        load_agent,
        lambda folder: evaluate_run(folder, episodes=1),
        lambda folder: export_run(folder, "torch"),
        lambda folder: recurl.load(folder.path),
    ):
        with pytest.raises(
            ArgumentError, match=rf"passed in Python, as {name[:-2]}\(\): .* recurl\.load\(run, env=make\)"
        ):
            use(folder)
    with pytest.raises(ArgumentError, match="passed as an object"):
        evaluate_run(folder, episodes=1, env=GymEnv("CartPole-v1", 4))
    assert len(evaluate_run(folder, episodes=3, env=make).returns) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("brief_verification")
def test_the_step_before_is_an_input_of_the_exported_policy(folder):
    about = check_export(export_run(folder, "torch", env=make))
    assert about["inputs"][:4] == [
        {"name": "observation", "shape": ["batch", 3], "dtype": "float32"},
        {"name": "previous_reward", "shape": ["batch", 1], "dtype": "float32"},
        {"name": "previous_action", "shape": ["batch", 3], "dtype": "int8"},
        {"name": "is_init", "shape": ["batch"], "dtype": "bool"},
    ]


def test_an_object_is_trained_in(tmp_path):
    folder = RunFolder(tmp_path / "run", lambda text: None)
    env = GymEnv("recurl/TMaze-v0", 4, categorical_action_encoding=True)
    config = PPOConfig(env=env, **SMALL, **PAST, sequence_length=4)
    folder.create(config)
    train(config, folder, updates=2)
    again = folder.read_config(env=GymEnv("recurl/TMaze-v0", 4, categorical_action_encoding=True))
    train(again, folder, resume=True, updates=1)
    assert len(folder.metrics.read_text().splitlines()) == 1 + 3
    assert evaluate_run(
        folder, episodes=1, env=lambda num_envs: GymEnv("recurl/TMaze-v0", num_envs, categorical_action_encoding=True)
    ).returns

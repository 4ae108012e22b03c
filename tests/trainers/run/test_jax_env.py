"""Runs in environments written in JAX: resumed, exported, created by a function; options that don't fit."""

import json
import re

import pytest
import torch

import recurl
from recurl.core.errors import ArgumentError
from recurl.envs import JaxEnv
from recurl.trainers import PPOConfig, RunFolder, SACConfig, check_export, evaluate_run, export_run
from recurl.trainers.env_name import is_jax
from recurl.trainers.trust import names_of_code
from tests.trainers.resumes import assert_resumes_bit_for_bit, small, train
from tests.trainers.small_runs import trained

gymnax = pytest.importorskip("gymnax")
pytestmark = [pytest.mark.usefixtures("no_curves"), pytest.mark.slow]

CARTPOLE = "jax:gymnax/CartPole-v1"


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    assert_resumes_bit_for_bit(small(env=CARTPOLE, env_kwargs=("max_steps_in_episode=20",), num_envs=4), tmp_path)


def test_a_run_is_evaluated_exported_and_loaded(tmp_path):
    folder = trained(tmp_path / "run", PPOConfig, CARTPOLE, {})
    found = evaluate_run(folder, episodes=3)
    assert found.returns
    assert min(found.returns) >= 1
    path = export_run(folder, format="torch")
    assert json.dumps(check_export(path)["observations"])
    for source in (tmp_path / "run", path):
        action, _ = recurl.load(source).predict(torch.zeros(4).numpy())
        assert action in (0, 1)


def test_continuous_actions(tmp_path):
    folder = trained(tmp_path / "run", SACConfig, "jax:gymnax/Pendulum-v1", {"env_kwargs": ("max_steps=50",)})
    assert evaluate_run(folder, episodes=2).lengths == [50, 50]


def test_a_function_creates_the_environments(tmp_path):
    def make(num_envs):
        return JaxEnv(*gymnax.make("CartPole-v1"), num_envs, device="cpu", reset_ratio=2)

    config = small(env=make, num_envs=4)
    assert "384/384 steps" in train(config, tmp_path / "run")
    assert evaluate_run(RunFolder(tmp_path / "run"), episodes=2, env=make).returns


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"vectorization": "sync"}, "--vectorization"),
        ({"wrapper": ("gymnasium.wrappers:TimeAwareObservation",), "env_workers": 2}, "--env-workers, --wrapper"),
        ({"action_mask": "legal"}, "--action-mask"),
    ],
)
def test_options_of_environments_on_the_host_are_refused(options, names):
    with pytest.raises(ArgumentError, match=f"batch of tensors and doesn't support {re.escape(names)}: leave"):
        small(env=CARTPOLE, **options)


def test_names_in_the_folder_of_a_run_need_no_permission_unless_they_name_code():
    assert is_jax(CARTPOLE)
    assert not names_of_code({"env": CARTPOLE}, imported=())
    for name in ("jax:my_file:make", "jax:my_package/CartPole-v1"):
        assert names_of_code({"env": name}, imported=()) == [("env", name)]

"""Advice in out-of-memory errors of a GPU."""

import pytest
import torch

from recurl.cli.main import main
from recurl.core.errors import ArgumentError
from recurl.trainers import DQNConfig, PPOConfig
from recurl.trainers.algorithms.ppo import PPO
from recurl.trainers.run.memory import environments_that_fit, out_of_memory_advice

ENV = "recurl/TMaze-v0"


def test_environments_that_fit_are_extrapolated_from_two_small_runs():
    asked = []

    def peak(config):
        asked.append((config.num_envs, config.cuda_graph, config.compile))
        return 1000 + 10 * config.num_envs

    config = PPOConfig(env=ENV, num_envs=6400, minibatches=4, total_steps=10**7)
    assert environments_that_fit(config, peak, 100_000) == 8900
    assert asked == [(100, False, False), (200, False, False)]
    assert environments_that_fit(config, peak, 500) is None


def test_few_environments_still_have_a_sequence_for_each_minibatch():
    config = PPOConfig(env=ENV, num_envs=640, rollout_steps=32, sequence_length=32, minibatches=20)
    assert environments_that_fit(config, lambda config: 10 * config.num_envs, 10_000) == 900
    small = PPOConfig(env=ENV, num_envs=8, rollout_steps=32, sequence_length=32, minibatches=8)
    assert environments_that_fit(small, lambda config: 10 * config.num_envs, 10_000) is None


def test_a_replay_buffer_does_not_depend_on_them():
    assert environments_that_fit(DQNConfig(env=ENV), lambda config: 10 * config.num_envs, 10_000) is None


def test_one_of_several_ranks_measures_nothing(monkeypatch):
    monkeypatch.setattr("recurl.trainers.run.memory.world_size", lambda: 2)
    asked = []
    config = PPOConfig(env=ENV, num_envs=640, total_steps=10**7)
    assert environments_that_fit(config, lambda config: asked.append(config) or 1, 10_000) is None
    assert asked == []


def test_full_memory_of_few_environments_has_no_number():
    def peak(config):
        raise torch.OutOfMemoryError("full")

    assert environments_that_fit(PPOConfig(env=ENV, num_envs=640, total_steps=10**7), peak, 10_000) is None


def test_a_run_whose_memory_is_full_ends_in_one_line(tmp_path, monkeypatch, capsys):
    def learn(self, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has")

    monkeypatch.setattr(PPO, "learn", learn)
    options = "--num-envs 8 --rollout-steps 8 --sequence-length 8 --minibatches 1 --total-steps 64 --cell none"
    assert main(["train", "ppo", "--env", ENV, *options.split(), "--run-dir", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert "is out of memory with 8 environments and 8 steps of each: lower --num-envs" in said
    assert "(CUDA out of memory.)" in said


def test_other_errors_pass():
    with pytest.raises(ZeroDivisionError), out_of_memory_advice(PPOConfig(env=ENV)):
        1 / 0  # noqa: B018
    with pytest.raises(ArgumentError, match="about 57 environments fit"):
        raise_with(57)


def raise_with(fits):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recurl.trainers.run.memory.environments_that_fit", lambda config: fits)
        with out_of_memory_advice(PPOConfig(env=ENV)):
            raise torch.OutOfMemoryError("full")

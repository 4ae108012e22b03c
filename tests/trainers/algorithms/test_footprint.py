import pytest
import torch

from recurl.errors import ArgumentError
from recurl.trainers import DQNConfig, PPOConfig, R2D2Config
from recurl.trainers.algorithms.footprint import check_machine, footprint
from recurl.trainers.algorithms.table import make_algorithm

ENV = "recurl/TMaze-v0"


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (PPOConfig, {"hidden_size": 10**9}, "for the networks.*lower --hidden-size, --num-layers"),
        (PPOConfig, {"num_layers": 10**9}, "for the networks.*lower --hidden-size, --num-layers"),
        (PPOConfig, {"num_envs": 10**9, "total_steps": 10**12}, "for a batch.*lower .*--num-envs or --rollout-steps"),
        (PPOConfig, {"rollout_steps": 10**9, "total_steps": 10**12}, "for a batch.*lower .*--num-envs"),
        (DQNConfig, {"buffer_size": 2 * 10**9}, "for the replay buffer.*lower --buffer-size,"),
        (R2D2Config, {"buffer_size": 2 * 10**9, "cell": "gru"}, "for the replay buffer.*lower --buffer-size,"),
    ],
)
def test_what_no_machine_holds_is_refused_before_it_is_taken(kind, options, words):
    with pytest.raises(ArgumentError, match=f"At least .*{words}"):
        make_algorithm(kind(env=ENV, **options))


@pytest.mark.parametrize("cell", ["lstm", "gru", "none"])
@pytest.mark.parametrize("kind", [PPOConfig, R2D2Config])
def test_what_is_said_to_be_needed_is_needed(kind, cell):
    options = {} if kind is PPOConfig else {"buffer_size": 5_000}
    config = kind(env=ENV, cell=cell, hidden_size=96, num_layers=2, num_envs=8, rollout_steps=32, **options)
    algorithm = make_algorithm(config)
    batch = algorithm.collect()
    algorithm.learn(batch)
    parts = footprint(config)
    weights = sum(value.numel() * value.element_size() for value in algorithm.agent.parameters())
    assert parts["the networks"] <= 4 * weights
    assert footprint(config, learning=False)["the networks"] <= weights
    assert parts["a batch"] <= sum(value.numel() * value.element_size() for value in batch.values(True, True))
    if kind is R2D2Config:
        stored = algorithm.buffer.storage._leaves.values()
        assert parts["the replay buffer"] <= sum(value.numel() * value.element_size() for value in stored)
    algorithm.close()


def test_devices():
    for device in ("meta", "cpu:3"):
        with pytest.raises(ArgumentError, match=f"--device {device} can't be used"):
            check_machine(PPOConfig(env=ENV, device=device))
    if not torch.cuda.is_available():
        with pytest.raises(ArgumentError, match="--device cuda can't be used"):
            make_algorithm(PPOConfig(env=ENV, device="cuda"))

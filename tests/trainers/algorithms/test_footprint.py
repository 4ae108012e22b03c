import re
from dataclasses import replace

import pytest
import torch

from recurl import hardware, specs
from recurl.core.errors import ArgumentError
from recurl.nn import CellNet
from recurl.trainers import DQNConfig, PPOConfig, R2D2Config
from recurl.trainers.algorithms import footprint as footprints
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
def test_too_much_memory_is_refused_before_it_is_allocated(kind, options, words):
    with pytest.raises(ArgumentError, match=f"At least .*{words}"):
        make_algorithm(kind(env=ENV, **options))


@pytest.mark.parametrize("cell", ["lstm", "gru", "none"])
@pytest.mark.parametrize("kind", [PPOConfig, R2D2Config])
def test_the_footprint_is_a_lower_bound(kind, cell):
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
    with pytest.raises(ArgumentError, match="--device cuda can't be used"):
        make_algorithm(PPOConfig(env=ENV, device="cuda"))


IMAGES = specs.Composite(
    {"image": specs.Bounded(0, 255, (8, 210, 160, 3), dtype=torch.uint8), "x": specs.Unbounded(8, 2)}, shape=(8,)
)


def fitting(config, monkeypatch, words):
    """The size that fits according to the error message, on a machine with 1 GiB."""
    monkeypatch.setattr(hardware, "total_memory", lambda device: 2**30)
    monkeypatch.setattr(footprints, "total_memory", lambda device: 2**30)
    with pytest.raises(ArgumentError, match=words) as refusal:
        check_machine(config, IMAGES)
    return int(re.search(r" ([\d,]+) fits", str(refusal.value))[1].replace(",", ""))


def test_a_replay_buffer_of_images_is_refused_with_the_size_that_fits(monkeypatch):
    config = DQNConfig(env="x", buffer_size=100_000)
    size = fitting(config, monkeypatch, "9 GiB for the replay buffer.*lower --buffer-size.*; --buffer-size ")
    assert 2**30 // 100_800 * 0.9 < size < 2**30 // 100_800
    check_machine(replace(config, buffer_size=size), IMAGES)
    with pytest.raises(ArgumentError, match="for the replay buffer"):
        check_machine(replace(config, buffer_size=size + 200), IMAGES)


def test_a_batch_of_images_is_refused_with_the_size_that_fits(monkeypatch):
    config = PPOConfig(env="x", num_envs=64, store_states="all")
    steps = fitting(
        config, monkeypatch, r"for a batch, .*of a gradient step.*; a batch \(--num-envs x --rollout-steps\) of "
    )
    check_machine(replace(config, num_envs=1, sequence_length=1, rollout_steps=steps - 4), IMAGES)
    with pytest.raises(ArgumentError, match="for a batch"):
        check_machine(replace(config, num_envs=1, rollout_steps=steps + 200), IMAGES)


@pytest.mark.parametrize("kind", [PPOConfig, R2D2Config])
def test_a_long_window_is_refused_with_the_one_that_fits(kind, monkeypatch):
    config = kind(env="x", cell="gtrxl(window=100000000)", device="cpu")
    with pytest.raises(ArgumentError, match=r"lower the window of --cell, .*; .*a window of .* fits"):
        check_machine(config)
    for system in (hardware, footprints):
        monkeypatch.setattr(system, "total_memory", lambda device: 2**40)
    with pytest.raises(ArgumentError) as refusal:
        check_machine(config)
    window = int(re.search(r"a window of ([\d,]+) fits", str(refusal.value))[1].replace(",", ""))
    check_machine(replace(config, cell=f"gtrxl(window={window})"))
    with pytest.raises(ArgumentError, match="are needed"):
        check_machine(replace(config, cell=f"gtrxl(window={window + 1})"))


def test_the_size_of_a_matrix_is_named_and_no_batch_fits_that_its_check_refuses():
    config = PPOConfig(env="x", cell="shm(memory_size=10000000)", device="cpu")
    with pytest.raises(ArgumentError, match=r"for a batch.*: lower the memory_size of --cell, [^;]*\.$"):
        check_machine(config)
    with pytest.raises(ArgumentError, match=r"10000000.* lower memory_size or the hidden size\.$"):
        CellNet("shm(memory_size=10000000)", 3, 4)


def test_images_that_are_left_out_need_nothing():
    config = PPOConfig(env="x", num_envs=64, drop_observations=("image",))
    assert footprint(config, IMAGES)["a batch"] - footprint(config)["a batch"] == 64 * 128 * 2 * 8
    flat = footprint(PPOConfig(env="x", encoder="mlp"), IMAGES)
    assert set(flat) == {"the networks", "a batch"}


def test_the_options_of_the_encoder_are_named():
    with pytest.raises(
        ArgumentError, match=r"for the networks.*lower --encoder-width, --encoder-layers, --hidden-size"
    ):
        check_machine(PPOConfig(env="x", encoder_width=10**6, encoder_layers=3))
    with pytest.raises(ArgumentError, match="for the networks"):
        check_machine(PPOConfig(env="x", head_width=2 * 10**9))

"""Option files: TOML, config.json, presets, and their errors."""

import importlib.metadata
import json
import tomllib

import pytest

from recurl.core.errors import ArgumentError, MissingDependencyError, StorageError
from recurl.trainers import DQNConfig, PPOConfig, R2D2Config, find_algorithm
from recurl.trainers.algorithms import options_file
from recurl.trainers.algorithms.options_file import (
    options_for,
    preset_names,
    read_options_file,
    read_preset,
    write_options_file,
)

CONFIGS = [
    PPOConfig(env="recurl/TMaze-v0"),
    PPOConfig(
        env='a "quoted" \\ \x7f \t \U0001f98a',
        env_kwargs=("k=8", "mode='x'"),
        max_grad_norm=float("inf"),
        stop_return=-1e-5,
        eval_every=10**15,
        keep_best=True,
        callback=("a:B",),
        seed=2**63 - 1,
    ),
    DQNConfig(env="recurl/TMaze-v0", learning_rate=3),
    R2D2Config(env="recurl/TMaze-v0", prioritized=False),
]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_all_options_survive(config, suffix, tmp_path):
    path = tmp_path / f"options.{suffix}"
    if suffix == "toml":
        write_options_file(path, config)
    else:
        path.write_text(json.dumps(config.to_dict()))
    file = read_options_file(path)
    assert file.algorithm == config.algorithm
    assert type(config)(**options_for(type(config), file)) == config


def read(tmp_path, text, kind=PPOConfig, suffix="toml"):
    path = tmp_path / f"run.{suffix}"
    path.write_text(text)
    return options_for(kind, read_options_file(path))


def test_numbers_become_those_of_the_field(tmp_path):
    found = read(tmp_path, "gamma = 1\nstop_return = 475\nenv_kwargs = [\"k=1\"]\n[about]\ntitle = 'mine'\n")
    assert found == {"gamma": 1.0, "stop_return": 475.0, "env_kwargs": ("k=1",)}
    assert [type(value) for value in found.values()] == [float, float, tuple]


def test_whole_numbers_may_be_written_short(tmp_path):
    found = read(tmp_path, "total_steps = 1e4\nseed = 3\nrollout_steps = '1k'\n")
    assert found == {"total_steps": 10_000, "seed": 3, "rollout_steps": 1_000}
    assert all(type(value) is int for value in found.values())
    with pytest.raises(ArgumentError, match=r"run.toml: --total-steps must be a whole number, got 2\.5"):
        read(tmp_path, "total_steps = 2.5")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learnin_rate = 1e-3", r"run.toml: ppo has no option 'learnin_rate'. Did you mean learning_rate\?"),
        ("[ppo]\ngamma = 1", r"ppo has no option 'ppo'"),
        ("gamma = 2", r"run.toml: --gamma must lie between 0 and 1, got 2"),
        ("gamma = 'x'", r"--gamma must be a number, got 'x'"),
        ("env_kwargs = 'k=1'", r"--env-kwargs must be a tuple, got 'k=1'"),
        ("logger = 'wandbb'", r"--logger must be one of .*\. Did you mean wandb\?"),
        ("gamma", r"run.toml is not TOML: "),
        ("algorithm = 3", r"algorithm must be a name such as 'ppo', got 3"),
        ("algorithm = 'pppo'", r"There is no algorithm 'pppo': did you mean ppo\?"),
        ("algorithm = 'dqn'", r"run.toml has options of dqn, not of ppo: recurl train dqn"),
        ("about = 3", r"about must be a table of notes, got 3"),
        ("x = 2024-01-01", r"ppo has no option 'x'"),
        ("seed = 2024-01-01", r"--seed must be a whole number"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, text, message):
    with pytest.raises(ArgumentError, match=message):
        read(tmp_path, text)


def test_json_that_cannot_be_used(tmp_path):
    for text, message in (
        ("[1]", "must contain options by name, got list"),
        ("{", "is not JSON"),
        ("[" * 9999, "not JSON"),
    ):
        with pytest.raises(ArgumentError, match=message):
            read(tmp_path, text, suffix="json")


def test_no_such_file(tmp_path):
    with pytest.raises(ArgumentError, match=r"none.toml can't be read: No such file"):
        read_options_file(tmp_path / "none.toml")
    with pytest.raises(ArgumentError, match=r"can't be read: Is a directory"):
        read_options_file(tmp_path)
    with pytest.raises(StorageError, match=r"Can't write"):
        write_options_file(tmp_path / "none" / "x.toml", CONFIGS[0])


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_valid(name, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "1")
    preset = read_preset(name)
    kind = find_algorithm(preset.algorithm).config
    config = kind(**options_for(kind, preset))
    assert config.eval_every is not None  # its curve is measured
    assert preset.about.keys() == {"title", "packages"}
    assert list(tomllib.loads((options_file.PRESETS / f"{name}.toml").read_text()))[:3] == ["about", "algorithm", "env"]


def test_presets_that_cannot_be_used(tmp_path, monkeypatch):
    with pytest.raises(ArgumentError, match=r"There is no preset 'tmazze': choose from .*\. Did you mean tmaze\?"):
        read_preset("tmazze")
    monkeypatch.setattr(options_file, "PRESETS", tmp_path)
    (tmp_path / "far.toml").write_text("about.packages = ['tyro', 'no-such-package-of-recurl']\nalgorithm = 'ppo'\n")
    with pytest.raises(
        MissingDependencyError, match=r"preset far needs no-such.*: pip install no-such-package-of-recurl"
    ):
        read_preset("far")

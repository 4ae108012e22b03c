"""``--config``, ``--preset`` and ``--save-config``: precedence of flags over files over presets over defaults."""

import pytest

from recurl.cli import main, train
from recurl.core.errors import ArgumentError
from recurl.trainers import PPOConfig, RunFolder
from recurl.trainers.algorithms import options_file


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "presets"
    folder.mkdir()
    monkeypatch.setattr(options_file, "PRESETS", folder)
    preset = "about.packages = []\nalgorithm = 'ppo'\nenv = 'recurl/TMaze-v0'\ngamma = 0.1\ncell = 'gru'\nseed = 1\n"
    (folder / "maze.toml").write_text(preset)
    (tmp_path / "run.toml").write_text("algorithm = 'ppo'\ngamma = 0.2\nseed = 2\nkeep_best = true\neval_every = 9\n")


def read(words):
    return train.read(words.split())


@pytest.mark.parametrize("first", ["ppo ", ""])
def test_rank(first):
    config = read(f"{first}--preset maze --config run.toml --seed 3").options
    assert type(config) is PPOConfig
    assert (config.seed, config.gamma, config.cell, config.hidden_size) == (3, 0.2, "gru", 64)
    assert read(f"{first}--preset=maze").options.gamma == 0.1
    assert read(f"{first}--config=run.toml --env a/B --no-keep-best").options.keep_best is False
    assert read(f"{first}--seed 5 --preset maze").options.seed == 5


def test_the_help_shows_the_defaults_of_the_preset(capsys):
    with pytest.raises(SystemExit):
        read("ppo --preset maze --help")
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "or of several agents (vmas/balance, pettingzoo/ID). (default: recurl/TMaze-v0)" in said
    assert 'norm=False)". (default: gru)' in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--preset mazze", r"There is no preset 'mazze': choose from maze. Did you mean maze\?"),
        ("dqn --preset maze", r"The preset maze has options of ppo, not of dqn: recurl train ppo"),
        ("--config none.toml", r"none.toml can't be read"),
        ("ppo --config run.toml", r"Missing from recurl train ppo: --env"),
        ("ppo --preset", r"Missing value for argument '--preset'"),
        ("pppo --preset maze", r"There is no algorithm 'pppo': use .* Did you mean ppo\?"),
        ("ppo --preset maze --logger wandbb", r"invalid choice 'wandbb' .* Did you mean wandb\?"),
        ("--resume run --preset maze", r"takes only --trust-run, --resume, .*; got --preset maze: leave"),
    ],
)
def test_mistakes(words, message):
    with pytest.raises(ArgumentError, match=message):
        read(words)


def test_options_are_saved_and_read(capsys):
    words = "--preset maze --config run.toml --learning-rate 0.5 --env-kwargs k=1 j=2"
    assert main(["train", *words.split(), "--save-config", "mine.toml"]) == 0
    assert capsys.readouterr().out == "Options written to mine.toml: recurl train --config mine.toml\n"
    assert read("--config mine.toml").options == read(words).options


@pytest.mark.slow
def test_the_options_of_a_run_are_a_file(tmp_path):
    words = "--preset maze --num-envs 4 --rollout-steps 8 --minibatches 1 --total-steps 32 --eval-episodes 1 --run-dir"
    assert main(["train", *words.split(), "one"]) == 0
    assert main(["train", "--config", "one/config.json", "--run-dir", "two"]) == 0
    one, two = (RunFolder(tmp_path / name).read_config() for name in ("one", "two"))
    assert one == two

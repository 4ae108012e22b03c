from dataclasses import dataclass

import pytest

from recurl.cli.arguments import parse_arguments
from recurl.cli.train import TrainPPO
from recurl.errors import ArgumentError


@dataclass(frozen=True)
class Options:
    """Options of a test."""

    size: int
    """How many."""


def test_help_is_printed_to_stdout(capsys):
    with pytest.raises(SystemExit) as end:
        parse_arguments(Options, ["--help"], prog="demo")
    assert end.value.code == 0
    assert "How many." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], r"^Missing from demo: --size INT How many. \(required\) \(see demo --help\)$"),
        (["--size", "x"], r"^.*--size.*\(see demo --help\)$"),
        (["--size", "1", "--sise", "2"], r"^Unrecognized options: --sise.*$"),
    ],
)
def test_mistakes_become_one_line(arguments, message, capsys):
    with pytest.raises(ArgumentError, match=message):
        parse_arguments(Options, arguments, prog="demo")
    assert capsys.readouterr() == ("", "")


def test_all_options_of_ppo_are_flags():
    words = (
        "--env a/B-v0 --env-kwargs k=8 n=2 --cell gru --hidden-size 16 --num-envs 4 --no-anneal --run-dir r --overwrite"
    )
    wanted = parse_arguments(TrainPPO, words.split(), prog="demo")
    config = wanted.config
    assert (config.env, config.env_arguments, config.cell) == ("a/B-v0", {"k": 8, "n": 2}, "gru")
    assert (config.hidden_size, config.num_envs, config.anneal) == (16, 4, False)
    assert (str(wanted.run_dir), wanted.overwrite) == ("r", True)

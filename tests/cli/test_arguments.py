from dataclasses import dataclass
from typing import Literal

import pytest

from recurl.cli import train
from recurl.cli.arguments import parse_arguments, parse_subcommand
from recurl.errors import ArgumentError


@dataclass(frozen=True)
class Options:
    """Options of a test."""

    size: int
    """How many."""
    kind: Literal["new", "old"] = "new"
    """Which."""


@dataclass(frozen=True)
class Others:
    """Other options of a test."""


KINDS = {"one": Options, "other": Others}


def choose(*arguments):
    return parse_subcommand(KINDS, arguments, prog="demo", what="thing", description="Demonstrate.")


def test_help_is_printed_to_stdout(capsys):
    with pytest.raises(SystemExit) as end:
        parse_arguments(Options, ["--help"], prog="demo")
    assert end.value.code == 0
    assert "How many." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "Missing from demo: --size INT How many. (required) (see demo --help)"),
        (
            "--size x",
            "Error parsing --size: must be a whole number, such as 5000, 10k, 2M or 1e6, got 'x' (see demo --help)",
        ),
        ("--size", "Missing value for argument '--size'. Expected 1 values. (see demo --help)"),
        ("--size 1 --sise 2", "Unrecognized options: --sise, 2: did you mean --size? (see demo --help)"),
        ("--size 1 --colour red", "Unrecognized options: --colour, red (see demo --help)"),
        ("--size 1 stray", "Unrecognized options: stray (see demo --help)"),
        (
            "--size 1 --kind odd",
            "invalid choice 'odd' for argument '--kind'. Expected one of ('new', 'old'). Did you mean old? (see demo "
            "--help)",
        ),
        (
            "--size 1 --kind red",
            "invalid choice 'red' for argument '--kind'. Expected one of ('new', 'old'). (see demo --help)",
        ),
        (
            "--size 1.5",
            "Error parsing --size: must be a whole number, such as 5000, 10k, 2M or 1e6, got '1.5' (see demo --help)",
        ),
    ],
)
def test_mistakes_become_one_line(arguments, message, capsys):
    """Word for word: what tyro says is read from the boxes that it prints, whose form another version may change."""
    with pytest.raises(ArgumentError) as error:
        parse_arguments(Options, arguments.split(), prog="demo")
    assert str(error.value) == message
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("text", "size"), [("1e3", 1000), ("10k", 10_000), ("1_000", 1000), ("2M", 2_000_000)])
def test_whole_numbers_may_be_written_shorter(text, size):
    assert parse_arguments(Options, ["--size", text], prog="demo").size == size


def test_an_option_of_several_values_may_come_several_times():
    words = "--env a/B-v0 --env-kwargs k=8 --seed 3 --env-kwargs=n=2 --total-steps 1e6 --env-kwargs m=1 l=2"
    config = train.read(["ppo", *words.split()]).options
    assert config.env_arguments == {"k": 8, "n": 2, "m": 1, "l": 2}
    assert (config.seed, config.total_steps) == (3, 1_000_000)


def test_subcommands(capsys):
    assert choose("one", "--size", "3") == Options(3)
    assert choose("other") == Others()
    with pytest.raises(SystemExit) as end:
        choose("--help")
    assert end.value.code == 0
    said = capsys.readouterr().out
    for words in ("usage: demo [-h] {one,other}", "Demonstrate.", "Options of a test.", "Other options of a test."):
        assert words in said
    with pytest.raises(SystemExit):
        choose("one", "--help")
    assert "usage: demo one [-h] --size INT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "There is no thing '': use demo one, other."),
        ("ohter --size 3", "There is no thing 'ohter': use demo one, other. Did you mean other?"),
        ("one --sise 3 --size 3", "Unrecognized options: --sise, 3: did you mean --size? (see demo one --help)"),
    ],
)
def test_mistakes_in_subcommands_become_one_line(arguments, message, capsys):
    with pytest.raises(ArgumentError) as error:
        choose(*arguments.split())
    assert str(error.value) == message
    assert capsys.readouterr() == ("", "")


def test_all_options_of_ppo_are_flags():
    words = (
        "--env a/B-v0 --env-kwargs k=8 n=2 --cell gru --hidden-size 16 --num-envs 4 --no-scale-rewards --run-dir r "
        "--overwrite"
    )
    wanted = train.read(["ppo", *words.split()])
    config = wanted.options
    assert (config.env, config.env_arguments, config.cell) == ("a/B-v0", {"k": 8, "n": 2}, "gru")
    assert (config.hidden_size, config.num_envs, config.scale_rewards) == (16, 4, False)
    assert (str(wanted.run_dir), wanted.overwrite) == ("r", True)

from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Literal, get_type_hints

import pytest
import tyro

from recurl.cli import arguments, compare, doctor, evaluate, export, play, sweep, train
from recurl.cli.arguments import parse_arguments, parse_known_arguments, parse_subcommand
from recurl.core.errors import ArgumentError
from recurl.core.ranges import fields_of, flag
from recurl.experiments.bench_memory import BenchMemory
from recurl.experiments.bench_popgym import BenchPopgym
from recurl.experiments.bench_rnn import BenchRNN
from recurl.experiments.bench_train import BenchTrain


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
    """Messages are compared verbatim, since they are parsed from tyro's printed boxes, whose form may change."""
    with pytest.raises(ArgumentError) as error:
        parse_arguments(Options, arguments.split(), prog="demo")
    assert str(error.value) == message
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("text", "size"), [("1e3", 1000), ("10k", 10_000), ("1_000", 1000), ("2M", 2_000_000)])
def test_whole_numbers_may_be_written_shorter(text, size):
    assert parse_arguments(Options, ["--size", text], prog="demo").size == size


def test_an_option_of_several_values_may_come_several_times():
    words = "--env a/B-v0 --env-kwargs k=8 --seed 3 --env-kwargs=n=2 --total-steps 1e6 --env_kwargs m=1 l=2"
    config = train.read(["ppo", *words.split()]).options
    assert config.env_arguments == {"k": 8, "n": 2, "m": 1, "l": 2}
    assert (config.seed, config.total_steps) == (3, 1_000_000)


EVERYTHING = {
    **{f"train {name}": kind for name, kind in train.kinds().items()},
    **{f"bench train {name}": kind for name, kind in train.kinds(BenchTrain).items()},
    "train --resume": train.Resume,
    "bench rnn": BenchRNN,
    "bench popgym": BenchPopgym,
    "bench memory": BenchMemory,
    "sweep": sweep.SweepOptions,
    "compare": compare.Compare,
    "evaluate": evaluate.Evaluate,
    "play": play.Play,
    "export": export.Export,
    "doctor": doctor.Doctor,
}


def options_of(kind):
    nested = [field.kind for field in fields_of(kind) if is_dataclass(field.kind)]
    own = [field for field in fields_of(kind) if not is_dataclass(field.kind)]
    return own + [field for inner in nested for field in options_of(inner)]


def values_of(field):
    """Two values of a field."""
    if field.choices:
        return [str(choice) for choice in (field.choices * 2)[:2]]
    if field.range is not None:
        return [text for text in ("1", "0.5", "0.25", "2", "16") if field.range.rule(float(text)) is None][:2]
    return ["cpu", "cpu"] if field.name == "device" else ["1", "2"]


@pytest.mark.parametrize("command", EVERYTHING)
def test_an_option_given_twice_is_not_lost(command):
    """For all options of all commands: repeated multi-value options are merged, other repetitions are rejected."""
    kind = EVERYTHING[command]
    positional = [name for name, hint in get_type_hints(kind, include_extras=True).items() if is_positional(hint)]
    names = {field.name for field in options_of(kind)}
    for field in options_of(kind):
        if field.name in positional:
            continue
        for option in {flag(field.name), "--" + field.name}:
            if field.kind is bool and not field.many:
                other = f"--no-{field.name}" if f"no_{field.name}" not in names else option
                words = [[flag(field.name)], [other]]
            else:
                words = [[flag(field.name), values_of(field)[0]], [f"{option}={values_of(field)[1]}"]]
            if field.many:
                read = arguments._merge_repeated([*words[0], "--other", "x", *words[1]], kind, prog="demo")
                assert read == [words[0][0], *values_of(field), "--other", "x"]
                continue
            for parse in (parse_arguments, parse_known_arguments):
                with pytest.raises(ArgumentError, match="must be given once") as error:
                    parse(kind, [*words[0], *words[1]], prog="demo")
                said = f"{flag(field.name)} must be given once, got {' '.join(words[0])!r} and {' '.join(words[1])!r}"
                assert str(error.value) == f"{said} (see demo --help)"


def is_positional(hint):
    return tyro.conf.Positional in getattr(hint, "__metadata__", ())


def test_an_option_given_once_is_read():
    """Similar words are kept apart: an option named like the negation of a flag, and values of other options."""
    read = partial(parse_arguments, doctor.Doctor, prog="demo")
    assert read(["--no-auto-register-policy-transforms", "--auto-register-policy-transforms"])
    assert read(["--env-kwargs", "seed=1", "seed2=1", "--policy", "seed"]).env_kwargs == ("seed=1", "seed2=1")


def test_a_sweep_takes_settings_several_times(tmp_path):
    words = f"a2c --env recurl/TMaze-v0 --learning_rate 0.5 --no-scale-rewards --run-dir {tmp_path}"
    settings = "--set cell=lstm,gru --seeds 2 --set learning_rate=1e-3 scale_rewards=true --set=hidden_size=4"
    jobs = sweep.read([*words.split(), *settings.split()]).jobs
    assert [(job.config.cell, job.config.seed) for job in jobs] == [("lstm", 0), ("gru", 0), ("lstm", 1), ("gru", 1)]
    assert {(job.config.learning_rate, job.config.scale_rewards, job.config.hidden_size) for job in jobs} == {
        (1e-3, True, 4)
    }
    for more in ("--seeds 3", "--num-envs 2 --num_envs=3"):
        with pytest.raises(ArgumentError, match="must be given once"):
            sweep.read([*words.split(), *settings.split(), *more.split()])
    with pytest.raises(ArgumentError, match="--set got cell twice"):
        sweep.read([*words.split(), *settings.split(), "--set", "cell=none"])


def test_subcommands(capsys):
    assert choose("one", "--size", "3") == Options(3)
    assert choose("other") == Others()
    with pytest.raises(SystemExit) as end:
        choose("--help")
    assert end.value.code == 0
    said = capsys.readouterr().out
    for words in (
        "usage: demo {one,other} [OPTIONS]",
        "Demonstrate.",
        "one                       a test.",
        "Other options of a test.",
    ):
        assert words in said
    with pytest.raises(SystemExit):
        choose("one", "--help")
    assert "usage: demo one --size INT [OPTIONS]" in capsys.readouterr().out


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

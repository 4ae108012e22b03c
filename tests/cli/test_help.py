"""Help of the commands: groups, short and full form, maximum line width, no torch import."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, fields
from typing import Annotated, ClassVar, Literal

import pytest
import tyro

from recurl.cli import main
from recurl.cli.help import BASIC, GROUPS, help_text
from recurl.cli.place import NewRunOptions, with_run_options
from recurl.core.ranges import Count, flag
from recurl.trainers import ALGORITHMS, OPTIONS, PPOConfig, RunConfig

TITLE = re.compile(r"^(\S.*):$", re.MULTILINE)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(list(words))
    assert end.value.code == 0
    out, error = capsys.readouterr()
    assert error == ""
    return out


def flags(text: str) -> list[str]:
    return re.findall(r"^  (?:-h, )?(--[\w-]+)", text, re.MULTILINE)


@dataclass
class Options:
    """Draw something.

    In colors.

    Raises:
        ArgumentError: it can't be drawn.
    """

    files: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Files to
    draw."""
    shape: Literal["round", "square"] = "round"
    """Their shape."""
    size: Count | None = None
    sizes: tuple[Count, ...] = (1, 2)
    """Sizes of a-word-that-is-longer-than-the-column-of-the-texts and more."""
    fill: bool = True
    """Fill it."""


def test_a_whole_text() -> None:
    assert (
        help_text(Options, "draw", width=60)
        == """\
usage: draw FILES ... [OPTIONS]

Draw something.

In colors.

options:
  FILES ...                 Files to draw. (required)
  --shape {round,square}    Their shape. (default: round)
  --size INT
  --sizes INT ...           Sizes of
                            a-word-that-is-longer-than-the-column-of-the-texts
                            and more. (default: 1 2)
  --fill, --no-fill         Fill it. (default: on)
  -h, --help                Show this help."""
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_groups_of_an_algorithm(algorithm: str, capsys: pytest.CaptureFixture[str]) -> None:
    short, whole = (printed(capsys, "train", algorithm, word) for word in ("--help", "--help-all"))
    titles = [algorithm.upper() if title == "algorithm" else title for title in GROUPS]
    assert TITLE.findall(short) == TITLE.findall(whole) == [*titles, "help"]
    names = {field.name for kind in (OPTIONS[algorithm], NewRunOptions) for field in fields(kind)}
    assert sorted(flags(whole)) == sorted({*map(flag, names), "--help", "--help-all"})
    assert set(flags(short)) == {*map(flag, names & BASIC), "--help", "--help-all"}
    assert len(short.splitlines()) < 90
    assert f"Show all {len(names)} options." in short


def test_every_option_of_all_algorithms_is_in_one_group() -> None:
    listed = [name for names in GROUPS.values() for name in names]
    assert len(listed) == len(set(listed))
    common = {field.name for field in fields(RunConfig)}
    learning = {"rollout_steps", "learning_rate", "learning_rate_schedule", "gamma", "max_grad_norm"}
    assert common - learning <= set(listed)
    every = {field.name for kind in OPTIONS.values() for field in fields(kind)}
    others = {"run_dir", "overwrite", "print_model", "preset", "config", "save_config", "trust_run"}
    others |= {"warm_up", "updates", "csv"}
    assert BASIC | set(listed) <= every | others


@pytest.mark.parametrize("width", [50, 80, 100])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_lines_end_between_words(algorithm: str, width: int) -> None:
    kind = with_run_options(OPTIONS[algorithm])
    narrow, wide = (help_text(kind, "recurl train", everything=True, width=columns) for columns in (width, 10**6))
    assert narrow.split() == wide.split()
    assert all(len(line) <= width or len(line.split()) == 1 or line.startswith("  -") for line in narrow.splitlines())


@dataclass(frozen=True, kw_only=True)
class DoubledConfig(PPOConfig):
    """Options of PPO, doubled."""

    algorithm: ClassVar[str] = "doubled"
    doublings: Count = 2
    """How often."""


def test_a_custom_algorithm_shows_the_options_it_adds() -> None:
    text = help_text(with_run_options(DoubledConfig), "recurl train own:doubled")
    assert "\nDOUBLED:\n" in text
    assert "--doublings INT           How often. (default: 2)" in text
    assert "--epochs INT" in text
    assert "--clip-epsilon-schedule" not in text


@pytest.mark.parametrize("word", ["-h", "--help", "--help-all"])
def test_the_algorithms_are_listed(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "train", word)
    assert text.startswith(
        "usage: recurl train {ppo,dqn,r2d2,a2c,impala,sac,td3,distill} [OPTIONS]\n\nTrain a policy with one of "
    )
    assert "recurl train ALGORITHM --help" in text


@pytest.mark.parametrize(
    "command", ["sweep", "compare", "evaluate", "play", "export", "doctor", "bench rnn", "bench popgym", "bench memory"]
)
def test_other_commands_have_one_group(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, *command.split(), "--help")
    assert text.startswith(f"usage: recurl {command} ")
    assert TITLE.findall(text)[0] == "options"
    assert "--help-all" not in text


def test_training_and_timing_share_their_help(capsys: pytest.CaptureFixture[str]) -> None:
    timed, trained = (set(flags(printed(capsys, *words.split()))) for words in ("bench train sac -h", "train sac -h"))
    assert timed - trained == {"--warm-up", "--updates", "--csv"}
    assert trained - timed == {"--run-dir"}


@pytest.mark.slow
@pytest.mark.parametrize("words", ["ppo --help", "td3 --help-all", "--help", "r2d2 --env x -h"])
def test_help_of_training_imports_no_torch(words: str) -> None:
    program = (
        "import sys, recurl.cli\n"
        "try: recurl.cli.main(sys.argv[1:])\n"
        "except SystemExit: print(sorted({'torch', 'tensordict', 'rich'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program, "train", *words.split()]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.startswith("usage: recurl train ")
    assert done.stdout.splitlines()[-1] == "[]"

"""``recurl conformance``."""

from pathlib import Path

import pytest

from recurl.cli import main
from recurl.conformance import CHECKS
from recurl.conformance.matrix import read_results
from recurl.conformance.worker import find_adapter

TOY = "tests.conformance.toy:Toy"


def test_list_and_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance"]) == 0
    assert "replay-terminations" in capsys.readouterr().out
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    for arguments, text in (
        (["recrul"], "Did you mean recurl?"),
        (["recurl", "--only", "replai"], "there is no check 'replai'"),
        (["recurl", "--python", str(tmp_path / "python")], "can't be run: No such file or directory"),
        (["--table", str(tmp_path / "other.csv")], "isn't a file of recurl conformance"),
        (["--table", str(tmp_path / "none.csv")], "there is no file"),
        (["./mine.py:Mine"], "must be module:Class, such as package.my_adapter:MyLibrary"),
        (["recurl", "--out", str(tmp_path / "none" / "out.csv")], "Can't write"),
    ):
        assert main(["conformance", *arguments]) == 2
        assert text in capsys.readouterr().err


@pytest.mark.slow
def test_checks_of_an_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results.csv"
    assert main(["conformance", TOY, "--only", "memory", "replay", "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines() == ["toy 1", "passed       memory", "passed       replay", "2 passed"]
    assert main(["conformance", TOY, "--only", "replay", "--out", str(out)]) == 0
    assert [(row.check, row.outcome, row.versions) for row in read_results(out)] == [
        ("memory", "passed", "toy 1"),
        ("replay", "passed", "toy 1"),
    ]
    capsys.readouterr()
    assert main(["conformance", "tests.conformance.toy:Joke"]) == 2
    assert "can't be used: AttributeError" in capsys.readouterr().err


@pytest.mark.slow
def test_processes_that_end_early(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", TOY, "--python", "/bin/true"]) == 2
    assert "ended with code 0 before the end of seed: it said nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tests.conformance.toy:Envs", r"missing 1 required positional argument"),
        ("tests.conformance.toy:NoMake", r"it lacks lmbda, versions, documented, make"),
        ("tests.conformance.toy:Unknown", r"it documents replai, which aren't names of checks"),
    ],
)
def test_classes_that_are_no_adapters(name: str, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        find_adapter(name)


def test_groups_of_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", TOY, "--only", "files", "memory"]) == 0
    found = [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert found == ["memory", *(name for name, check in CHECKS.items() if check.group == "files")]

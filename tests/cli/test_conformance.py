"""``recurl conformance``."""

from pathlib import Path

import pytest

from recurl.cli import main
from recurl.conformance.matrix import read_results

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
    assert "can't be imported: AttributeError" in capsys.readouterr().err

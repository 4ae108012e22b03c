"""Every mistake in the table raises the message in the table, and thus in the documentation."""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recurl.cli import main
from recurl.core import errors
from tests.docs.mistakes import MISTAKES, PAGE, TABLE, anchor, index, opening, page


@pytest.fixture(scope="module")
def prepared() -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(TABLE["setup"], namespace)
    return namespace


def titles(of: Callable[[str], bool]) -> list[Any]:
    return [pytest.param(mistake, id=mistake["cause"]) for mistake in MISTAKES if of(mistake["error"])]


@pytest.mark.parametrize("mistake", titles(lambda error: error not in ("exit code 2", "printed")))
def test_message(prepared: dict[str, Any], mistake: dict[str, str]) -> None:
    kind = getattr(errors, mistake["error"], None) or getattr(builtins, mistake["error"])
    with pytest.raises(kind) as caught:  # warnings are errors in all tests
        exec(mistake["code"], dict(prepared))
    assert type(caught.value) is kind
    assert str(caught.value) == mistake["message"]


@pytest.mark.slow
@pytest.mark.parametrize("mistake", titles(lambda error: error == "printed"))
def test_finding_of_the_doctor(
    prepared: dict[str, Any], mistake: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    exec(mistake["code"], dict(prepared))
    assert capsys.readouterr().out.strip() == mistake["message"]


@pytest.mark.parametrize("mistake", titles(lambda error: error == "exit code 2"))
def test_message_of_the_command_line(
    mistake: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(mistake["code"].split()[1:]) == 2
    assert capsys.readouterr().err.strip() == mistake["message"]
    assert list(tmp_path.iterdir()) == []


def test_there_are_enough_and_each_is_one_of_recurls_own() -> None:
    assert len(MISTAKES) >= 40
    known = {*vars(errors), "exit code 2", "printed"}
    assert {mistake["error"] for mistake in MISTAKES} <= known


def test_the_page_shows_the_table() -> None:
    assert PAGE.read_text() == page(), "write it: python -m tests.docs.mistakes"


def test_the_index_has_every_message_once_and_headings_begin_with_its_words() -> None:
    anchors = [anchor(mistake) for mistake in MISTAKES]
    assert len(set(anchors)) == len(anchors)
    assert sorted(re.findall(r"\(#([\w-]+)\) \|$", index(), re.MULTILINE)) == sorted(anchors)
    for mistake in MISTAKES:
        assert mistake["message"].removeprefix("recurl: ").startswith(opening(mistake["message"]).removesuffix(" …"))

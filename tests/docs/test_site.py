"""The documentation site: code blocks run, commands are valid, pages, API entries and figures exist.

The python blocks of a page run in order, in one namespace; a ``text`` block right below one is its output.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import re
import shlex
import sys
import tomllib
from pathlib import Path
from unittest import mock

import pytest
import yaml

from recurl.cli.main import load
from recurl.recurrence import BACKENDS
from recurl.trainers import ALGORITHMS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md"))
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INCLUDE = re.compile(r"^--8<--\n(.+)\n--8<--$", re.MULTILINE)
EXECUTED = DOCS / "runs.md"  # by test_runs.py
LANGUAGES = {"python", "text", "sh", "py"}  # py: programs of other libraries, which are not run
RAISING = DOCS / "mistakes.md"  # its code raises, which test_mistakes.py checks
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(autouse=True)
def algorithms():
    """Forget the algorithms that a page, or a command on it, registers."""
    with mock.patch.dict(ALGORITHMS):
        yield


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return language and text of every code block, with included files inserted."""
    found = BLOCK.findall(page.read_text())
    return [(lang, INCLUDE.sub(lambda match: (ROOT / match[1]).read_text(), text)) for lang, text in found]


def name_of(page: Path) -> str:
    return str(page.relative_to(DOCS))


WITH_PYTHON = [page for page in PAGES if page != RAISING and any(lang == "python" for lang, _ in blocks(page))]
CLUSTER = DOCS / "scale_ray.md"  # its code starts a Ray cluster, as tests/distributed/test_actors.py does


@pytest.mark.usefixtures("shared_interpreter", "brief_verification")
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=name_of(page), marks=pytest.mark.full if page == CLUSTER else ()) for page in WITH_PYTHON],
)
def test_code_runs_and_prints_what_stands_below(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(BACKENDS, "_backends", dict(BACKENDS._backends))  # a page may register one
    monkeypatch.setattr(sys, "argv", [str(page)])  # otherwise a page would read pytest's arguments
    namespace = {"__name__": "__main__"}
    all_blocks = blocks(page)
    for number, (language, text) in enumerate(all_blocks):
        if language != "python":
            continue
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(text, f"{name_of(page)}, block {number + 1}", "exec", dont_inherit=True), namespace)
        if number + 1 < len(all_blocks) and all_blocks[number + 1][0] == "text":
            expected = all_blocks[number + 1][1]
            assert doctest.OutputChecker().check_output(expected, said.getvalue(), doctest.ELLIPSIS), said.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_says_its_language(page: Path) -> None:
    assert {language for language, _ in blocks(page)} <= LANGUAGES


def commands() -> list[str]:
    """Return the lines of all shell blocks, including the README's, with continuation lines joined."""
    pages = [*(page for page in PAGES if page not in (RAISING, EXECUTED)), ROOT / "README.md"]
    texts = [text.replace("\\\n", " ") for page in pages for language, text in blocks(page) if language == "sh"]
    return sorted({line.strip() for text in texts for line in text.splitlines() if line.strip()})


@pytest.mark.parametrize("line", commands())
def test_commands_are_valid(line: str) -> None:
    for part in " ".join(shlex.split(line, comments=True)).split(" && "):
        check(part.split())


def check(words: list[str]) -> None:
    """Raise if a command doesn't exist or doesn't have these options."""
    program, rest = words[0].removeprefix(".venv/bin/"), words[1:]
    if program == "recurl":
        check_recurl(rest)
    elif program == "torchrun":
        check_recurl(rest[rest.index("recurl") + 1 :])
    elif program == "make":
        assert f"\n{rest[0]}:" in (ROOT / "Makefile").read_text()
    elif program == "python":
        assert (ROOT / rest[0]).exists()
    else:
        assert words[:2] == ["pip", "install"] or program in ("tensorboard", "sed")
        extras = re.findall(r"(?:recurl|\.)\[([\w,]+)\]", " ".join(rest))
        assert {extra for group in extras for extra in group.split(",")} <= set(PROJECT["optional-dependencies"])


def check_recurl(words: list[str]) -> None:
    load(words).read(words[1:])


class _Loader(yaml.SafeLoader):
    """Loader of mkdocs.yml that ignores its tags."""


_Loader.add_constructor("!ENV", lambda *_: None)


def navigation() -> list[str]:
    def leaves(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        children = entry.values() if isinstance(entry, dict) else entry
        return [leaf for child in children for leaf in leaves(child)]

    return leaves(yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)["nav"])


def test_every_page_is_in_the_navigation() -> None:
    assert sorted(navigation()) == sorted(map(name_of, PAGES))


def documented() -> set[str]:
    return {match for page in PAGES for match in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)}


def test_every_public_package_has_its_page() -> None:
    source = ROOT / "src"
    packages = {".".join(file.parent.relative_to(source).parts) for file in source.glob("recurl/**/__init__.py")}
    public = {name for name in packages if getattr(importlib.import_module(name), "__all__", None)}
    inner = {"recurl.cli", "recurl.recurrence.cpu", "recurl.recurrence.cuda"}
    inner |= {"recurl"}  # its names are on the pages of their packages
    # their names are on the page of recurl.recurrence
    inner |= {f"recurl.recurrence.{room}" for room in ("attention", "cells", "linear", "matrix")}
    samplers = {"recurl.data.replay_buffers.samplers"}  # its names are on the page of the replay buffers
    assert public - inner - samplers <= documented()


def test_figures_are_there_and_small() -> None:
    for page in PAGES:
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text()):
            assert (page.parent / target).stat().st_size < 150_000

"""The version is the same everywhere."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from recurl import __version__

ROOT = Path(__file__).parents[1]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


def test_pyproject_reads_it_from_the_leaf_module() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "recurl._version.__version__"}
    tree = ast.parse((ROOT / "src/recurl/_version.py").read_text())
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def test_the_changelog_begins_with_it_or_with_the_next_one() -> None:
    headings = re.findall(r"^## (\S+)(?: \((.+)\))?$", CHANGELOG, re.MULTILINE)
    versions = [version for version, _ in headings]
    released = [version for version, note in headings if note != "in progress"]
    assert __version__ in (versions[0], released[0])
    assert versions[1:] == released[len(released) - len(versions) + 1 :]  # only the first one may be in progress
    numbers = [tuple(map(int, version.split("."))) for version in versions]
    assert numbers == sorted(set(numbers), reverse=True)


def test_a_version_has_at_most_twenty_changes_to_act_on() -> None:
    for release in CHANGELOG.split("\n## ")[1:]:
        breaking = release.partition("### Breaking")[2].partition("\n###")[0]
        assert len(re.findall(r"^- ", breaking, re.MULTILINE)) <= 20
        assert len(re.findall(r"^- ", release, re.MULTILINE)) <= 36


def test_changes_are_breaking_new_or_fixes() -> None:
    for release in CHANGELOG.split("\n## ")[1:]:
        kinds = re.findall(r"^### (.+)$", release, re.MULTILINE)
        assert kinds == [kind for kind in ("Breaking", "New", "Fixes") if kind in kinds]


def test_the_citation_names_it() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert {"cff-version", "message", "title", "authors", "license"} <= citation.keys()


@pytest.mark.parametrize("found", ["65.5.0", "76.1.0"])
def test_an_old_setuptools_is_named_before_anything_else_fails(tmp_path: Path, found: str) -> None:
    (tmp_path / "setuptools.py").write_text(f"__version__ = {found!r}\n")
    command = [sys.executable, "-S", str(ROOT / "setup.py")]
    done = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"][0]
    assert needed == "setuptools>=77"
    assert done.stderr.startswith(
        f"Building recurl needs setuptools 77 or newer, found {found}: pip install '{needed}'"
    )

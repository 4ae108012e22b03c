"""Built site: no warnings, a search index with all names, and no truncated content."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.full]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize(
    "package", ["modules", "envs", "collectors", "objectives", "data.replay_buffers", "transforms", "trainers"]
)
def test_the_search_knows_every_public_name(site: Path, package: str) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    titles = {entry["title"].split()[0] for entry in index if entry["location"].startswith("api/")}
    names = importlib.import_module(f"recurl.{package}").__all__
    documented = [name for name in names if getattr(importlib.import_module(f"recurl.{package}"), name).__doc__]
    assert {name for name in documented if name[0].isupper() and not name.isupper()} <= titles


def test_arguments_are_tables(site: Path) -> None:
    page = (site / "api" / "collectors" / "index.html").read_text()
    assert page.count("Parameters:") >= 4
    assert "<th>Default</th>" in page
    assert "stylesheets/extra.css" in page


def test_code_and_tables_scroll_instead_of_wrapping(site: Path) -> None:
    style = (site / "stylesheets" / "extra.css").read_text()
    rules = dict(re.findall(r"([^{}/]+?)\s*\{(.*?)\}", re.sub(r"/\*.*?\*/", "", style, flags=re.DOTALL), re.DOTALL))
    by_selector = {" ".join(selector.split()): rule for selector, rule in rules.items()}
    code, tables = by_selector[".md-typeset pre > code"], by_selector[".md-typeset__scrollwrap, .md-typeset__table"]
    assert "white-space: pre;" in code
    assert "overflow-x: auto;" in code
    assert "overflow-x: auto;" in tables


def test_installation_and_groups_of_guides_are_in_the_navigation(site: Path) -> None:
    page = (site / "index.html").read_text()
    assert 'href="installation/"' in page
    guide = (site / "guides" / "sac" / "index.html").read_text()
    for group in ("First steps", "Environments", "Algorithms", "Running", "Scaling"):
        assert re.search(rf">\s*{group}\s*<", guide), group


def test_the_repository_is_linked_where_its_address_is_given(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Page\n")
    wanted = re.findall(r"^repo_url: .*$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    (tmp_path / "mkdocs.yml").write_text("\n".join(["site_name: x", "theme: {name: material, font: false}", *wanted]))
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "RECURL_REPOSITORY": "https://example.org/recurl"}
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--quiet"], cwd=tmp_path, env=environment, check=True)
    assert 'href="https://example.org/recurl"' in (tmp_path / "site" / "index.html").read_text()

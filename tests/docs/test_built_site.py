"""The site as it is built: no warnings, an index that the search finds names in, and nothing that is cut off."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


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


def test_arguments_are_tables_and_long_lines_wrap(site: Path) -> None:
    page = (site / "api" / "collectors" / "index.html").read_text()
    assert page.count("Parameters:") >= 4
    assert "<th>Default</th>" in page
    assert "stylesheets/extra.css" in page
    style = (site / "stylesheets" / "extra.css").read_text()
    assert "white-space: pre-wrap" in style

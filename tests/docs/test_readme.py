"""What the README shows works as it stands there."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

from recurl.cli import train

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
EXAMPLE = ROOT / "examples" / "ppo.py"


def test_the_example_is_the_one_in_the_folder_and_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert EXAMPLE.read_text().endswith(code)
    end = runpy.run_path(str(EXAMPLE))
    assert end["batch"].shape == (8, 128)
    assert all(value.isfinite() for value in end["losses"].values())
    assert end["collector"].frames == 4096


TRAIN = [line for line in README.splitlines() if line.startswith(".venv/bin/recurl train ppo")]


@pytest.mark.parametrize("line", TRAIN)
def test_train_commands_are_valid(line: str) -> None:
    options = shlex.split(line, comments=True)[2:]
    assert train.read(options).options.env in README


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^`?make (\w+)", README, re.MULTILINE))
    assert {"train", "test"} <= targets
    assert all(f"\n{target}:" in makefile for target in targets)

"""What the README shows works as it stands there."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest
from PIL import Image

import bench_ppo
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


def test_the_picture_and_the_table_of_speed_show_the_newest_rows() -> None:
    rows = {
        row["system"]: (round(float(row["train_us"])), round(float(row["collect_us"]))) for row in bench_ppo.newest()
    }
    with Image.open(ROOT / "docs" / "ppo_speed.png") as picture:
        assert picture.info["Description"] == bench_ppo.drawn(bench_ppo.newest())
    both = {"TorchRL": ("torchrl", "torchrl-best"), "SB3-Contrib": ("sb3", "sb3-shared")}
    single = {"recurl": "recurl", "PufferLib": "pufferlib", "a single file": "cleanrl"}
    table = README.split("| | training | collection only |")[1].split("\n\n")[0]
    for title, names in {**both, **{title: (name,) for title, name in single.items()}}.items():
        (line,) = (line for line in table.splitlines() if line.startswith(f"| {title}"))
        shown = [" / ".join(str(rows[name][place]) for name in names) for place in (0, 1)]
        assert [cell.strip() for cell in line.strip("|").split("|")[1:]] == shown


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^`?make (\w+)", README, re.MULTILINE))
    assert {"train", "test"} <= targets
    assert all(f"\n{target}:" in makefile for target in targets)

"""The README's code, commands, links and figures."""

from __future__ import annotations

import csv
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
SPEED = (ROOT / "docs" / "speed.md").read_text()
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


def test_the_picture_and_the_table_of_speed_show_the_newest_complete_run() -> None:
    rows = {
        row["system"]: (round(float(row["train_us"])), round(float(row["collect_us"]))) for row in bench_ppo.newest()
    }
    with Image.open(ROOT / "docs" / "ppo_speed.png") as picture:
        assert picture.info["Description"] == bench_ppo.drawn(bench_ppo.newest())
    both = {"TorchRL": ("torchrl", "torchrl-best"), "SB3-Contrib": ("sb3", "sb3-shared")}
    single = {"recurl": "recurl", "PufferLib": "pufferlib", "a single file": "cleanrl"}
    table = SPEED.split("| | training | collection alone |")[1].split("\n\n")[0]
    for title, names in {**both, **{title: (name,) for title, name in single.items()}}.items():
        (line,) = (line for line in table.splitlines() if line.startswith(f"| {title}"))
        shown = [" / ".join(str(rows[name][place]) for name in names) for place in (0, 1)]
        assert [cell.strip() for cell in line.strip("|").split("|")[1:]] == shown


def test_figures_of_the_readme_are_in_the_results() -> None:
    table = README.split("| | figure | measured on | data |")[1].split("\n\n")[0]
    exact, cpu, gpu = (line for line in table.splitlines() if line.startswith("| ") and "---" not in line)

    def rows(line: str, name: str) -> list[dict[str, str]]:
        (commit,) = re.findall(r"commit (\w+)", line)
        assert f"benchmarks/results/{name}" in line
        with (ROOT / "benchmarks" / "results" / name).open(newline="") as file:
            found = [row for row in csv.DictReader(file) if row["commit"] == commit]
        assert {row["date"] for row in found} == set(re.findall(r"\d{4}-\d\d-\d\d", line))
        return found

    kills = [row for row in rows(exact, "torture.csv") if row["kind"] == "kills"]
    assert f"{sum(int(row['attacks']) for row in kills)} training runs" in exact
    assert all(row["broken"] == "0" for row in kills)
    times = {
        row["system"]: round(float(row["train_us"]))
        for row in rows(cpu, "ppo.csv")
        if (row["task"], row["num_envs"]) == ("masked-cartpole", "8")
    }
    assert re.findall(r"(\d+) µs", cpu) == [str(times["recurl"]), str(times["pufferlib"])]
    (row,) = (row for row in rows(gpu, "gpu_training.csv") if row["cell"] == "lstm")
    shown = [f"{float(row[column]):.1f} million" for column in ("M_steps_per_s", "jax_M_steps_per_s")]
    assert re.findall(r"[\d.]+ million", gpu) == shown


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^`?make (\w+)", README, re.MULTILINE))
    assert {"train", "test"} <= targets
    assert all(f"\n{target}:" in makefile for target in targets)

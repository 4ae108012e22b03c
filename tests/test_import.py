"""Importing recurl is fast and silent, and changes nothing but ``sys.modules``."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import recurl

pytestmark = pytest.mark.slow

PROBE = Path(__file__).with_name("import_probe.py")
SOURCE = Path(__file__).parents[1] / "src"
PACKAGES = sorted(
    ".".join(file.parent.relative_to(SOURCE).parts)
    for file in SOURCE.glob("recurl/**/__init__.py")
    if not {"cpu", "cuda"} & {*file.relative_to(SOURCE).parts}
)
LIGHT = {"recurl", "gymnasium", "numpy", "farama_notifications"}
RUNS = 3
LIMIT = 1.3

TRAINING = """
import json, sys
from recurl.trainers.algorithms.ppo import PPO, PPOConfig

def files():
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "recurl"]
    return sorted({module.__file__.rpartition("/recurl/")[2] for module in modules})

imported = files()
learner = PPO(PPOConfig(env="CartPole-v1", num_envs=2, rollout_steps=8, total_steps=64, minibatches=2))
learner.learn(learner.collect())
learner.close()
print(json.dumps([imported, files()]))
"""
FILES = 180, 190  # of recurl, once PPO is imported, and after an update on a host environment and a CPU
OTHER_RUNS = (
    "collectors/actors/",
    "collectors/captured",
    "collectors/multi",
    "collectors/threaded",
    "core/archive/",
    "data/replay_buffers/",
    "diagnostics/",
    "distributed/launch",
    "envs/parallel",
    "envs/tasks/dynamics",
    "envs/tensor_env",
    "envs/workers",
    "execution/capture",
    "execution/columns/",
    "execution/inductor",
    "execution/traced",
    "modules/images",
    "objectives/dqn",
    "objectives/sac",
    "trainers/optim/cuda_graph",
)


def probe() -> dict[str, Any]:
    command = [sys.executable, str(PROBE), *PACKAGES]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    return [probe()]  # more are added only if an import seems to take too long


def test_public_packages_are_found() -> None:
    assert {"recurl", "recurl.modules", "recurl.data.replay_buffers", "recurl.trainers", "recurl.cli"} <= set(PACKAGES)


@pytest.mark.parametrize("package", [*PACKAGES, "all"])
def test_takes_little_more_than_torch_and_tensordict(runs: list[dict[str, Any]], package: str) -> None:
    def ratio() -> float:
        times = [(run["torch and tensordict"], run["reports"][package]["seconds"]) for run in runs]
        return statistics.median((base + own) / base for base, own in times)

    while ratio() > LIMIT and len(runs) < RUNS:
        runs.append(probe())
    assert ratio() <= LIMIT, f"import {package} takes {ratio():.2f} times as long as torch and tensordict"


@pytest.mark.parametrize("package", [*PACKAGES, "all"])
def test_changes_nothing(runs: list[dict[str, Any]], package: str) -> None:
    report, gymnasium = runs[0]["reports"][package], runs[0]["reports"]["gymnasium"]
    assert report["warnings"] == []
    # gymnasium hides pygame's greeting and adds a filter for its deprecations, regardless of the importer.
    assert set(report["changed"]) <= set(gymnasium["changed"])
    assert set(report["filters"]) <= set(gymnasium["filters"])


@pytest.mark.parametrize("package", [*PACKAGES, "all"])
def test_imports_nothing_heavy(runs: list[dict[str, Any]], package: str) -> None:
    report = runs[0]["reports"][package]
    foreign = {name for name in report["modules"] if name not in sys.stdlib_module_names}
    assert foreign <= LIGHT | {"torch"}  # no matplotlib, tensorboard, rich, tyro, triton, torchrl
    assert report["torch"] == []  # neither the compiler nor torch.utils.tensorboard
    assert report["triton"] == []  # nothing for a GPU


def test_training_imports_little() -> None:
    found = json.loads(subprocess.run([sys.executable, "-c", TRAINING], check=True, capture_output=True).stdout)
    for files, limit in zip(found, FILES, strict=True):
        rooms = Counter(file.partition("/")[0] for file in files).most_common()
        assert len(files) <= limit, f"{len(files)} files of recurl, by room: {rooms}"
        assert [file for file in files if file.startswith(OTHER_RUNS)] == []


def test_the_root_imports_no_package_at_all(runs: list[dict[str, Any]]) -> None:
    assert runs[0]["reports"]["recurl"]["modules"] == ["recurl"]


def test_names_of_the_root_are_imported_when_they_are_used() -> None:
    code = "import sys, recurl; assert set(recurl.__all__) <= set(dir(recurl)); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert recurl.load is recurl.trainers.load
    assert all(getattr(recurl, name).__name__ == name for name in recurl.__all__ if name != "__version__")


def test_the_readmes_first_example_needs_no_other_names_than_those_of_the_root() -> None:
    readme = (SOURCE.parent / "README.md").read_text()
    (code,) = re.findall(r"```python\n(import torch.*?)```", readme, re.DOTALL)
    names = re.findall(r"^from recurl[\w.]* import (.*)$", code, re.MULTILINE)
    assert {name for line in names for name in line.split(", ")} <= set(recurl.__all__)
    with pytest.raises(AttributeError, match="module 'recurl' has no attribute 'lode'"):
        _ = recurl.lode

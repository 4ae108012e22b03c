"""Every example runs at a small scale, is short, and is linked in the README and the documentation."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import gymnasium
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}
ELSEWHERE = {"act", "ppo", "onnx_inference", "mingru", "reinforce"}  # run by test_readme.py, trainers and the recipes
SMALL = {  # duration, and a line of the output
    "action_masks": (1024, r"^--action-mask none: greedy return \d\.\d\d of 1$"),
    "continuous_control": (1600, r"^  1600 steps: mean return of 200 steps -\d+$"),
    "ddp": (1024, r"^1 ranks: value loss \d+\.\d+$"),
    "gpu": (2048, r"^  2048 steps on \w+: \d+ steps per episode$"),
    "optuna_search": (2048, r"^best: -?\d\.\d+ with {'learning_rate'"),
    "own_environment": (1024, r"^greedy return \d+\.\d of 19$"),
    "own_loop": (1, r"^update   0: return \d+\.\d\d$"),
    "own_task": (4096, r"^greedy: \d\.\d\d of the balls are caught on \w+$"),
    "r2d2": (256, r"^   256 steps: \d\.\d\d of 1, loss \d\.\d+$"),
    "workers": (1024, r"^  1024 steps: \d+ steps per episode$"),
}


def test_every_example_is_tried() -> None:
    assert EXAMPLES.keys() == SMALL.keys() | ELSEWHERE


@pytest.fixture
def _as_it_was():
    yield
    for name in ("Echo-v0", "Keys-v0"):
        gymnasium.registry.pop(name, None)


@pytest.mark.usefixtures("_as_it_was")
@pytest.mark.parametrize("name", SMALL)
def test_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    size, printed = SMALL[name]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLES[name]), str(size)])
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES[name]), run_name="__main__")
    said = capsys.readouterr().out
    assert re.search(printed, said, re.MULTILINE), said


@pytest.mark.parametrize("name", EXAMPLES)
def test_is_short_and_named(name: str) -> None:
    assert len(EXAMPLES[name].read_text().splitlines()) < 60
    assert f"examples/{name}.py" in (ROOT / "README.md").read_text()
    assert any(f"examples/{name}.py" in page.read_text() for page in (ROOT / "docs").rglob("*.md"))


def test_the_deployment_is_named() -> None:
    assert "`examples/deploy`" in (ROOT / "README.md").read_text()
    page = (ROOT / "docs" / "guides" / "deployment.md").read_text()
    assert all(file.name in page for file in (ROOT / "examples" / "deploy").iterdir() if file.is_file())
    (command,) = re.findall(r"^ \*     (cc .*)$", (ROOT / "examples/deploy/control_loop.c").read_text(), re.MULTILINE)
    assert f"\n{command}\n" in page

"""The commands of docs/runs.md, one after the other as written there, with fewer steps and seeds."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from recurl.cli import main
from recurl.trainers import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("jobs_are_forks")]

PAGE = (Path(__file__).parents[2] / "docs" / "runs.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
FEWER = ("--total-steps", "2048", "--eval-every", "1024", "--eval-episodes", "2", "--hidden-size", "8")


def small(line: str) -> list[str]:
    """Return a command with fewer steps."""
    words = shlex.split(line, comments=True)[1:]
    if words[0] in ("train", "sweep") and "--resume" not in words:
        words += FEWER
    return ["3072" if word == "250000" else "1" if word == "5" else word for word in words]


@pytest.mark.full
def test_from_a_preset_to_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in BLOCKS:
        lines = block.strip().splitlines()
        assert len(lines) <= 10
        for line in lines:
            assert main(small(line)) == 0, line
    assert RunFolder(Path("runs/tuned")).read_config().init_from == "runs/one"
    assert RunFolder(Path("runs/one")).read_config().total_steps == 3072
    assert list(Path("runs/one/best").glob("*.pt"))
    for picture in ("cells", "two", "training"):
        assert Path(f"{picture}.png").read_bytes().startswith(b"\x89PNG")
        assert len(Path(f"{picture}.csv").read_text().splitlines()) > 2

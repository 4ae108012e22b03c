"""Notices at the start of training if the C++ library is missing."""

from pathlib import Path

import pytest

from recurl.cli import main
from recurl.cli.speed import notify_if_slow
from recurl.recurrence.cpu import CpuKernels
from recurl.trainers.study.sweep import Sweep

SLOW = "Notice: Training on this CPU is several times slower than it could be. The recurrent backend 'cpu' is not inst"
SMALL = "ppo --env recurl/TMaze-v0 --num-envs 4 --rollout-steps 16 --minibatches 2 --hidden-size 8"


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuKernels, "missing", lambda self: "its compiled part was not built. Install a C++ compiler")


def slow_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith(SLOW)]


@pytest.mark.usefixtures("no_library")
def test_training_without_the_library_says_so_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "run")
    words = f"train {SMALL} --total-steps 128 --eval-episodes 1 --logger none --run-dir {folder}"
    assert main(words.split()) == 0
    (line,) = slow_lines(capsys)
    assert line.endswith("Install a C++ compiler.")
    assert main(["train", "--resume", folder, "--total-steps", "256"]) == 0
    assert len(slow_lines(capsys)) == 1


@pytest.mark.usefixtures("no_library")
def test_timing_and_sweeps_say_so_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(f"bench train {SMALL} --warm-up 1 --updates 1".split()) == 0
    assert len(slow_lines(capsys)) == 1
    monkeypatch.setattr(Sweep, "run", lambda self, *_, **__: None)
    assert main(["sweep", *SMALL.split(), "--seeds", "2", "--run-dir", str(tmp_path / "sweep")]) == 0
    assert len(slow_lines(capsys)) == 1


def test_nothing_is_said_with_the_library_or_on_a_gpu(
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    notify_if_slow("cpu")
    request.getfixturevalue("no_library")
    notify_if_slow("cuda:0")
    assert slow_lines(capsys) == []
    notify_if_slow("cpu")
    assert len(slow_lines(capsys)) == 1

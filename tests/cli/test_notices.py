"""Notices: of a missing C++ library, of a compiler that fails; warnings of libraries that aren't shown."""

import csv
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from recurl.cli import main
from recurl.cli.notices import with_notices
from recurl.cli.speed import notify_if_slow
from recurl.core.errors import RecurlWarning
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


@pytest.mark.slow
def test_a_run_whose_compiler_fails_is_a_run_without_compile(tmp_path: Path) -> None:
    """One line for each program, and the same metrics, bit for bit."""
    words = f"train {SMALL} --vectorization device --total-steps 320 --eval-episodes 1 --logger none"
    rows = []
    for option in ("--no-compile", "--compile"):
        done = subprocess.run(
            [sys.executable, "-m", "recurl", *words.split(), option, "--run-dir", tmp_path / option],
            capture_output=True,
            check=True,
            text=True,
            env={**os.environ, "CXX": "/bin/false", "RECURL_CACHE_DIR": str(tmp_path / "cache")},
        )
        with (tmp_path / option / "metrics.csv").open() as file:
            timed = ("wall_s", "cpu_s", "steps_per_s")
            rows.append([{k: v for k, v in row.items() if k not in timed} for row in csv.DictReader(file)])
        lines = [line for line in done.stderr.splitlines() if not line.startswith(SLOW)]
        said = ["the step of policy and environment", "the loss and its gradients"] if option == "--compile" else []
        assert [line.partition(" (Inv")[0] for line in lines] == [f"Notice: The compiler failed on {x}" for x in said]
        assert all(line.endswith("; --no-compile doesn't try.") for line in lines)
    assert len(rows[0]) == 5
    assert rows[0] == rows[1]


def test_libraries_that_speak_about_themselves_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = warnings.formatwarning
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        before = [*warnings.filters]
        with with_notices():
            for text in (
                "The CUDA Graph is empty. This usually means",
                "\nOnline softmax is disabled on the fly since Inductor decides to",
                "Logical operators 'and' and 'or' are deprecated for non-scalar tensors; please use",
                "of a user",
            ):
                warnings.warn(text, stacklevel=1)
            for module in ("tensordict.nn", "own_net"):
                warnings.warn_explicit(f"{module} will change", FutureWarning, "net.py", 3, module=module)
            assert warnings.formatwarning("one\nline", RecurlWarning, "net.py", 3) == "Notice: one line\n"
            monkeypatch.setenv("RANK", "1")
            assert warnings.formatwarning("a line", RecurlWarning, "net.py", 3) == "Notice of rank 1: a line\n"
            line = warnings.formatwarning("of a user", UserWarning, "net.py", 3, line="f()")
            assert line == "net.py:3: UserWarning: of a user\n  f()\n"
        assert [*warnings.filters] == before
    assert [str(warning.message) for warning in shown] == ["of a user", "own_net will change"]
    assert warnings.formatwarning is usual

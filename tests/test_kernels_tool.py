"""GPU kernels can't change without a run of their tests: ``tools/kernels.py`` compares them with a record."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tools import kernels

KERNEL = "src/recurl/recurrence/cuda/portable/forward.py"


class Copy:
    """A folder with copies of the sources, and a pytest that doesn't run."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.record = root, root / kernels.RECORD
        for file in kernels.sources(kernels.ROOT):
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(kernels.ROOT / file, root / file)
        self.commands: list[list[str]] = []
        self.outcome, self.meanwhile = 0, lambda: None
        monkeypatch.setattr(kernels, "subprocess", SimpleNamespace(run=self.test))
        self.set_option = lambda *options: monkeypatch.setattr(sys, "argv", ["kernels.py", *options])

    def test(self, command: list[str], **_: Any) -> SimpleNamespace:
        self.commands.append(command)
        self.meanwhile()
        return SimpleNamespace(returncode=self.outcome)

    def run(self, *options: str) -> tuple[int, bool]:
        """Return the exit status, and whether tests have run."""
        self.set_option(*options)
        self.commands.clear()
        return kernels.main(self.root), bool(self.commands)


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Copy:
    return Copy(tmp_path, monkeypatch)


def test_kernels_are_tested_until_recorded(copy: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    assert copy.run() == (0, True)
    assert "-m kernels tests/recurrence" in " ".join(copy.commands[0])
    assert not copy.record.exists()
    assert copy.run("--record") == (0, True)
    assert json.loads(copy.record.read_text()) == kernels.state(copy.root)
    capsys.readouterr()
    assert copy.run() == (0, False)
    assert capsys.readouterr().out.count("\n") == 1
    assert copy.run("--record") == (0, True)


@pytest.mark.parametrize(
    "file",
    [
        *(KERNEL, "src/recurl/recurrence/cuda/gates.cu", "src/recurl/recurrence/cells/lstm.py"),
        *(f"tests/recurrence/{name}" for name in ("emulated_instructions.cpp", "test_clusters.py", "contract.py")),
    ],
)
def test_a_change_is_tested(copy: Copy, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    copy.run("--record")
    with (copy.root / file).open("a") as stream:
        stream.write("\n")
    assert copy.run() == (0, True)
    assert "changed since their last test: sources\n" in capsys.readouterr().out


def test_a_new_and_a_removed_file_are_changes(copy: Copy) -> None:
    copy.run("--record")
    (copy.root / KERNEL).rename((copy.root / KERNEL).with_name("other.py"))
    assert copy.run() == (0, True)


@pytest.mark.parametrize("package", kernels.PACKAGES)
def test_another_version_is_a_change(
    copy: Copy, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy.run("--record")
    true = kernels.version_of
    monkeypatch.setattr(kernels, "version_of", lambda name: "99.0" if name == package else true(name))
    assert copy.run() == (0, True)
    assert f"changed since their last test: {package}\n" in capsys.readouterr().out


def test_other_files_are_no_change(copy: Copy) -> None:
    copy.run("--record")
    for file in ("recurrence/cpu/step.py", "trainers/run.py", "recurrence/cuda/__pycache__/forward.pyc"):
        path = copy.root / "src" / "recurl" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("changed")
    (copy.root / "tests/recurrence/test_cpu.py").write_text("changed")
    assert copy.run() == (0, False)


def test_failing_kernels_are_not_recorded(copy: Copy) -> None:
    copy.outcome = 1
    assert copy.run("--record") == (1, True)
    assert not copy.record.exists()
    assert copy.run() == (1, True)


def test_kernels_that_change_during_their_tests_are_not_recorded(copy: Copy) -> None:
    copy.meanwhile = lambda: (copy.root / KERNEL).write_text("changed")
    assert copy.run("--record") == (1, True)
    assert not copy.record.exists()


def test_every_kernel_test_is_among_the_sources() -> None:
    marked = re.compile(r"mark\.kernels|core_and_rest|but_first")
    files = {file.relative_to(kernels.ROOT) for file in (kernels.ROOT / "tests").rglob("*.py")}
    users = {file for file in files if marked.search((kernels.ROOT / file).read_text())}
    assert len(users) > 5
    assert users - {Path("tests/test_kernels_tool.py")} <= set(kernels.sources(kernels.ROOT))


def test_make_runs_the_tool() -> None:
    makefile = (kernels.ROOT / "Makefile").read_text()
    targets = dict(re.findall(r"^(\w+): .*\n((?:\t.*\n)+)", makefile, re.MULTILINE))
    assert "tools/kernels.py\n" in targets["check"]
    assert "tools/kernels.py --record\n" in targets["kernels"]
    assert '-m "not kernels and not jax"' in makefile
    assert "$(JAX)" in targets["check"]
    assert "$(JAX)" in targets["test"]
    assert "$(TEST)" in targets["test"]
    assert "$(ALL)" in targets["check"]
    assert "tools/kernels.py" in (kernels.ROOT / ".github/workflows/ci.yml").read_text()

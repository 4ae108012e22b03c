"""``python -m build`` creates a source archive, and from it a wheel that works in a fresh environment."""

from __future__ import annotations

import email
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import recurl

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
BUILT_FROM = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "src")
LIBRARY = "recurl/native/librecurl_native.so"


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command that must succeed, and return its output."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source, since building leaves files behind."""
    folder = tmp_path_factory.mktemp("source")
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
            )
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def archives(source: Path) -> Path:
    """The source archive and the wheel built from it, without compiler optimizations, which take a minute."""
    compiler = source / "compiler"
    compiler.write_text('#!/bin/bash\nexec c++ "${@/#-O3/-O0}"\n')
    compiler.chmod(0o755)
    run(sys.executable, "-m", "build", "--no-isolation", cwd=source, CC=str(compiler), CXX=str(compiler))
    return source / "dist"


@pytest.fixture(scope="module")
def wheel(archives: Path) -> Path:
    (wheel,) = archives.glob("*.whl")
    return wheel


@pytest.mark.full
def test_the_source_archive_holds_all_build_inputs(archives: Path, source: Path) -> None:
    (archive,) = archives.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    own = {str(file.relative_to(source)) for file in (source / "src/recurl").rglob("*") if file.is_file()}
    assert {name for name in own if Path(name).suffix in (".py", ".cpp", ".cu", ".h", ".inc", ".typed")} <= names
    assert {"README.md", "LICENSE", "pyproject.toml", "setup.py"} <= names
    assert not any(name.startswith("tests") or name.endswith(".so") for name in names)


@pytest.mark.full
def test_the_wheel_is_for_every_python_and_holds_the_library(wheel: Path, source: Path) -> None:
    tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name.endswith(f"-py3-none-{tag}.whl")
    with zipfile.ZipFile(wheel) as files:
        names = set(files.namelist())
        (metadata,) = (files.read(name).decode() for name in names if name.endswith("/METADATA"))
    assert {"recurl/py.typed", "recurl/cli/main.py", LIBRARY} <= names
    assert {Path(name).suffix for name in names if name.startswith("recurl/")} == {
        ".py",
        ".toml",
        ".typed",
        ".so",
        ".cu",
    }
    fields = email.message_from_string(metadata)
    assert (fields["Name"], fields["Version"]) == ("recurl", recurl.__version__)
    assert (fields["License-Expression"], fields["License-File"]) == ("MIT", "LICENSE")
    assert fields["Description-Content-Type"] == "text/markdown"
    assert fields["Summary"]
    assert fields.get_payload() == (source / "README.md").read_text()
    assert "torchrl" not in " ".join(word for word in fields.get_all("Requires-Dist", []) if "extra" not in word)


@pytest.fixture(scope="module")
def fresh_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the wheel installed; dependencies are those of this one, whose recurl is hidden."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder)
    python = folder / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=folder,
    )
    (packages,) = folder.glob("lib/python*/site-packages")
    # A path in a .pth file is searched, but .pth files in it, such as that of an editable recurl, are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    return python


@pytest.mark.full
def test_it_is_the_installed_recurl(fresh_python: Path, tmp_path: Path) -> None:
    path = run(fresh_python, "-W", "error", "-c", "import recurl; print(recurl.__file__)", cwd=tmp_path)
    assert Path(path.strip()).is_relative_to(fresh_python.parents[1])
    assert run(fresh_python.with_name("recurl"), "--version", cwd=tmp_path).strip() == recurl.__version__
    if platform.machine() in ("x86_64", "aarch64"):
        assert "cpu         lstm, gru, mingru" in run(fresh_python.with_name("recurl"), "doctor", cwd=tmp_path)


@pytest.mark.full
def test_it_runs_the_landing_pages_example(fresh_python: Path, tmp_path: Path) -> None:
    run(fresh_python, "-W", "ignore::DeprecationWarning", ROOT / "examples" / "ppo.py", cwd=tmp_path)


def test_without_a_compiler_the_wheel_is_for_any_platform(source: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(source, tmp_path / "source", ignore=shutil.ignore_patterns("build", "dist", "*.egg-info"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    run(*command, cwd=copy, CC="false", CXX="false")
    (wheel,) = (copy / "dist").glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as files:
        names = set(files.namelist())
    assert LIBRARY not in names
    own = {str(file.relative_to(source / "src")) for file in (source / "src/recurl").rglob("*") if file.is_file()}
    assert {name for name in own if Path(name).suffix in (".py", ".toml", ".typed", ".cu")} <= names

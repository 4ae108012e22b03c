"""Run the tests of the GPU kernels where the kernels, their tests, torch or Triton differ from the tested ones.

No GPU is needed: the kernels are interpreted, emulated, and compiled. What was last tested is recorded in
tests/recurrence/kernels.json, as a SHA-256 of the sources and the versions of the packages.

    python tools/kernels.py             tests if the record differs (in make check and in CI)
    python tools/kernels.py --record    tests always, and records what passed (make kernels)
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = Path("tests/recurrence/kernels.json")
FOLDERS = ("tests/recurrence", "tests/trainers/optim")
# The kernels with the cells that they compute, and their tests with the reference. Changes elsewhere meet the kernels
# in make test, which interprets or emulates each kind once.
ADAM = ("src/recurl/trainers/optim/triton_adam.py", "src/recurl/trainers/optim/triton_adam_kernels.py")
SOURCES = ("src/recurl/recurrence", *ADAM, "tests/own_cells.py", *FOLDERS)
TESTS = ("test_triton", "test_clusters", "test_isolation", "test_adam")  # isolation is tested of interpreted kernels
UNRELATED = ("src/recurl/recurrence/cpu", "src/recurl/recurrence/experiment.py")
PACKAGES = ("torch", "triton", "nvidia-cuda-nvrtc")
SUFFIXES = (".py", ".cu", ".cpp")


def matters(file: Path) -> bool:
    """Return whether the kernel tests depend on this file in one of the SOURCES."""
    if file.suffix not in SUFFIXES or any(file.is_relative_to(name) for name in UNRELATED):
        return False
    return not file.name.startswith("test_") or file.name.startswith(TESTS)


def sources(root: Path) -> list[Path]:
    """Return the files that the kernel tests depend on, in a fixed order, relative to ``root``."""
    files = [file for name in SOURCES for file in (root / name, *(root / name).rglob("*"))]
    return sorted(filter(matters, (file.relative_to(root) for file in files)), key=Path.as_posix)


def version_of(package: str) -> str:
    """Return the installed version without its local part, such as "+cpu"."""
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def state(root: Path) -> dict[str, str]:
    """Return what the outcome of the tests depends on."""
    digest = hashlib.sha256()
    for file in sources(root):
        content = (root / file).read_bytes()
        digest.update(f"{file.as_posix()}\0{len(content)}\0".encode() + content)
    return {"sources": digest.hexdigest(), **{package: version_of(package) for package in PACKAGES}}


def main(root: Path = ROOT) -> int:
    """Return 0 if the kernels are those of the record or pass their tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="test in any case, and record the state if tests pass")
    wanted = parser.parse_args().record
    found, record = state(root), root / RECORD
    known = json.loads(record.read_text()) if record.exists() else {}
    if found == known and not wanted:
        print(f"GPU kernels are unchanged since their last test, recorded in {RECORD}")
        return 0
    changed = ", ".join(name for name in found if found[name] != known.get(name)) or "nothing"
    print(f"GPU kernels are tested; changed since their last test: {changed}", flush=True)
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist=load", "-m", "kernels", *FOLDERS]
    done = subprocess.run(command, cwd=root, check=False)
    if done.returncode:
        return 1
    if not wanted:
        print("The kernels pass: commit the record that make kernels writes")
    elif found == state(root):
        record.write_text(json.dumps(found, indent=2) + "\n")
        print(f"Recorded in {RECORD}")
    else:
        print("Sources have changed during the tests, which are not recorded: run them again")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

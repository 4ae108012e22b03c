"""Build the C++ library for ARM (aarch64, NEON through the portable kernels) and test it under QEMU.

The calls that the tests make of the portable kernels of this machine are recorded, with the memory before and after
each: layers, linear recurrences, steps, programs, losses and Adam. tests/native/replay.cpp repeats them with the ARM
library and compares what they write. Needs a cross-compiler and QEMU's user mode; writes only into build/arm.

    python tools/arm.py                              the calls of TESTS
    python tools/arm.py tests/native/test_program.py those of other tests
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "arm"
SOURCES = ROOT / "src" / "recurl" / "native" / "src"
PROGRAMS = {
    "aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu",
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "qemu-aarch64": "qemu-user",
}
"""Needed programs, with Debian's packages."""
SYSTEM = Path("/usr/aarch64-linux-gnu")
TESTS = (
    "tests/native/test_program.py",
    "tests/recurrence/test_cpu.py",
    "tests/recurrence/test_cpu_step.py",
    "tests/recurrence/linear/test_cpu.py",
    "tests/execution/compiled/test_network.py",
    "tests/execution/compiled/test_passes.py",
    "tests/objectives/test_compiled_ppo.py",
    "tests/trainers/optim/test_adam_forms.py",
)
# Tests that compare bits have layers whose random weights amplify float32 roundings of their inputs to 1e-4. Those of
# Triton and of exhausted memory don't call the library.
OMITTED = "not bits and not triton and not out_of_memory"


def run(*command: str | Path, **environment: str) -> None:
    """Run a command that must succeed."""
    done = subprocess.run(list(map(str, command)), cwd=ROOT, env=os.environ | environment, check=False)
    if done.returncode:
        sys.exit(f"{Path(command[0]).name} failed")


def main() -> None:
    """Build, record and replay."""
    missing = [package for name, package in PROGRAMS.items() if shutil.which(name) is None]
    if missing:
        sys.exit(f"Install the cross-compiler and QEMU: apt-get install {' '.join(missing)}")
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    calls, replay, cross = FOLDER / "calls", FOLDER / "replay", "aarch64-linux-gnu-g++"
    build = ("build_ext", "--plat-name", "linux-aarch64", "--build-lib", FOLDER, "--build-temp", FOLDER / "objects")
    run(sys.executable, "setup.py", "-q", *build, CC="aarch64-linux-gnu-gcc", CXX=cross)
    (library,) = FOLDER.rglob("librecurl_native.so")
    link = (library, f"-Wl,-rpath,{library.parent}", "-o", replay)
    run(cross, "-std=c++17", "-O1", "-Wall", f"-I{SOURCES}", ROOT / "tests" / "native" / "replay.cpp", *link)
    pytest = ("-m", "pytest", "-n0", "-p", "tests.native.recorder", "-m", "not kernels and not slow", "-k", OMITTED)
    run(sys.executable, *pytest, *(sys.argv[1:] or TESTS), RECURL_RECORD=str(calls))
    run("qemu-aarch64", "-L", SYSTEM, replay, calls)


if __name__ == "__main__":
    main()

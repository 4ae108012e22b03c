"""Build and test the files of a release in dist/: a source archive, a wheel for Linux and a wheel for any system.

The wheel for Linux contains the compiled library of the cpu backend; auditwheel gives it the oldest compatible
manylinux tag. Each wheel is installed with its dependencies, none of them compiled, into a fresh environment.

    python tools/wheels.py [--no-try]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
NO_COMPILER = {"CC": "false", "CXX": "false"}
RUN = "train ppo --env recurl/MaskedCartPole-v1 --total-steps 1024 --overwrite --run-dir"


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """Run a command that must succeed, and return its output on stdout."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    return subprocess.run(
        list(map(str, command)), cwd=cwd, env=clean, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def tool(name: str) -> Path:
    """Return the path of a program installed next to this interpreter."""
    return Path(sys.executable).with_name(name)


def build(folder: Path, **environment: str) -> tuple[Path, Path]:
    """Build a source archive, and from it a wheel."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, **environment)
    return next(folder.glob("*.tar.gz")), next(folder.glob("*.whl"))


def make(dist: Path) -> list[Path]:
    """Build the archives, and return the wheels."""
    with tempfile.TemporaryDirectory() as name:
        temporary = Path(name)
        source, pure = build(temporary / "pure", **NO_COMPILER)
        assert pure.name.endswith("-py3-none-any.whl"), pure
        for file in (source, pure):
            shutil.copy(file, dist)
        _, compiled = build(temporary / "compiled")
        assert "-linux_" in compiled.name, f"{compiled.name}: no C++ compiler?"
        path = f"{tool('patchelf').parent}{os.pathsep}{os.environ['PATH']}"
        run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", dist, compiled, PATH=path)
    wheels = sorted(dist.glob("*.whl"))
    assert [wheel.name.split("-")[4].split("_")[0] for wheel in wheels] == ["any.whl", "manylinux"], wheels
    run(tool("twine"), "check", "--strict", *dist.iterdir())
    return wheels


def try_out(wheel: Path, folder: Path) -> None:
    """Install a wheel and its dependencies without compiling; train, evaluate and run an example."""
    venv.create(folder, with_pip=True, clear=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run(*pip, "--only-binary", ":all:", "-c", ROOT / "constraints.txt", f"{wheel}[train]", **NO_COMPILER)
    recurl, has_library = folder / "bin" / "recurl", "manylinux" in wheel.name
    lines = run(recurl, "doctor", cwd=folder).splitlines()
    (cpu,) = [line.split(maxsplit=1)[1] for line in lines if line.startswith("  cpu ")]
    assert cpu == "yes" if has_library else "librecurl_cpu.so was not built" in cpu, cpu
    run(recurl, *RUN.split(), "run", cwd=folder)
    run(recurl, "evaluate", "run", "--episodes", "2", cwd=folder)
    run(folder / "bin" / "python", ROOT / "examples" / "ppo.py", cwd=folder)
    if not has_library:
        refused = subprocess.run(
            [recurl, *RUN.split(), "refused", "--backend", "cpu"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert refused.returncode == 2, refused
        assert "was not built" in refused.stderr, refused.stderr
    print(f"{wheel.name}: installed, trained, evaluated; backend cpu: {cpu}")


def main() -> None:
    """Build the archives and, by default, test the wheels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-try", action="store_true", help="only build and check the archives")
    arguments = parser.parse_args()
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir()
    wheels = make(dist)
    for number, wheel in enumerate([] if arguments.no_try else wheels):
        try_out(wheel, ROOT / "build" / f"fresh-{number}")
    print("\n".join(sorted(file.name for file in dist.iterdir())))


if __name__ == "__main__":
    main()

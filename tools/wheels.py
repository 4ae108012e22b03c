"""Build and test the files of a release in dist/: a source archive, a wheel for Linux and a wheel for any system.

The wheel for Linux contains the compiled library of the cpu backend; auditwheel gives it the oldest compatible
manylinux tag. With every Python of --python, the source archive is built with and without a compiler, and each wheel is
installed with its dependencies, none of them compiled, into a fresh environment, where it trains, evaluates and runs an
example. What this machine can't try is listed at the end; --strict makes that an error. CUDA's libraries (several GB)
are downloaded only with --cuda.

    python tools/wheels.py [--no-try] [--python 3.11 3.13] [--cuda] [--strict]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from matrix import SkippedError, check_torch, find_python

ROOT = Path(__file__).parents[1]
NO_COMPILER = {"CC": "false", "CXX": "false"}
PYTHONS = ("3.11", "3.13")
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


def make(dist: Path) -> None:
    """Build the archives into ``dist``."""
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


def try_build(archive: Path, python: Path, folder: Path) -> str:
    """Build wheels from the source archive with and without a compiler; return what was done."""
    for name, compilers in (("compiler", {}), ("no-compiler", NO_COMPILER)):
        shutil.rmtree(folder / name, ignore_errors=True)
        run(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder / name, archive, **compilers)
        (wheel,) = (folder / name).glob("*.whl")
        assert wheel.name.endswith("-py3-none-any.whl") == bool(compilers), wheel
    return "the source archive was built with and without a compiler"


def try_out(wheel: Path, python: Path, folder: Path) -> str:
    """Install a wheel and its dependencies without compiling; train, evaluate and run an example."""
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run(*pip, "--only-binary", ":all:", "-c", ROOT / "constraints.txt", f"{wheel}[train]", **NO_COMPILER)
    recurl, has_library = python.with_name("recurl"), "manylinux" in wheel.name
    lines = run(recurl, "doctor", cwd=folder).splitlines()
    (cpu,) = [line.split(maxsplit=1)[1] for line in lines if line.startswith("  cpu ")]
    assert cpu == "yes" if has_library else "librecurl_native.so was not built" in cpu, cpu
    run(recurl, *RUN.split(), "run", cwd=folder)
    run(recurl, "evaluate", "run", "--episodes", "2", cwd=folder)
    run(python, ROOT / "examples" / "ppo.py", cwd=folder)
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
    return f"{wheel.name} was installed, trained and evaluated; backend cpu: {cpu}"


def environment(version: str, name: str) -> Path:
    """Create an environment of a Python version; return its interpreter."""
    folder = ROOT / "build" / f"fresh-{version}-{name}"
    run(find_python(version), "-m", "venv", "--clear", folder)
    return folder / "bin" / "python"


def try_python(version: str, dist: Path, *, cuda: bool) -> tuple[list[str], str | None]:
    """Try the archives with a Python version; return what was done, and what this machine lacks for the rest."""
    done: list[str] = []
    try:
        python = environment(version, "source")
        done.append(try_build(next(dist.glob("*.tar.gz")), python, python.parents[1]))
        if not cuda:
            check_torch([python, "-m", "pip", "install", "--quiet"], ROOT / "constraints.txt")
        for number, wheel in enumerate(sorted(dist.glob("*.whl"))):
            python = environment(version, f"wheel-{number}")
            done.append(try_out(wheel, python, python.parents[1]))
    except SkippedError as error:
        return done, str(error)
    return done, None


def main() -> int:
    """Build the archives and, by default, try them; return 1 if something could not be tried, with --strict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-try", action="store_true", help="only build and check the archives")
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="VERSION", help="try these (3.11 and 3.13)")
    parser.add_argument("--cuda", action="store_true", help="allow downloads of torch with CUDA's libraries")
    parser.add_argument("--strict", action="store_true", help="fail if something could not be tried")
    arguments = parser.parse_args()
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir()
    make(dist)
    print(*sorted(file.name for file in dist.iterdir()), sep="\n", flush=True)
    skipped = False
    for version in () if arguments.no_try else arguments.python:
        done, lacks = try_python(version, dist, cuda=arguments.cuda)
        print(*(f"Python {version}: {line}" for line in done), sep="\n", flush=True)
        if lacks is not None:
            skipped = True
            print(f"Python {version}: SKIPPED the rest: {lacks}" if done else f"Python {version}: SKIPPED: {lacks}")
    return int(skipped and arguments.strict)


if __name__ == "__main__":
    sys.exit(main())

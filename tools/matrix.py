"""Run the core tests with every supported Python, tensordict and set of dependencies.

Each combination has its own environment in build/matrix. Combinations that can't be tested on this machine are skipped
and listed at the end; --strict makes that an error. CUDA's libraries (several GB) are downloaded only with --cuda.

    python tools/matrix.py [--only NAME ...] [--cuda] [--strict] -- PYTEST OPTIONS
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "matrix"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TESTERS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "pyyaml")
NEED_EXTRAS = {"cli", "docs", "interop", "learning", "trainers"}  # test folders
CLEAN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


class SkippedError(Exception):
    """The combination can't be tested on this machine."""


@dataclass(frozen=True)
class Combination:
    """One environment: Python version, pins that override constraints.txt, extras of recurl, and excluded tests."""

    name: str
    python: str
    pins: tuple[str, ...] = ()
    extras: str = "train,wandb,triton,export"
    without: str = ""  # marker of the tests that can't pass


def combinations() -> list[Combination]:
    """Return the declared combinations: each Python, each tensordict, and an installation without extras."""
    low, high = map(int, re.findall(r"3\.(\d+)", PROJECT["requires-python"]))
    pythons = [f"3.{minor}" for minor in range(low, high)]
    (range_,) = (text for text in PROJECT["dependencies"] if text.startswith("tensordict"))
    first, end = map(int, re.findall(r"0\.(\d+)", range_))
    return [
        *(Combination(f"python {python}", python) for python in pythons),
        *(
            Combination(
                f"tensordict 0.{n}", pythons[0], (f"tensordict==0.{n}.*",), without="tensordict_0_15" if n < 15 else ""
            )
            for n in range(first, end)
        ),
        Combination("no extras", pythons[0], extras=""),
    ]


def find_python(version: str) -> str:
    """Return an interpreter of this version, from the path or from pyenv."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [shutil.which(f"python{version}"), *sorted(root.glob(f"versions/{version}.*/bin/python"))]
    for candidate in filter(None, candidates):
        command = [str(candidate), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip() == version:
            return str(candidate)
    raise SkippedError(f"there is no Python {version} on this machine")


def run(*command: str | Path, quiet: bool = True) -> str:
    """Run a command; raise RuntimeError, which ends the combination, if it fails."""
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, env=CLEAN, stdout=subprocess.PIPE if quiet else None, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stdout or ''}")
    return done.stdout or ""


def constraints(pins: tuple[str, ...], file: Path) -> Path:
    """Write constraints.txt with ``pins`` overriding its own."""
    replaced = {pin.split("==")[0] for pin in pins}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    file.write_text("\n".join([*(line for line in lines if line.split("==")[0] not in replaced), *pins, ""]))
    return file


def check_torch(pip: list[str | Path], pinned: Path) -> None:
    """Skip the combination if torch depends on CUDA's libraries."""
    done = subprocess.run(
        [*map(str, pip), "--dry-run", "--no-deps", "--report", "-", "torch", "-c", str(pinned)],
        env=CLEAN, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SkippedError("no torch is available for it")
    needs = " ".join(json.loads(done.stdout)["install"][0]["metadata"].get("requires_dist", []))
    if re.search(r"\b(nvidia|cuda)-", needs) and sys.platform == "linux":
        raise SkippedError("its torch needs several GB of CUDA's libraries: pass --cuda to download them")


def install(wanted: Combination, cuda: bool) -> Path:
    """Create the environment, or reuse an up-to-date one; return its interpreter."""
    folder = FOLDER / wanted.name.replace(" ", "-")
    python, done = folder / "bin" / "python", folder / "installed"
    interpreter = find_python(wanted.python)
    pinned = f"{interpreter}\n{wanted}\n{(ROOT / 'constraints.txt').read_text()}{(ROOT / 'pyproject.toml').read_text()}"
    if done.exists() and done.read_text() == pinned:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    run(interpreter, "-m", "venv", folder)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    file = constraints(wanted.pins, folder / "constraints.txt")
    if not cuda:
        check_torch([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"], file)
    run(*pip, "torch", "setuptools", "-c", file)
    if wanted.extras:
        run(*pip, "--no-deps", "torchrl", "-c", file)  # pins tensordict 0.14, but also works with 0.15
    run(*pip, "--no-build-isolation", "-e", f".[{wanted.extras}]" if wanted.extras else ".", *TESTERS, "-c", file)
    done.write_text(pinned)
    return python


def tests_of(wanted: Combination) -> list[Path]:
    """Return the tests to run: all, or those that need no extras."""
    tests = ROOT / "tests"
    if wanted.extras:
        return [tests]
    files = (file for file in tests.rglob("test_*.py") if NEED_EXTRAS.isdisjoint(file.relative_to(tests).parts))
    return sorted(files)


def selection(wanted: Combination, options: list[str]) -> list[str]:
    """Return the pytest options, excluding the tests that can't pass."""
    if not wanted.without:
        return options
    at = options.index("-m") + 1 if "-m" in options else None
    if at is None:
        return [*options, "-m", f"not {wanted.without}"]
    return [*options[:at], f"({options[at]}) and not {wanted.without}", *options[at + 1 :]]


def try_out(wanted: Combination, cuda: bool, options: list[str]) -> str:
    """Run the core tests; return the versions they ran with, and the excluded tests."""
    python = install(wanted, cuda)
    code = (
        "import torch, tensordict, platform as p; print(p.python_version(), torch.__version__, tensordict.__version__)"
    )
    versions = "Python {}, torch {}, tensordict {}".format(*run(python, "-W", "ignore", "-c", code).split())
    print(f"\n== {wanted.name}: {versions}", flush=True)
    run(python, "-m", "pytest", *selection(wanted, options), *tests_of(wanted), quiet=False)
    return f"{versions}; without tests marked {wanted.without}" if wanted.without else versions


def main() -> int:
    """Test every combination; return 1 if one failed, or was skipped with --strict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these combinations, such as 'no extras'")
    parser.add_argument("--cuda", action="store_true", help="allow downloads of torch with CUDA's libraries")
    parser.add_argument("--strict", action="store_true", help="fail if a combination was skipped")
    parser.add_argument("options", nargs="*", help="pytest options")
    arguments = parser.parse_args()
    results: dict[str, list[str]] = {"passed": [], "SKIPPED": [], "FAILED": []}
    for wanted in combinations():
        if arguments.only and wanted.name not in arguments.only:
            continue
        try:
            results["passed"].append(f"{wanted.name} ({try_out(wanted, arguments.cuda, arguments.options)})")
        except SkippedError as error:
            results["SKIPPED"].append(f"{wanted.name}: {error}")
        except RuntimeError as error:
            print(error, file=sys.stderr)
            results["FAILED"].append(wanted.name)
    print()
    for outcome, names in results.items():
        print(*(f"{outcome}  {name}" for name in names), sep="\n", end="\n" if names else "")
    return int(bool(results["FAILED"] or (arguments.strict and results["SKIPPED"])))


if __name__ == "__main__":
    sys.exit(main())

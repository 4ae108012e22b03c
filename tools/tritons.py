"""Compile the GPU kernels with several versions of Triton, without a GPU.

Each Triton is installed in a separate folder in build/tritons, on top of the development environment. Register spills
are printed but are not errors: the table of tile sizes was tuned for the first of these versions.

    python tools/tritons.py [--only VERSION ...]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "tritons"
TRITONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")  # of torch 2.11, of 2.12 and 2.13, of 2.14, and the newest
LISTS = """
from tests.recurrence import test_triton
from tests.recurrence.attention import test_triton as attention
from tests.recurrence.linear import test_triton as linear
from tests.recurrence.matrix import test_triton as matrix
for capability, (cases, _) in test_triton.COMPILED.items():
    print("tests.recurrence.triton_offline", capability, *cases)
print("tests.recurrence.attention.triton_offline 90", *attention.COMPILED)
print("tests.recurrence.linear.triton_offline 90", *linear.COMPILED)
print("tests.recurrence.matrix.triton_offline 90", *matrix.COMPILED)
print("tests.trainers.optim.adam_offline 90")
print("tests.envs.tasks.popgym.mazes_offline 90")
"""


def environment(version: str) -> dict[str, str]:
    """Install this version if needed, and return an environment in which ``import triton`` finds it."""
    folder = FOLDER / version
    if not (folder / "triton").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", str(folder), f"triton=={version}"], check=True)
    cache = str(FOLDER / f"cache-{version}")
    return {**os.environ, "PYTHONPATH": str(folder), "TRITON_CACHE_DIR": cache, "TRITON_INTERPRET": "0"}


def compiles(version: str) -> bool:
    """Compile all kernels, and return whether that succeeds; a failing kernel ends its list."""
    variables = environment(version)
    lists = subprocess.run(
        [sys.executable, "-c", LISTS], cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    failed = lists.returncode != 0
    print(f"== Triton {version}", lists.stderr[-2000:] if failed else "", flush=True)
    for line in lists.stdout.splitlines():
        done = subprocess.run([sys.executable, "-m", *line.split()], cwd=ROOT, env=variables, check=False)
        failed |= done.returncode != 0
    return not failed


def main() -> int:
    """Compile with every version; return 1 if a kernel doesn't compile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=TRITONS, metavar="VERSION", help="only these versions")
    results = {version: compiles(version) for version in parser.parse_args().only}
    print(*(f"{'passed' if good else 'FAILED'}  Triton {version}" for version, good in results.items()), sep="\n")
    return int(not all(results.values()))


if __name__ == "__main__":
    sys.exit(main())

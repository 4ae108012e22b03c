"""Apply the faults of seeded_faults.toml, one at a time, and check that the tests catch each of them.

Faults are applied to a copy of the package in a temporary folder, where the tests named with the fault run until the
first failure. At the end, the tests that failed are run once without a fault, and must pass. Writes
benchmarks/results/seeded_faults.csv, with one row per fault; exits with 1 if a fault isn't caught. Usage::

    python tools/seeded_faults.py                        # all faults
    python tools/seeded_faults.py --quick --resume       # tests of `make quick`, without the faults that have a row
    python tools/seeded_faults.py --only core dropped-reset
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib
import io
import json
import os
import platform
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from importlib.metadata import entry_points, version
from pathlib import Path

ROOT = Path(__file__).parents[1]
FAULTS = Path(__file__).with_suffix(".toml")
RESULTS = ROOT / "benchmarks" / "results" / "seeded_faults.csv"
LIBRARY = Path("src/recurl/native/librecurl_native.so")
NOT_CAUGHT = ""
HUNG = 124
_COPIED = ("benchmarks", "docs", "examples", "src", "tests", "tools")
_SECONDS = 600  # limit for the tests of a fault; one that makes them hang is caught by the limit
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """A fault: see the head of seeded_faults.toml."""

    name: str
    room: str
    file: str
    old: str
    new: str
    wrong: str
    tests: tuple[str, ...]
    build: bool = False

    def apply(self, root: Path) -> None:
        """Apply the fault to a copy of the repository."""
        path = root / "src" / "recurl" / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise SystemExit(
                f"{self.name}: the old text must occur once in {self.file}, not {text.count(self.old)} times."
            )
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


@dataclass
class Row:
    """Row of the table."""

    fault: str
    room: str
    file: str
    tests: str
    caught_by: str
    seconds: str
    date: str
    commit: str
    python: str
    torch: str
    tensordict: str
    processor: str


def read_faults(path: Path = FAULTS) -> list[Fault]:
    """Read the faults of a file."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["fault"]
    return [Fault(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def read_rows(path: Path) -> dict[str, Row]:
    """Read a table, by fault; empty if there is none."""
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {row["fault"]: Row(**row) for row in csv.DictReader(file)}


def write_rows(path: Path, rows: Mapping[str, Row], faults: Sequence[Fault]) -> None:
    """Write the rows of the faults in their order; rows of other faults are dropped."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [field.name for field in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(vars(rows[fault.name]) for fault in faults if fault.name in rows)
    path.write_text(text.getvalue(), encoding="utf-8")


def commit() -> str:
    """Return the commit of the repository, with "-dirty" if files other than the table have uncommitted changes."""
    others = [".", f":(exclude){RESULTS.relative_to(ROOT)}"]
    asked = (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--", *others])
    name, changes = (
        subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        for words in asked
    )
    return f"{name}-dirty" if changes else name


def serve() -> None:
    """Fork a process for each request on standard input, which runs pytest; a line of output is its exit code.

    The first line names the modules to import before. They are those of other packages, whose import takes most of the
    time of a short test.
    """
    sys.path[0] = os.getcwd()
    for name in json.loads(sys.stdin.readline()):
        with contextlib.suppress(Exception):  # some modules can't be imported by themselves
            importlib.import_module(name)
    import pytest  # noqa: PLC0415 - after the modules that it may have to rewrite

    for line in sys.stdin:
        output, limit, arguments = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setsid()
            for descriptor, path, flags in ((0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY)):
                os.dup2(os.open(path, flags), descriptor)
            os.dup2(1, 2)
            sys.exit(pytest.main(arguments))
        end = time.monotonic() + limit
        while not (found := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
            time.sleep(0.02)
        if not found[0]:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(found[1]) if found[0] else HUNG, flush=True)


def other_modules() -> list[str]:
    """Return the modules of other packages that the tests import first, without pytest's plugins."""
    program = "import sys; sys.path[:0] = ['.', 'src', 'benchmarks']; import conftest; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    plugins = {plugin.module.partition(".")[0] for plugin in entry_points(group="pytest11")}
    own = {"__main__", "conftest", "recurl", "tests", *plugins} - {"_pytest"}
    return [name for name in done.stdout.split() if name.partition(".")[0] not in own]


def tests_left(quick: bool) -> str:
    """Return the expression of markers that selects the tests of `make test`, or with ``quick`` of `make quick`."""
    left_out = ("kernels", "full", *(("slow", "learning") if quick else ()))
    return " and ".join(f"not {name}" for name in left_out)


class Copy:
    """Copy of the repository in which faults are applied, and a process that runs its tests."""

    def __init__(self, folder: Path, modules: Sequence[str]) -> None:
        self.folder = folder / "copy"
        ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
        for name in _COPIED:
            shutil.copytree(ROOT / name, self.folder / name, ignore=ignored)
        for path in ROOT.iterdir():
            if path.is_file():
                shutil.copy2(path, self.folder / path.name)
        self._output = folder / "output"
        self._time = time.time()
        self._server = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(self.folder / "src"), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._say(modules)

    def _say(self, value: object) -> None:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(value) + "\n")
        self._server.stdin.flush()

    def run(self, tests: Sequence[str], markers: str, *options: str) -> tuple[int, str, float]:
        """Run tests, and return pytest's exit code (HUNG if they take too long), its output and the seconds."""
        assert self._server.stdout is not None
        words = ["-q", "-n0", "-rfE", "--tb=short", "-p", "no:cacheprovider", "-m", markers, *options, *tests]
        self._output.write_bytes(b"")
        start = time.perf_counter()
        self._say([str(self._output), _SECONDS, words])
        code = int(self._server.stdout.readline())
        return code, self._output.read_text(encoding="utf-8", errors="replace"), time.perf_counter() - start

    def close(self) -> None:
        """End the process."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()

    def catch(self, fault: Fault, markers: str) -> tuple[str, str, float]:
        """Return the first test that fails with the fault (or NOT_CAUGHT), the output and the seconds."""
        path = self.folder / "src" / "recurl" / fault.file
        shutil.copy2(path, path.with_name(path.name + ".orig"))
        try:
            fault.apply(self.folder)
            self._time += 2  # bytecode is compiled again if the time of a file in seconds has changed
            os.utime(path, (self._time, self._time))
            if fault.build:
                self._build()
            code, output, seconds = self.run(fault.tests, markers, "-x")
        finally:
            os.replace(path.with_name(path.name + ".orig"), path)
            if fault.build:
                shutil.copy2(ROOT / LIBRARY, self.folder / LIBRARY)
        found = _FAILED.findall(output)
        if code == HUNG:
            return f"a limit of {_SECONDS} s", output, seconds
        return (found[0] if code == 1 and found and "::" in found[0] else NOT_CAUGHT), output, seconds

    def _build(self) -> None:
        words = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        built = subprocess.run(words, cwd=self.folder, capture_output=True, text=True, check=False)
        if built.returncode or not (self.folder / LIBRARY).exists():
            raise SystemExit(f"The C++ library can't be built:\n{built.stderr[-2000:]}")


def run_all(faults: Sequence[Fault], quick: bool, jobs: int, done: dict[str, Row], every: Sequence[Fault]) -> list[str]:
    """Run the faults, add their rows to ``done`` and to the table; return the names of those that weren't caught."""
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "tensordict": version("tensordict"),
        "processor": platform.machine(),
    }
    suite, markers = ("quick" if quick else "test"), tests_left(quick)
    missed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="recurl-faults-") as name:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        modules = other_modules()
        for job in range(jobs):
            copies.put(Copy(Path(name) / str(job), modules))

        def run(fault: Fault) -> tuple[Fault, str, str, float]:
            copy = copies.get()
            try:
                return fault, *copy.catch(fault, markers)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(jobs) as pool:
            for fault, caught_by, output, seconds in pool.map(run, faults):
                row = Row(fault.name, fault.room, fault.file, suite, caught_by, f"{seconds:.1f}", **about)
                done[fault.name] = row
                write_rows(RESULTS, done, every)
                print(f"{fault.room:<14}{fault.name:<32}{seconds:6.1f} s  {caught_by or 'NOT CAUGHT'}", flush=True)
                if caught_by == NOT_CAUGHT:
                    missed.append(fault.name)
                    print("".join(f"    {line}\n" for line in output.splitlines()[-8:]), end="", flush=True)
        caught = {fault.name: done[fault.name].caught_by for fault in faults}
        tests = sorted({test for test in caught.values() if "::" in test})
        copies.put(copy := copies.get())
        code, output, _ = copy.run(tests, markers) if tests else (0, "", 0.0)
        if code:
            print(output[-4000:])
            failing = set(_FAILED.findall(output))
            also = [fault for fault, test in caught.items() if test in failing or not failing]
            print(f"Tests that fail without a fault, too: {', '.join(sorted(failing)) or f'exit code {code}'}")
            for fault in also:
                done[fault].caught_by = NOT_CAUGHT
            write_rows(RESULTS, done, every)
            missed += also
        for _ in range(jobs):
            copies.get().close()
    return missed


def main() -> int:
    """Run the faults; return 1 if one isn't caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these faults, or those of these rooms")
    parser.add_argument("--quick", action="store_true", help="leave out slow tests and those in which agents learn")
    parser.add_argument("--resume", action="store_true", help="leave out faults that have a row for this commit")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="number of faults to try at the same time")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
        return 0
    every = read_faults()
    known = {name for fault in every for name in (fault.name, fault.room)}
    unknown = sorted(set(args.only or ()) - known)
    if unknown:
        parser.error(f"There is no fault or room {', '.join(unknown)}.")
    chosen = [fault for fault in every if not args.only or not {fault.name, fault.room}.isdisjoint(args.only)]
    done, now = read_rows(RESULTS), commit()
    if args.resume:
        chosen = [f for f in chosen if f.name not in done or done[f.name].commit != now or not done[f.name].caught_by]
    missed = run_all(chosen, args.quick, args.jobs, done, every)
    print(
        f"{len(chosen) - len(missed)} of {len(chosen)} faults caught.",
        f"Not caught: {', '.join(missed)}" if missed else "",
    )
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())

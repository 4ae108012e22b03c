"""Sweep folder and the processes that train its runs."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recurl.core.errors import ArgumentError, LockedError
from recurl.core.untrusted import check_folder, open_regular_descriptor, read_bytes, read_json
from recurl.trainers.algorithms.options_file import write_options_file
from recurl.trainers.files.durable import is_partial, make_folder, write_atomic, writing
from recurl.trainers.files.lock import LOCK_FILES, FolderLock
from recurl.trainers.report.metrics import EVALUATION, RETURN, read_metrics
from recurl.trainers.run.folder import RunFolder
from recurl.trainers.study.grid import Job

FINISHED = 64
"""Exit code of a finished run. Not 0, which an environment that exits the process may produce."""
_POLL_SECONDS = 0.1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))
_STOPPED = (*(-number for number in _SIGNALS), *(128 + number for number in _SIGNALS))  # before and during training
_OPTIONS = "sweep.json"
_MAX_BYTES = 2**26  # size of results.csv
_COLUMNS = ("job", "status", "env_steps", "wall_s", RETURN, EVALUATION)


def options_of_sweep(folder: Path) -> dict[str, Any]:
    """Return the options of the sweep in a folder; empty if there is none that can be read."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return dict(read_json(folder / _OPTIONS)["options"])
    return {}


class Sweep:
    """Sweep whose runs are trained in separate folders by several processes at once.

    Starting the same sweep in the same folder again continues it: finished runs are kept, others are resumed or
    restarted, and seeds may be added. If this process dies, its runs write a checkpoint and stop by themselves. The
    sweep waits for runs that another process is still training.

    Args:
        folder: parent folder of the run folders.
        jobs: the runs; see :func:`~recurl.trainers.study.grid.make_jobs`.
        notify: called with notices.
    """

    def __init__(self, folder: Path, jobs: Sequence[Job], notify: Callable[[str], None]) -> None:
        self.folder = folder
        self._jobs = list(jobs)
        self._lock = FolderLock(folder, notify)
        self._status: dict[str, str] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._announced: set[str] = set()

    @property
    def failed(self) -> list[str]:
        """Names of the runs that failed."""
        return [name for name, status in self._status.items() if status == "failed"]

    @contextmanager
    def hold(self) -> Generator[None]:
        """Create the folder, or check that it contains this sweep, and lock it for the duration of the block.

        Raises:
            ArgumentError: the folder contains another sweep or other files.
            LockedError: another process holds the lock.
            StorageError: the folder can't be written to.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise ArgumentError(f"{self.folder} is not a folder: name another with --run-dir.")
        make_folder(self.folder)
        with self._lock.hold():
            self._check_or_write()
            self._check_folders()
            self._status = {job.name: "waiting" for job in self._jobs}
            for row in self._read_results():
                if row["status"] == "finished" and (self.folder / row["job"] / "config.json").exists():
                    self._status[row["job"]] = "finished"
            yield

    def _check_folders(self) -> None:
        """Raise if a run folder is a symbolic link or not a folder."""
        for job in self._jobs:
            try:
                check_folder(self.folder / job.name)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise ArgumentError(
                    f"{self.folder / job.name} can't be used ({error.strerror}): the runs of a sweep must be folders "
                    "in it; move the run there, or remove this entry."
                ) from error

    def _check_or_write(self) -> None:
        first = self._jobs[0]
        options = {name: value for name, value in first.config.to_dict().items() if name not in first.settings}
        values = {name: list(dict.fromkeys(job.settings[name] for job in self._jobs)) for name in first.settings}
        wanted = {"options": options, "set": values}
        path = self.folder / _OPTIONS
        if path.exists():
            try:
                found = read_json(path)
            except OSError as error:
                raise ArgumentError(f"{path} can't be read ({error.strerror}): name another folder.") from error
            except ValueError as error:
                raise ArgumentError(f"{path} is not JSON: {error}. Name another folder with --run-dir.") from error
            if found != json.loads(json.dumps(wanted)):
                raise ArgumentError(
                    f"{self.folder} holds another sweep ({_difference(found, wanted)}): continue that sweep, or name "
                    "another folder with --run-dir."
                )
        elif any(file.name not in LOCK_FILES and not is_partial(file) for file in self.folder.iterdir()):
            raise ArgumentError(f"{self.folder} is not empty and holds no sweep: name another folder with --run-dir.")
        else:
            write_atomic(path, json.dumps(wanted, indent=2).encode() + b"\n")

    def run(self, processes: int, *, report: Callable[[str], None], should_stop: Callable[[], bool]) -> None:
        """Train all unfinished runs.

        Args:
            processes: maximum number of concurrent processes.
            report: called with progress messages.
            should_stop: if it returns True, all runs are stopped with a checkpoint, and the method returns.
        """
        waiting = [job for job in self._jobs if self._status[job.name] != "finished"]
        report(f"{len(self._jobs)} runs, {len(self._jobs) - len(waiting)} already finished, in {self.folder}")
        by_name, stopping = {job.name: job for job in self._jobs}, False
        try:
            while self._processes or (waiting and not stopping):
                while len(self._processes) < processes and not stopping:
                    free = next((job for job in waiting if self._is_free(job, report)), None)
                    if free is None:
                        break
                    waiting.remove(free)
                    self._start(free, report)
                time.sleep(_POLL_SECONDS)
                if should_stop() and not stopping:
                    stopping = True
                    self._terminate()
                for name in [name for name, process in self._processes.items() if process.poll() is not None]:
                    self._end(by_name[name], self._wait(name), report)
        finally:
            self._terminate()
            for name in list(self._processes):
                self._wait(name)

    def _is_free(self, job: Job, report: Callable[[str], None]) -> bool:
        """Return whether no process is training the run; report once if one is."""
        folder = RunFolder(self.folder / job.name)
        try:
            if folder.path.is_dir():
                with folder.hold():
                    pass
        except LockedError as error:
            if job.name not in self._announced:
                self._announced.add(job.name)
                report(f"waiting for {job.name}: {error}")
            return False
        return True

    def _start(self, job: Job, report: Callable[[str], None]) -> None:
        folder = RunFolder(self.folder / job.name)
        if any(folder.checkpoints.glob("*.pt")):
            same_options = False
            with contextlib.suppress(ArgumentError):  # the run's process reports the error
                same_options = folder.holds(job.config)  # if so, the sweep's command names the same code
            words, what = ["--resume", str(folder.path), *["--trust-run"] * same_options], "resumed"
        else:
            file = self.folder / f"{job.name}.toml"
            write_options_file(file, job.config)
            words, what = (
                ["--config", str(file), "--run-dir", str(folder.path), "--overwrite", "--trust-run"],
                "started",
            )
        path = self.folder / f"{job.name}.log"
        with writing(path):
            descriptor = open_regular_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        with os.fdopen(descriptor, "ab") as log:
            command = [sys.executable, "-m", "recurl.cli.job", "train", *words]
            # In a separate session: otherwise Ctrl-C in the terminal would also reach it, as the first of two signals.
            self._processes[job.name] = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.PIPE, start_new_session=True
            )
        report(f"{what} {job.name}")

    def _wait(self, name: str) -> int:
        """Wait for a run's process and return its exit code."""
        with self._processes.pop(name) as process:  # closes the pipe
            return process.wait()

    def _end(self, job: Job, code: int, report: Callable[[str], None]) -> None:
        stopped = code in _STOPPED
        numbers = self._last_metrics(job.name)
        finished = code == FINISHED
        self._status[job.name] = "finished" if finished else "stopped" if stopped else "failed"
        if finished:
            scores = (("training", numbers[RETURN]), ("evaluation", numbers[EVALUATION]))
            text = ", ".join(f"{what} return {float(value):.4g}" for what, value in scores if value)
            text = text or "no return in metrics.csv"
            report(f"finished {job.name}: {text} after {numbers['env_steps'] or 'unknown'} steps")
        else:
            lines = (self.folder / f"{job.name}.log").read_text(errors="replace").strip().splitlines()
            last = "" if stopped else lines[-1] if lines else f"it exited with status {code}"
            report(f"{self._status[job.name]} {job.name}{last and f': {last}'} ({self.folder / job.name}.log)")
        self._write_results()

    def _terminate(self) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()

    def _last_metrics(self, name: str) -> dict[str, Any]:
        """Return the last metrics of a run as text; empty where there are none."""
        folder = RunFolder(self.folder / name)
        with contextlib.suppress(ArgumentError):
            rows, evaluations = read_metrics(folder.metrics)[1], read_metrics(folder.evaluations, EVALUATION)[1]
            last = rows[-1] if rows else {}
            found = {column: last.get(column, "") for column in ("env_steps", "wall_s", RETURN)}
            return {**found, EVALUATION: evaluations[-1][EVALUATION] if evaluations else ""}
        return dict.fromkeys(_COLUMNS[2:], "")

    def _read_results(self) -> list[dict[str, str]]:
        path = self.folder / "results.csv"
        try:
            text = read_bytes(path, _MAX_BYTES).decode()
            rows = list(csv.DictReader(io.StringIO(text, newline="")))
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ArgumentError(
                f"{path} can't be read ({reason}): move it away; finished runs are then resumed and end immediately."
            ) from error
        return [row for row in rows if {"job", "status"} <= row.keys() and row["job"] in self._status]

    def _write_results(self) -> None:
        settings = list(self._jobs[0].settings)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, ["job", *settings, "seed", *_COLUMNS[1:]])
        writer.writeheader()
        for job in self._jobs:
            about = {"job": job.name, **job.settings, "seed": job.config.seed, "status": self._status[job.name]}
            writer.writerow({**about, **self._last_metrics(job.name)})
        write_atomic(self.folder / "results.csv", text.getvalue().encode())


def _difference(found: Any, wanted: dict[str, Any]) -> str:
    """Describe the first option in which two sweeps differ."""
    if not isinstance(found, dict):
        return "its sweep.json is invalid"
    for part in ("set", "options"):
        one, other = found.get(part), wanted[part]
        if not isinstance(one, dict):
            return "its sweep.json is invalid"
        for name in sorted({*one, *other}):
            if one.get(name) != other.get(name):
                return f"{name}: {one.get(name)}, not {other.get(name)}"
    return "other options"

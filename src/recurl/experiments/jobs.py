"""Execution of the runs of a benchmark, sequentially or in parallel processes."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from rich.console import Console

from recurl.core.errors import RemoteTraceback, WorkerError
from recurl.core.torch_compat import limit_compile_threads
from recurl.envs.workers import Reply, WorkerGroup, WorkerTask
from recurl.envs.workers_child import Channel, Closed, Failure
from recurl.trainers.config import RunConfig
from recurl.trainers.files.durable import make_folder
from recurl.trainers.report.metrics import Row
from recurl.trainers.run.folder import RunFolder
from recurl.trainers.run.outcome import Outcome
from recurl.trainers.run.trainer import Trainer

_MAX_JOBS = 3  # on a GPU, which a run keeps busy except during setup; six took nearly as long as sequential runs
_CORES_PER_JOB = 2  # one runs Python, one compiles


class Failed(NamedTuple):
    """Failure of a run."""

    text: str
    trace: str | None
    """Traceback; None for expected errors."""


OnSpeed = Callable[[float], None]
_T = TypeVar("_T")


class Work(Protocol):
    """What a benchmark does with each of its runs; sent to worker processes."""

    def train(self, run: Any, on_speed: OnSpeed, should_stop: Callable[[], bool]) -> Any:
        """Train a run and return its result, or None if it was stopped.

        Args:
            run: the run.
            on_speed: called with the environment steps per second of the second update.
            should_stop: called after every update; returning True stops the run.
        """
        ...


class _Speed:
    """Callback that reports the environment steps per second of the second update."""

    def __init__(self, report: OnSpeed) -> None:
        self._report = report

    def on_update(self, row: Row) -> None:
        if row["update"] == 2:  # the first one compiles
            self._report(float(row["steps_per_s"]))


def train_in(
    path: Path,
    config: RunConfig,
    notify: Callable[[str], None],
    *,
    callbacks: Sequence[object],
    on_speed: OnSpeed,
    should_stop: Callable[[], bool],
    keep: bool,
    then: Callable[[RunFolder, Trainer, Outcome], _T],
) -> _T | None:
    """Train a run in a folder of its own, and return what is made of it, or None if it was stopped.

    Args:
        path: the folder; a run that is there is overwritten.
        config: the options.
        notify: called with notices.
        callbacks: callbacks of the trainer.
        on_speed: see :class:`Work`.
        should_stop: see :class:`Work`.
        keep: keep the folder of the finished run.
        then: returns the result of the finished run.
    """
    folder = RunFolder(path, notify)
    make_folder(path.parent)
    callbacks, console = [*callbacks, _Speed(on_speed)], Console(quiet=True)
    with closing(Trainer(config, folder, console=console, callbacks=callbacks)) as trainer, folder.hold():
        folder.create(config, overwrite=True)
        outcome = trainer.run(should_stop)
        if outcome.status == "stopped":
            return None
        result = then(folder, trainer, outcome)
    if not keep:
        shutil.rmtree(path)
    return result


def gpus_for(device: str) -> tuple[str, ...]:
    """Return the GPUs among which parallel runs are divided, as CUDA_VISIBLE_DEVICES names them: all for ``"cuda"``.

    Example:
        >>> gpus_for("cpu"), gpus_for("cuda:1")
        ((), ())
    """
    if device != "cuda":
        return ()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return tuple(visible.split(",") if visible else map(str, range(torch.cuda.device_count())))


def default_jobs(device: str, cores: int, gpus: int = 1) -> int:
    """Return the default number of parallel runs.

    One on a CPU. On a GPU one per two cores, at most three for each of the ``gpus``, so that one run computes while the
    host traces and compiles others.

    Example:
        >>> default_jobs("cpu", 16), default_jobs("cuda", 16), default_jobs("cuda", 4), default_jobs("cuda", 1)
        (1, 3, 2, 1)
        >>> default_jobs("cuda", 64, gpus=4)
        12
    """
    return max(1, min(_MAX_JOBS * gpus, cores // _CORES_PER_JOB)) if device.startswith("cuda") else 1


def train_all(
    runs: Iterable[_T],
    work: Work,
    jobs: int,
    *,
    cores: int,
    gpus: Sequence[str] = (),
    on_speed: OnSpeed,
    should_stop: Callable[[], bool],
) -> Generator[tuple[_T, Any]]:
    """Train runs and yield the result of each, or a :class:`Failed`, as soon as it ends. A failure stops no other run.

    Args:
        runs: the runs, started in this order; the next one is asked for when a job is free.
        work: trains a run.
        jobs: number of parallel runs. One run at a time is trained in this process, several in worker processes, which
            end with this process.
        cores: cores of the machine, divided among the jobs for compilation.
        gpus: GPUs divided among the worker processes, each of which sees one; empty for those that this process sees.
        on_speed: called with the environment steps per second of a run after its second update.
        should_stop: polled continuously. If it returns True, training ends and unfinished runs are lost.

    Raises:
        UnsupportedError: ``jobs`` is more than one on a system that is not POSIX.
        WorkerError: a process couldn't be started.
    """
    if jobs > 1:
        threads = max(1, cores // jobs)
        seen = [gpus[job % len(gpus)] if gpus else None for job in range(jobs)]
        tasks = [WorkerTask(_serve, (work, threads, gpu)) for gpu in seen]
        yield from _ParallelRuns(WorkerGroup(tasks, None), iter(runs), on_speed).run(should_stop)
        return
    for run in runs:
        try:
            result = work.train(run, on_speed, should_stop)
        except Exception as error:  # noqa: BLE001 - any failure of a run, including user-defined cells
            failure = Failure.of(error)
            yield run, Failed(failure.summary, failure.traceback if failure.kind is None else None)
            continue
        if result is None:
            return
        yield run, result


class _ParallelRuns:
    """Distribute runs to workers, which train one run at a time; workers that fail or die are replaced."""

    def __init__(self, group: WorkerGroup, runs: Iterator[Any], on_speed: OnSpeed) -> None:
        self._group = group
        self._waiting = runs
        self._running: dict[int, Any] = {}
        self._starting: dict[int, Any] = {}  # the next run of each worker that is replaced
        self._on_speed = on_speed

    def run(self, should_stop: Callable[[], bool]) -> Generator[tuple[Any, Any]]:
        try:
            for worker in range(len(self._group.workers)):
                self._begin(worker, next(self._waiting, None))
            while self._running or self._starting:
                replies = self._group.replies({*self._running, *self._starting}, should_stop)
                if not replies:
                    return
                for reply in replies:
                    yield from self._handle(reply)
        finally:
            self._group.kill()

    def _begin(self, worker: int, run: Any) -> None:
        if run is None:
            self._group.end(worker)
        else:
            self._running[worker] = run
            self._group.ask(worker, pickle.dumps(run))

    def _handle(self, reply: Reply) -> Generator[tuple[Any, Any]]:
        worker = reply.worker
        if worker in self._starting:
            if reply.error is not None:
                raise reply.error
            self._begin(worker, self._starting.pop(worker))
        elif isinstance(reply.value, float):
            self._on_speed(reply.value)
        elif reply.error is None:
            yield self._running.pop(worker), reply.value
            self._begin(worker, next(self._waiting, None))
        else:
            yield self._running.pop(worker), _failed(reply.error)
            run = next(self._waiting, None)
            if run is None:
                self._group.end(worker)
            else:
                self._group.restart(worker)
                self._starting[worker] = run


def _failed(error: Exception) -> Failed:
    cause = error.__cause__
    foreseen = not isinstance(error, WorkerError) or not isinstance(cause, RemoteTraceback)
    return Failed(str(error), None if foreseen else str(cause).lstrip())


def _serve(channel: Channel, work: Work, compile_threads: int, gpu: str | None) -> None:
    """Train the runs sent by the parent, one after another; main function of a worker."""
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # CUDA reads it when it is first used, which no worker has done yet
    limit_compile_threads(compile_threads)
    channel.send()
    try:
        while True:
            run = pickle.loads(channel.receive_bytes())
            channel.send(work.train(run, channel.send, lambda: False))
    except Closed:
        pass

"""Execution of the POPGym benchmark's runs, sequentially or in parallel processes."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

from recurl.core.errors import RemoteTraceback, WorkerError
from recurl.core.torch_compat import limit_compile_threads
from recurl.envs.workers import Reply, WorkerGroup, WorkerTask
from recurl.envs.workers_child import Channel, Closed, Failure
from recurl.experiments.popgym.results import Result
from recurl.experiments.popgym.settings import Run
from recurl.experiments.popgym.training import OnSpeed, Work, train

_MAX_JOBS = 3  # on a GPU, which a run keeps busy except during setup; six took nearly as long as sequential runs
_CORES_PER_JOB = 2  # one runs Python, one compiles


class Failed(NamedTuple):
    """Failure of a run."""

    text: str
    trace: str | None
    """Traceback; None for expected errors."""


Ended = tuple[Run, Result | Failed]


def default_jobs(device: str, cores: int) -> int:
    """Return the default number of parallel runs.

    One on a CPU. On a GPU one per two cores, at most three, so that one run computes while the host traces and compiles
    others.

    Example:
        >>> default_jobs("cpu", 16), default_jobs("cuda", 16), default_jobs("cuda", 4), default_jobs("cuda", 1)
        (1, 3, 2, 1)
    """
    return max(1, min(_MAX_JOBS, cores // _CORES_PER_JOB)) if device.startswith("cuda") else 1


def train_all(
    runs: Sequence[Run],
    work: Work,
    jobs: int,
    *,
    cores: int,
    on_speed: OnSpeed,
    should_stop: Callable[[], bool],
) -> Generator[Ended]:
    """Train runs and yield the result or failure of each as soon as it ends. A failure doesn't stop other runs.

    Args:
        runs: the runs, started in this order.
        work: shared settings of the runs.
        jobs: number of parallel runs. One run at a time is trained in this process, several in worker processes, which
            end with this process.
        cores: cores of the machine, divided among the jobs for compilation.
        on_speed: called with the environment steps per second of a run after its second update.
        should_stop: polled continuously. If it returns True, training ends and unfinished runs are lost.

    Raises:
        UnsupportedError: ``jobs`` is more than one on a system that is not POSIX.
        WorkerError: a process couldn't be started.
    """
    jobs = min(jobs, len(runs))
    if jobs > 1:
        tasks = [WorkerTask(_serve, (work, max(1, cores // jobs)))] * jobs
        yield from _ParallelRuns(WorkerGroup(tasks, None), runs, on_speed).run(should_stop)
        return
    for run in runs:
        try:
            result = train(run, work, on_speed=on_speed, should_stop=should_stop)
        except Exception as error:  # noqa: BLE001 - any failure of a run, including user-defined cells
            failure = Failure.of(error)
            yield run, Failed(failure.summary, failure.traceback if failure.kind is None else None)
            continue
        if result is None:
            return
        yield run, result


class _ParallelRuns:
    """Distribute runs to workers, which train one run at a time; workers that fail or die are replaced."""

    def __init__(self, group: WorkerGroup, runs: Sequence[Run], on_speed: OnSpeed) -> None:
        self._group = group
        self._waiting = deque(runs)
        self._running: dict[int, Run] = {}
        self._starting: set[int] = set()
        self._on_speed = on_speed

    def run(self, should_stop: Callable[[], bool]) -> Generator[Ended]:
        try:
            for worker in range(len(self._group.workers)):
                self._begin(worker)
            while self._running or self._starting:
                replies = self._group.replies({*self._running, *self._starting}, should_stop)
                if not replies:
                    return
                for reply in replies:
                    yield from self._handle(reply)
        finally:
            self._group.kill()

    def _begin(self, worker: int) -> None:
        if self._waiting:
            self._running[worker] = self._waiting.popleft()
            self._group.ask(worker, pickle.dumps(self._running[worker]))
        else:
            self._group.end(worker)

    def _handle(self, reply: Reply) -> Generator[Ended]:
        worker = reply.worker
        if worker in self._starting:
            if reply.error is not None:
                raise reply.error
            self._starting.discard(worker)
            self._begin(worker)
        elif isinstance(reply.value, float):
            self._on_speed(reply.value)
        elif reply.error is None:
            yield self._running.pop(worker), reply.value
            self._begin(worker)
        else:
            yield self._running.pop(worker), _failed(reply.error)
            if self._waiting:
                self._group.restart(worker)
                self._starting.add(worker)
            else:
                self._group.end(worker)


def _failed(error: Exception) -> Failed:
    cause = error.__cause__
    foreseen = not isinstance(error, WorkerError) or not isinstance(cause, RemoteTraceback)
    return Failed(str(error), None if foreseen else str(cause).lstrip())


def _serve(channel: Channel, work: Work, compile_threads: int) -> None:
    """Train the runs sent by the parent, one after another; main function of a worker."""
    limit_compile_threads(compile_threads)
    channel.send()
    try:
        while True:
            run: Run = pickle.loads(channel.receive_bytes())
            channel.send(train(run, work, on_speed=channel.send))
    except Closed:
        pass

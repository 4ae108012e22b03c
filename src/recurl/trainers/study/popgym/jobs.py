"""The runs of the benchmark on POPGym: one after the other, or side by side in processes of their own."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

from recurl._torch import limit_compile_threads
from recurl.envs.workers import Reply, Task, WorkerGroup
from recurl.envs.workers_child import Channel, Closed, Failure
from recurl.errors import RemoteTraceback, WorkerError
from recurl.trainers.study.popgym.results import Result
from recurl.trainers.study.popgym.settings import Run
from recurl.trainers.study.popgym.training import OnSpeed, Work, train

_MOST = 3  # on a GPU, which one run keeps busy but while it is prepared; with six they took nearly as long as alone
_CORES = 2  # of each: one runs Python, one compiles


class Failed(NamedTuple):
    """Why a run failed."""

    text: str
    trace: str | None
    """Its traceback; None for what is foreseen."""


Ended = tuple[Run, Result | Failed]


def usual_jobs(device: str, cores: int) -> int:
    """Return how many runs go on side by side unless told otherwise.

    On a CPU one. On a GPU one for every two cores, at most three, so that one computes while others are prepared (the
    host traces and compiles).

    Example:
        >>> usual_jobs("cpu", 16), usual_jobs("cuda", 16), usual_jobs("cuda", 4), usual_jobs("cuda", 1)
        (1, 3, 2, 1)
    """
    return max(1, min(_MOST, cores // _CORES)) if device.startswith("cuda") else 1


def train_all(
    runs: Sequence[Run],
    work: Work,
    jobs: int,
    *,
    cores: int,
    on_speed: OnSpeed,
    should_stop: Callable[[], bool],
) -> Generator[Ended]:
    """Train runs, and yield each one's result, or why it failed, as soon as it ends. The others go on.

    Args:
        runs: what is trained; they begin in this order.
        work: see there.
        jobs: how many at once: for one, in this process; for several, in as many others, which end with this one.
        cores: of the machine, shared by the jobs where they compile.
        on_speed: called with the environment steps a second of a run, after its second update.
        should_stop: asked all the time; True ends it, and what goes on is lost.

    Raises:
        UnsupportedError: several jobs need a POSIX system.
        WorkerError: a process couldn't be started.
    """
    jobs = min(jobs, len(runs))
    if jobs > 1:
        tasks = [Task(_serve, (work, max(1, cores // jobs)))] * jobs
        yield from _SideBySide(WorkerGroup(tasks, None), runs, on_speed).run(should_stop)
        return
    for run in runs:
        try:
            result = train(run, work, on_speed=on_speed, should_stop=should_stop)
        except Exception as error:  # noqa: BLE001 - whatever a run fails with, a cell of the user's included
            failure = Failure.of(error)
            yield run, Failed(failure.summary, failure.traceback if failure.kind is None else None)
            continue
        if result is None:
            return
        yield run, result


class _SideBySide:
    """Hands runs to workers, each of which trains one at a time; one that fails, or dies, is replaced."""

    def __init__(self, group: WorkerGroup, runs: Sequence[Run], on_speed: OnSpeed) -> None:
        self._group = group
        self._waiting = deque(runs)
        self._going: dict[int, Run] = {}
        self._starting: set[int] = set()
        self._on_speed = on_speed

    def run(self, should_stop: Callable[[], bool]) -> Generator[Ended]:
        try:
            for worker in range(len(self._group.workers)):
                self._begin(worker)
            while self._going or self._starting:
                replies = self._group.replies({*self._going, *self._starting}, should_stop)
                if not replies:
                    return
                for reply in replies:
                    yield from self._take(reply)
        finally:
            self._group.kill()

    def _begin(self, worker: int) -> None:
        if self._waiting:
            self._going[worker] = self._waiting.popleft()
            self._group.ask(worker, pickle.dumps(self._going[worker]))
        else:
            self._group.end(worker)

    def _take(self, reply: Reply) -> Generator[Ended]:
        worker = reply.worker
        if worker in self._starting:
            if reply.error is not None:
                raise reply.error
            self._starting.discard(worker)
            self._begin(worker)
        elif isinstance(reply.value, float):
            self._on_speed(reply.value)
        elif reply.error is None:
            yield self._going.pop(worker), reply.value
            self._begin(worker)
        else:
            yield self._going.pop(worker), _failed(reply.error)
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
    """Train the runs that the parent sends, one after the other: the work of a worker."""
    limit_compile_threads(compile_threads)
    channel.send()
    try:
        while True:
            run: Run = pickle.loads(channel.receive_bytes())
            channel.send(train(run, work, on_speed=channel.send))
    except Closed:
        pass

"""Rounds: requests to all workers at once, with one system call to send and one wake-up to receive.

Commands are in shared memory. The parent wakes all workers with one byte in a doorbell pipe, which is drained only
after every worker has replied. Workers reply through another pipe, and the last one wakes the parent. Larger messages,
such as errors, go through each worker's own socket.
"""

from __future__ import annotations

import array
import contextlib
import mmap
import os
import select
import struct
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence

from recurl.envs.workers import Reply, WorkerGroup
from recurl.envs.workers_child import Channel
from recurl.envs.workers_memory import anonymous_file

try:
    import fcntl
    import termios
except ImportError:  # not a POSIX system: there are no workers
    fcntl = termios = None

__all__ = ["RoundServer", "Rounds"]

_POLL_MS = 200
_BYTE = b"\0"
_INDEX = struct.Struct("=H")


class Rounds(ABC):
    """Requests to all workers of a group, at most one at a time for each of their environments.

    Args:
        group: the workers, which must create a :class:`RoundServer`.
        places: number of environments per worker.

    Attributes:
        group: the workers.
        free: function that frees the pipes; also called when this object is garbage-collected.
    """

    def __init__(self, group: WorkerGroup, places: int) -> None:
        self.group = group
        slots = places + 1  # one more than the running rounds, as a doorbell is reused only after all replies
        file = anonymous_file(8 * slots)
        memory = mmap.mmap(file, 8 * slots)
        self._plans = memoryview(memory).cast("q")
        doorbells, answers, wakes = ([os.pipe() for _ in range(count)] for count in (slots, places, places))
        given = [file, *(reader for reader, _ in doorbells)]
        for answer, wake in zip(answers, wakes, strict=True):
            given += [*answer, wake[1]]
        kept = [file, *(end for pipe in (*doorbells, *answers, *wakes) for end in pipe)]
        self.free = weakref.finalize(self, _free, kept, self._plans, memory)
        for worker in group.workers:
            for descriptor in given:
                worker.send_descriptor(descriptor)
        self._doorbells = doorbells
        self._answers, self._wakes = ([reader for reader, _ in pipes] for pipes in (answers, wakes))
        self._pollers = [self._poller(wake) for wake in self._wakes]
        self._numbers: dict[Hashable, int] = {}
        self._count = 0
        self._slot_of: dict[int, int] = {}  # slots of running rounds, by place
        self._begun_at: dict[int, float] = {}
        self._finished: set[int] = set()  # places with complete replies that finish() hasn't consumed yet

    @abstractmethod
    def announce(self, number: int, plan: Hashable) -> None:
        """Assign a number, to be used in rounds, to a plan in all workers."""

    @abstractmethod
    def take(self, reply: Reply) -> None:
        """Handle a reply that arrives through a worker's own socket in the meantime, or raise its error."""

    def is_running(self, place: int) -> bool:
        """Return whether a round was started and not finished."""
        return place in self._slot_of or place in self._finished

    def begin(self, place: int, plan: Hashable) -> None:
        """Tell all workers to run a plan for their environments ``place``."""
        number = self._numbers.get(plan)
        if number is None:
            number = self._numbers[plan] = len(self._numbers)
            self.announce(number, plan)
        slot, following = ((self._count + ahead) % len(self._doorbells) for ahead in (0, 1))
        # Workers that finish this round will poll the next doorbell, which must be drained by then.
        for other in [other for other, used in self._slot_of.items() if used in (slot, following)]:
            self._wait(other)
            self._finished.add(other)
        self._count += 1
        self._plans[slot] = number
        self._slot_of[place], self._begun_at[place] = slot, time.monotonic()
        os.write(self._doorbells[slot][1], _BYTE)

    def finish(self, place: int) -> None:
        """Wait until all workers have replied.

        Raises:
            WorkerError: a worker raised an error, died, or hangs.
            RecurlError: a worker raised an error of recurl.
        """
        if place in self._finished:
            self._finished.remove(place)
        else:
            self._wait(place)

    def _wait(self, place: int) -> None:
        count, answers, wake = len(self.group.workers), self._answers[place], self._wakes[place]
        while True:
            ready = [descriptor for descriptor, _ in self._pollers[place].poll(_POLL_MS)]
            if wake in ready:
                os.read(wake, count)
                if _bytes_in(answers) == count * _INDEX.size:  # otherwise two workers saw the end of the last round
                    os.read(answers, count * _INDEX.size)
                    break
            self._read_sockets(ready)
            if not ready:
                self._wait_for_each(place)
                break
        os.read(self._doorbells[self._slot_of.pop(place)][0], 1)

    def _poller(self, *descriptors: int) -> select.poll:
        poller = select.poll()
        for descriptor in (*descriptors, *self.group.descriptors):
            poller.register(descriptor, select.POLLIN)
        return poller

    def _read_sockets(self, ready: Sequence[int]) -> None:
        for descriptor in ready:
            worker = self.group.descriptors.get(descriptor)
            if worker is not None:
                self.take(self.group.workers[worker].receive())

    def _wait_for_each(self, place: int) -> None:
        """Wait for each reply individually, and check for hung workers."""
        answers = self._answers[place]
        pending = set(range(len(self.group.workers)))
        for index in pending:
            self.group.workers[index].expect(self._begun_at[place], self.group.timeout)
        poller = self._poller(answers)
        while pending:
            ready = [descriptor for descriptor, _ in poller.poll(_POLL_MS)]
            self._read_sockets(ready)
            if answers in ready:
                found = os.read(answers, len(pending) * _INDEX.size)
                pending.difference_update(index for (index,) in _INDEX.iter_unpack(found))
            for index in pending if not ready else ():
                error = self.group.workers[index].check_hanging()
                if error is not None:
                    raise error


class RoundServer:
    """Worker's side of :class:`Rounds`.

    Args:
        channel: connection to the parent, which sends the shared memory and the pipes.
        index: index of the worker.
        places: number of environments per worker.
        workers: number of workers.
    """

    def __init__(self, channel: Channel, index: int, places: int, workers: int) -> None:
        slots = places + 1
        file = channel.receive_descriptor()
        self._plans = memoryview(mmap.mmap(file, 8 * slots)).cast("q")
        os.close(file)
        self._doorbells = [channel.receive_descriptor() for _ in range(slots)]
        self._pipes = [tuple(channel.receive_descriptor() for _ in range(3)) for _ in range(places)]
        self._answer, self._all = _INDEX.pack(index), workers * _INDEX.size
        self._count = 0
        self._channel = channel
        self._pollers = [select.poll() for _ in self._doorbells]
        for poller, doorbell in zip(self._pollers, self._doorbells, strict=True):
            poller.register(channel.descriptor, select.POLLIN)
            poller.register(doorbell, select.POLLIN)

    def next_plan(self) -> int | None:
        """Wait for the next round and return the number of its plan, or None if a message arrives first."""
        slot = self._count % len(self._doorbells)
        for descriptor, _ in self._pollers[slot].poll():
            if descriptor == self._channel.descriptor:
                return None
        self._count += 1
        return self._plans[slot]

    def answer(self, place: int) -> None:
        """Tell the parent that this worker has finished the round."""
        reader, writer, wake = self._pipes[place]
        os.write(writer, self._answer)
        if _bytes_in(reader) == self._all:
            os.write(wake, _BYTE)


def _bytes_in(descriptor: int) -> int:
    """Return the number of bytes in a pipe."""
    assert fcntl is not None
    assert termios is not None
    found = array.array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, found)
    return found[0]


def _free(descriptors: Sequence[int], view: memoryview, memory: mmap.mmap) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
    view.release()
    with contextlib.suppress(BufferError):  # an intermediate view is left to the garbage collector
        memory.close()

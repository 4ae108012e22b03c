"""Driver side of the Ray actors, with replacement of actors that die."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from recurl.collectors.actors.remote import CollectorActor, ReadyActor, versions
from recurl.collectors.actors.session import RaySession
from recurl.core.errors import WorkerError
from recurl.envs.workers_child import Failure

__all__ = ["ActorGroup", "Event", "Replacement"]

_START_SECONDS = 120.0
_TICK_SECONDS = 1.0
_CLOSE_SECONDS = 5.0
_LONGEST = 300  # maximum number of characters of a cause

Method: TypeAlias = Literal["begin", "collect", "call"]


class Replacement(NamedTuple):
    """Replacement of an actor that died.

    Attributes:
        actor: index of the actor.
        cause: reason for its death, as reported by Ray.
        lost_frames: frames of the batch it was collecting, an upper bound on those executed but not delivered.
        unfinished: ids of the trajectories that ended with it without being done; later steps never have these ids.
    """

    actor: int
    cause: str
    lost_frames: int
    unfinished: tuple[int, ...]


class Event(NamedTuple):
    """Event of an actor: it answered, is ready after a replacement, or died and is being replaced."""

    actor: int
    kind: Literal["answer", "ready", "died"]
    value: Any = None
    """The answer, or the cause of death as text."""
    collecting: bool = False
    """Whether a batch was requested from it."""


@dataclass
class _Actor:
    handle: Any
    generation: int
    where: str
    process: int = 0
    failures: int = 0
    request: Any = None
    method: Method = "begin"
    requested_at: float = 0.0


class ActorGroup:
    """Group of actors, each of which handles one request at a time.

    Args:
        session: the connection to Ray.
        count: number of actors.
        shared: a pickled :class:`~recurl.collectors.actors.remote.SharedArguments`.
        make_arguments: returns the pickled :class:`~recurl.collectors.actors.remote.ActorArguments` of an actor, given
            its index and the number of its replacements.
        num_cpus: CPUs that Ray reserves for each actor.
        max_restarts: maximum number of successive replacements of an actor without a delivered batch.
        timeout: maximum seconds per request; None for no limit.

    Attributes:
        greetings: first replies of the actors.

    Raises:
        WorkerError: an actor did not start.
        RecurlError: an actor raised this error while it started.
    """

    def __init__(
        self,
        session: RaySession,
        count: int,
        shared: bytes,
        make_arguments: Callable[[int, int], bytes],
        *,
        num_cpus: float,
        max_restarts: int,
        timeout: float | None,
    ) -> None:
        self._ray = session.ray
        self._session = session
        self._make_arguments = make_arguments
        self._num_cpus = num_cpus
        self._max_restarts = max_restarts
        self._timeout = timeout
        self._shared = self._ray.put(shared)
        self._class = self._ray.remote(num_cpus=num_cpus, max_restarts=0)(CollectorActor)
        self._start_seconds = _START_SECONDS + 2 * count
        self.actors: list[_Actor] = []
        try:
            self.actors += [self._new(index, 0) for index in range(count)]
            self.greetings = self._greetings()
        except BaseException:
            self.kill()
            raise

    def _new(self, index: int, generation: int) -> _Actor:
        actor = _Actor(self._class.remote(), generation, f"Collector actor {index}")
        self._send(actor, "begin", versions(), self._shared, self._make_arguments(index, generation))
        return actor

    @staticmethod
    def _send(actor: _Actor, method: Method, *arguments: Any) -> None:
        actor.request = getattr(actor.handle, method).remote(*arguments)
        actor.method, actor.requested_at = method, time.monotonic()

    def _greetings(self) -> list[ReadyActor]:
        found: dict[int, ReadyActor] = {}
        while len(found) < len(self.actors):
            event = self.next_event()
            if event.kind == "ready":
                found[event.actor] = event.value
        return [found[index] for index in range(len(self.actors))]

    def is_idle(self, index: int) -> bool:
        """Return whether an actor can take a request."""
        return self.actors[index].request is None

    def ask(self, index: int, method: Method, *arguments: Any) -> None:
        """Send a request to an idle actor."""
        self._send(self.actors[index], method, *arguments)

    def next_event(self) -> Event:
        """Wait for an answer or the death of a busy actor; of several that are ready, the earliest request is first.

        Raises:
            WorkerError: an actor died too often, could not be replaced, or raised an error.
            RecurlError: an actor raised this error.
        """
        while True:
            waiting = {
                actor.request: index
                for index, actor in sorted(enumerate(self.actors), key=lambda item: item[1].requested_at)
                if actor.request is not None
            }
            ready, _ = self._ray.wait(list(waiting), num_returns=1, timeout=_TICK_SECONDS)
            if ready:
                return self._answer(waiting[ready[0]])
            for index in waiting.values():
                cause = self._timeout_cause(self.actors[index])
                if cause is not None:
                    return self._replace(index, cause)

    def _answer(self, index: int) -> Event:
        actor, errors = self.actors[index], self._ray.exceptions
        try:
            value = self._ray.get(actor.request)
        except errors.RayTaskError as error:
            raise WorkerError(f"{actor.where} failed: {_shortened(str(error))}") from error
        except errors.RayError as error:
            return self._replace(index, _shortened(str(error)))
        if isinstance(value, Failure):
            raise value.error(actor.where)
        actor.request = None
        if actor.method == "begin":
            actor.process = value.process
            actor.where = f"Collector actor {index} (process {value.process})"
            return Event(index, "ready", value)
        if actor.method == "collect":
            actor.failures = 0
        return Event(index, "answer", value, collecting=actor.method == "collect")

    def _timeout_cause(self, actor: _Actor) -> str | None:
        """Return the cause of death if an actor has exceeded its time limit, else None."""
        limit = self._start_seconds if actor.method == "begin" else self._timeout
        if limit is None or time.monotonic() < actor.requested_at + limit:
            return None
        if actor.method == "begin":
            raise WorkerError(
                f"{actor.where} did not start within {limit:g} s: it needs {self._num_cpus:g} CPUs, and the Ray "
                f"cluster has {self._session.free_cpus():g} free. Add nodes, or use fewer actors."
            )
        return f"it hangs: no answer for {limit:g} s"

    def _replace(self, index: int, cause: str) -> Event:
        old = self.actors[index]
        self._ray.kill(old.handle, no_restart=True)  # it may still be running if only the connection was lost
        if old.failures == self._max_restarts:
            raise WorkerError(
                f"{old.where} died {old.failures + 1} times without delivering a batch in between, more than "
                f"max_restarts={self._max_restarts} allows: {cause}"
            )
        new = self.actors[index] = self._new(index, old.generation + 1)
        new.failures = old.failures + 1
        return Event(index, "died", cause, collecting=old.method == "collect")

    def close(self) -> None:
        """Let idle actors close their environments, then terminate all actors."""
        idle = [actor for actor in self.actors if actor.request is None]
        for actor in idle:
            self._send(actor, "call", "close")
        if idle and self._ray.is_initialized():
            self._ray.wait([actor.request for actor in idle], num_returns=len(idle), timeout=_CLOSE_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Terminate all actors immediately."""
        if self._ray.is_initialized():
            for actor in self.actors:
                self._ray.kill(actor.handle, no_restart=True)
        self.actors.clear()


def _shortened(text: str) -> str:
    """Return the informative part of a Ray message, on one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("\t")]
    message = " ".join(lines[1:] or lines)
    return message if len(message) <= _LONGEST else f"{message[:_LONGEST]}..."

"""Transport of a collector's requests to Ray actors, which are replaced when they die."""

from __future__ import annotations

import os
import pickle
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from recurl.collectors.actors.arrays import arrays_of, tensors_of
from recurl.collectors.actors.remote import ActorArguments, CollectorActor, versions
from recurl.collectors.actors.session import RaySession
from recurl.collectors.asynchronous import Event, Transport
from recurl.collectors.weights import matching, tensors_of_policy
from recurl.core.errors import RecurlWarning, WorkerError
from recurl.core.keys import DONE, NEXT, TRAJ_IDS
from recurl.core.seeding import derive_seed
from recurl.envs.pickling import pickled
from recurl.envs.rollout import Policy
from recurl.envs.workers_child import Failure
from recurl.sequences.trajectories import TRAJECTORY_IDS

__all__ = ["ActorGroup", "Recipe", "Replacement"]

_START_SECONDS = 120.0
_TICK_SECONDS = 1.0
_CLOSE_SECONDS = 5.0
_LONGEST = 300  # maximum number of characters of a cause


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


class Recipe:
    """Factory of the arguments of each actor.

    Args:
        functions: creates the environment, for each actor.
        epsilons: probability of random actions, for each actor; None for the policy's own.

    Attributes:
        rows: number of rows of each environment.
        seed: seed of the first row of the first actor; None if environments aren't seeded.
        replaced: number of actors replaced in earlier runs of the program, whose seeds are not reused.

    Raises:
        ArgumentTypeError: a part of a function can't be pickled; the message names it.
    """

    def __init__(self, functions: Sequence[Callable[[], Any]], epsilons: Sequence[float] | None) -> None:
        self._functions = [pickled("create_env_fn", function) for function in functions]
        self._epsilons = [None] * len(functions) if epsilons is None else list(epsilons)
        self._root = int(torch.randint(2**62, ()))  # determined by the parent's seed
        self.rows = 1
        self.seed: int | None = None
        self.replaced = 0

    def __call__(self, index: int, generation: int) -> bytes:
        """Return the pickled :class:`~recurl.collectors.actors.remote.ActorArguments` of an actor.

        Args:
            index: index of the actor.
            generation: number of its replacements.
        """
        own = ActorArguments(
            self._functions[index],
            derive_seed(self._root, "actor", index, self._incarnation(generation)),
            self.env_seed(index, generation),
            TRAJECTORY_IDS.reserve(),
            self._epsilons[index],
        )
        return pickle.dumps(own)

    def own_seed(self, seed: int, index: int) -> int:
        """Set the seed of later actors, and return that of the process of an existing one."""
        self.seed = self._root = seed
        return derive_seed(seed, "actor", index, 0)

    def _incarnation(self, generation: int) -> int:
        return 0 if generation == 0 else self.replaced + generation

    def env_seed(self, index: int, generation: int = 0) -> int | None:
        """Return the seed of an actor's first row; seeds of successors are far from those of all other rows."""
        if self.seed is None:
            return None
        time = self._incarnation(generation)
        if time == 0:
            return self.seed + index * self.rows
        return derive_seed(self.seed, "successor", index, time) % 2**30


@dataclass
class _Actor:
    handle: Any
    generation: int
    where: str
    process: int = 0
    failures: int = 0
    unfinished: tuple[int, ...] = ()
    request: Any = None
    name: str = "begin"
    requested_at: float = 0.0

    def send(self, name: str, *arguments: Any) -> None:
        """Send a request."""
        self.request = self.handle.call.remote(name, *arguments)
        self.name, self.requested_at = name, time.monotonic()


class ActorGroup(Transport):
    """Group of actors, each of which handles one request at a time.

    Args:
        session: the connection to Ray, which is closed with the actors.
        recipe: factory of the arguments of each actor.
        count: number of actors.
        shared: the pickled registrations, policy, and arguments of the actors' collectors.
        policy: the policy.
        num_cpus: CPUs that Ray reserves for each actor.
        max_restarts: maximum number of successive replacements of an actor without a delivered batch.
        timeout: maximum seconds per request; None for no limit.

    Attributes:
        actors: the actors.
        replacements: replacements of actors that died, in order.

    Raises:
        WorkerError: an actor did not start.
        RecurlError: an actor raised this error while it started.
    """

    def __init__(
        self,
        session: RaySession,
        recipe: Recipe,
        count: int,
        shared: bytes,
        policy: Policy | None,
        *,
        num_cpus: float,
        max_restarts: int,
        timeout: float | None,
    ) -> None:
        self._ray, self._session, self._recipe = session.ray, session, recipe
        self._num_cpus, self._max_restarts, self._timeout = num_cpus, max_restarts, timeout
        self.actors: list[_Actor] = []
        self.replacements: list[Replacement] = []
        self._finalizer = weakref.finalize(self, _end, session, self.actors, os.getpid())
        try:
            self._like = tensors_of_policy(policy) if isinstance(policy, nn.Module) else {}
            self._weights: list[Any] = []  # a reference to them
            self._shared = self._ray.put(shared)
            self._class = self._ray.remote(num_cpus=num_cpus, max_restarts=0)(CollectorActor)
            self._start_seconds = _START_SECONDS + 2 * count
            self.actors += [self._new(index, 0) for index in range(count)]
            found: dict[int, Any] = {}
            while len(found) < count:
                event = self.next_event()
                if event.kind == "ready":
                    found[event.worker] = event.value
            self.infos = [found[index] for index in range(count)]
            recipe.rows = self.infos[0].rows.numel()
            if isinstance(policy, nn.Module):
                self.publish(policy)
        except BaseException:
            self._finalizer()
            raise

    def _new(self, index: int, generation: int) -> _Actor:
        actor = _Actor(self._class.remote(), generation, f"Collector actor {index}")
        actor.send("begin", versions(), self._shared, self._recipe(index, generation))
        return actor

    def is_idle(self, index: int) -> bool:
        """Return whether an actor can take a request."""
        return self.actors[index].request is None

    def ask(self, index: int, name: str, *arguments: Any) -> None:
        """Send a request to an idle actor."""
        self.actors[index].send(name, *([self._weights] if name == "collect" else arguments))

    def publish(self, weights: Any) -> None:
        """Put the weights of later requests into Ray's object store."""
        self._weights = [self._ray.put(arrays_of(matching(weights, self._like)))]

    def own_seed(self, seed: int, index: int) -> int:
        """Return the seed of the global generators of an actor; its successors' seeds also derive from ``seed``."""
        return self._recipe.own_seed(seed, index)

    def next_event(self) -> Event:
        """Wait for the next event of an actor."""
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
        if actor.name == "begin":
            info, actor.process = value
            actor.where = f"Collector actor {index} (process {actor.process})"
            return Event(index, "ready", info)
        if actor.name != "collect":
            return Event(index, "answer", value)
        batch = tensors_of(value)
        ids, done = batch[TRAJ_IDS], batch[(NEXT, DONE)]
        actor.failures, actor.unfinished = 0, tuple(ids[..., -1][~done[..., -1, 0]].tolist())
        return Event(index, "batch", batch)

    def _timeout_cause(self, actor: _Actor) -> str | None:
        """Return the cause of death if an actor has exceeded its time limit, else None."""
        limit = self._start_seconds if actor.name == "begin" else self._timeout
        if limit is None or time.monotonic() < actor.requested_at + limit:
            return None
        if actor.name == "begin":
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
        lost = self.infos[index].rows.numel() * self.infos[index].steps if old.name == "collect" else 0
        self.replacements.append(Replacement(index, cause, lost, old.unfinished))
        text = f"Collector actor {index} died and is replaced; at most {lost} frames are lost: {cause}"
        warnings.warn(text, RecurlWarning, stacklevel=2)
        return Event(index, "lost")

    def close(self) -> None:
        """Let idle actors close their environments, terminate all actors, and disconnect from Ray."""
        idle = [actor for actor in self.actors if actor.request is None] if self._finalizer.alive else []
        for actor in idle:
            actor.send("close")
        if idle and self._ray.is_initialized():
            self._ray.wait([actor.request for actor in idle], num_returns=len(idle), timeout=_CLOSE_SECONDS)
        self._finalizer()


def _end(session: RaySession, actors: list[_Actor], owner: int) -> None:
    """Terminate all actors immediately, and disconnect from Ray."""
    if os.getpid() != owner:  # in a fork, which must not terminate the actors
        return
    if session.ray.is_initialized():
        for actor in actors:
            session.ray.kill(actor.handle, no_restart=True)
    actors.clear()
    session.close()


def _shortened(text: str) -> str:
    """Return the informative part of a Ray message, on one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("\t")]
    message = " ".join(lines[1:] or lines)
    return message if len(message) <= _LONGEST else f"{message[:_LONGEST]}..."

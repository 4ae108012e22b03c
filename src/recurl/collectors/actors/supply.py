"""Requests for batches of actors: sending, receiving in order, and accounting for actors that die."""

from __future__ import annotations

import pickle
import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from recurl.collectors.actors.arrays import Array, arrays_of
from recurl.collectors.actors.group import ActorGroup, Event, Replacement
from recurl.collectors.actors.remote import ActorArguments
from recurl.collectors.actors.session import RaySession
from recurl.collectors.weights import Weights, matching, tensors_of_policy
from recurl.collectors.worker import CollectorInfo
from recurl.core.errors import UsageError
from recurl.core.keys import DONE, NEXT, TRAJ_IDS, NestedKey
from recurl.core.seeding import derive_seed
from recurl.envs.pickling import pickled
from recurl.envs.rollout import Policy
from recurl.sequences.trajectories import TRAJECTORY_IDS

__all__ = ["Part", "Recipe", "Supply"]


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

    def seeds(self, seed: int) -> list[tuple[int, int]]:
        """Set the seed, and return the derived seeds of each actor's environments and process."""
        self.seed = self._root = seed
        actors = range(len(self._functions))
        return [(seed + index * self.rows, derive_seed(seed, "actor", index, 0)) for index in actors]

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


class Part(NamedTuple):
    """A batch of one actor.

    Attributes:
        order: sequence number of the request.
        version: version of the acting weights.
        arrays: entries of the batch.
    """

    order: int
    version: int
    arrays: dict[NestedKey, Array]


class Supply:
    """Parts collected by actors. An actor collects one part at a time, and the next one only after it was received.

    Args:
        session: the connection to Ray.
        recipe: factory of the arguments of each actor.
        shared: a pickled :class:`~recurl.collectors.actors.remote.SharedArguments`.
        policy: the policy, whose weights are version 0.
        count: number of actors.
        **limits: see :class:`~recurl.collectors.actors.group.ActorGroup`.

    Attributes:
        group: the actors.
        parts: received parts in order, by actor.
        in_progress: order and version of the parts being collected, by actor.
        version: version of the newest weights.
        replacements: replacements of actors that died, in order.
        frames: number of frames of a part.
    """

    def __init__(
        self, session: RaySession, recipe: Recipe, shared: bytes, policy: Policy | None, count: int, **limits: Any
    ) -> None:
        self._session = session
        self._ray = session.ray
        self._recipe = recipe
        self._policy = policy
        self._like = tensors_of_policy(policy) if isinstance(policy, nn.Module) else {}
        self.group = ActorGroup(session, count, shared, recipe, **limits)
        self.parts: list[deque[Part]] = [deque() for _ in range(count)]
        self.in_progress: dict[int, tuple[int, int]] = {}
        self.replacements: list[Replacement] = []
        self.frames = 0
        self.version = 0
        self.sent = False
        self._order = 0
        self._unfinished: list[tuple[int, ...]] = [()] * count
        self._lock = threading.Lock()
        self._weights: list[Any] = [self._put(self._like)] if isinstance(policy, nn.Module) else []

    @property
    def infos(self) -> list[CollectorInfo]:
        """Properties of the actors' collectors."""
        return [greeting.info for greeting in self.group.greetings]

    def _put(self, state: dict[str, Any]) -> Any:
        return self._ray.put(arrays_of(state))

    def publish(self, weights: Weights | None) -> None:
        """Set the weights of the parts requested after this call.

        They are a new version if an actor has received the previous ones.

        Raises:
            ArgumentError: names or shapes differ from the policy's.
            UsageError: the policy is not a module and has no weights.
        """
        if not isinstance(self._policy, nn.Module):
            raise UsageError(f"Only an nn.Module has weights to update, got a policy {type(self._policy).__name__}.")
        reference = self._put(matching(self._policy if weights is None else weights, self._like))
        with self._lock:
            self._weights = [reference]
            self.version += self.sent
            self.sent = False

    def request_if_idle(self, index: int) -> None:
        """Request a part from an actor if it is idle."""
        if not self.group.is_idle(index):
            return
        with self._lock:
            self.group.ask(index, "collect", self._weights)
            self.in_progress[index] = (self._order, self.version)
            self.sent = True
        self._order += 1

    def wait(self) -> None:
        """Wait until a part is received, or an actor is replaced or ready again."""
        self._handle(self.group.next_event())

    @property
    def outstanding(self) -> int:
        """Number of parts requested but not yet delivered."""
        return len(self.in_progress) + sum(map(len, self.parts))

    def restore(self, version: int, parts: Sequence[Sequence[dict[str, Any]]], *, sent: bool) -> None:
        """Restore saved parts."""
        self.version, self.sent = version, sent
        for queue, saved in zip(self.parts, parts, strict=True):
            queue.clear()
            queue.extend(Part(part["order"], part["version"], arrays_of(part["arrays"])) for part in saved)
        self._order = 1 + max((part.order for queue in self.parts for part in queue), default=-1)

    def close(self) -> None:
        """Terminate the actors, and disconnect from Ray."""
        self.group.close()
        self._session.close()

    def _handle(self, event: Event) -> None:
        index = event.actor
        if event.kind == "died":
            self._record_death(event)
        elif event.collecting:
            part = Part(*self.in_progress.pop(index), event.value)
            self.parts[index].append(part)
            ids, done = (part.arrays[key].values for key in (TRAJ_IDS, (NEXT, DONE)))
            self._unfinished[index] = tuple(ids[..., -1][~done[..., -1, 0]].tolist())

    def _record_death(self, event: Event) -> None:
        index, lost = event.actor, self.frames if event.collecting else 0
        self.in_progress.pop(index, None)
        replacement = Replacement(index, event.value, lost, self._unfinished[index])
        self._unfinished[index] = ()
        self.replacements.append(replacement)
        text = f"Collector actor {index} died and is replaced; at most {lost} frames are lost: {replacement.cause}"
        warnings.warn(text, stacklevel=2)

    def wait_until_idle(self) -> None:
        """Wait until all actors are idle."""
        while not all(self.group.is_idle(index) for index in range(len(self.parts))):
            self.wait()

    def query(self, requests: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the answers of all actors to one request each, repeated if an actor is replaced."""
        self.wait_until_idle()
        answers: dict[int, Any] = {}
        while len(answers) < len(requests):
            for index, request in enumerate(requests):
                if index not in answers and self.group.is_idle(index):
                    self.group.ask(index, "call", *request)
            event = self.group.next_event()
            if event.kind == "answer":
                answers[event.actor] = event.value
            self._handle(event)
        return [answers[index] for index in range(len(requests))]

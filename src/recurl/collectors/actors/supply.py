"""Batches of actors: asked for, received in order, and accounted for where actors die."""

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
from recurl.collectors.actors.remote import Own
from recurl.collectors.actors.session import RaySession
from recurl.collectors.weights import Weights, matching, tensors_of_policy
from recurl.collectors.worker import CollectorInfo
from recurl.envs.pickling import pickled
from recurl.envs.rollout import Policy
from recurl.envs.trajectories import TRAJECTORY_IDS
from recurl.errors import UsageError
from recurl.keys import DONE, NEXT, TRAJ_IDS, NestedKey
from recurl.seeding import derive_seed

__all__ = ["Part", "Recipe", "Supply"]


class Recipe:
    """What each actor is given for itself.

    Args:
        functions: creates the environment of each actor.
        epsilons: probability of random actions of each actor; None for the policy's own.

    Attributes:
        rows: rows of each environment.
        seed: of the first row of the first actor; None if environments aren't seeded.
        replaced: how many actors were replaced before this program began; their seeds aren't used again.

    Raises:
        ArgumentTypeError: a part of a function can't be pickled; the message names it.
    """

    def __init__(self, functions: Sequence[Callable[[], Any]], epsilons: Sequence[float] | None) -> None:
        self._functions = [pickled("create_env_fn", function) for function in functions]
        self._epsilons = [None] * len(functions) if epsilons is None else list(epsilons)
        self._root = int(torch.randint(2**62, ()))  # the parent's seed determines all
        self.rows = 1
        self.seed: int | None = None
        self.replaced = 0

    def __call__(self, index: int, generation: int) -> bytes:
        """Return the pickled :class:`~recurl.collectors.actors.remote.Own` of an actor.

        Args:
            index: number of the actor.
            generation: how often it was replaced.
        """
        own = Own(
            self._functions[index],
            derive_seed(self._root, "actor", index, self._time(generation)),
            self.env_seed(index, generation),
            TRAJECTORY_IDS.reserve(),
            self._epsilons[index],
        )
        return pickle.dumps(own)

    def seeds(self, seed: int) -> list[tuple[int, int]]:
        """Let a seed determine all that follow, and return those of each actor's environments and of its process."""
        self.seed = self._root = seed
        actors = range(len(self._functions))
        return [(seed + index * self.rows, derive_seed(seed, "actor", index, 0)) for index in actors]

    def _time(self, generation: int) -> int:
        return 0 if generation == 0 else self.replaced + generation

    def env_seed(self, index: int, generation: int = 0) -> int | None:
        """Return the seed of the first row of an actor; its successors begin far from the rows of all others."""
        if self.seed is None:
            return None
        time = self._time(generation)
        if time == 0:
            return self.seed + index * self.rows
        return derive_seed(self.seed, "successor", index, time) % 2**30


class Part(NamedTuple):
    """A batch of one actor.

    Attributes:
        order: number of the request for it.
        version: number of the weights that acted.
        arrays: its entries.
    """

    order: int
    version: int
    arrays: dict[NestedKey, Array]


class Supply:
    """Parts that actors collect. An actor collects one at a time, and the next one only when it has arrived here.

    Args:
        session: the connection to Ray.
        recipe: what each actor is given for itself.
        shared: a pickled :class:`~recurl.collectors.actors.remote.Shared`.
        policy: the policy, whose weights are version 0.
        count: number of actors.
        **limits: see :class:`~recurl.collectors.actors.group.ActorGroup`.

    Attributes:
        group: the actors.
        parts: those that have arrived, in order, by actor.
        under_way: order and version of those that actors collect, by actor.
        version: number of the newest weights.
        replacements: the actors that died, in order.
        frames: frames of a part.
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
        self.under_way: dict[int, tuple[int, int]] = {}
        self.replacements: list[Replacement] = []
        self.frames = 0
        self.version = 0
        self.sent = False
        self._order = 0
        self._goes_on: list[tuple[int, ...]] = [()] * count
        self._lock = threading.Lock()
        self._weights: list[Any] = [self._put(self._like)] if isinstance(policy, nn.Module) else []

    @property
    def infos(self) -> list[CollectorInfo]:
        """Properties of the actors' collectors."""
        return [greeting.info for greeting in self.group.greetings]

    def _put(self, state: dict[str, Any]) -> Any:
        return self._ray.put(arrays_of(state))

    def publish(self, weights: Weights | None) -> None:
        """Give weights to the parts that are asked for from now on.

        They are a new version if an actor has got the ones before.

        Raises:
            ArgumentError: names or shapes differ from the policy's.
            UsageError: the policy has no weights.
        """
        if not isinstance(self._policy, nn.Module):
            raise UsageError(f"Weights need a policy that is an nn.Module, got {type(self._policy).__name__}.")
        reference = self._put(matching(self._policy if weights is None else weights, self._like))
        with self._lock:
            self._weights = [reference]
            self.version += self.sent
            self.sent = False

    def ask_idle(self, index: int) -> None:
        """Ask an actor for a part, if it is idle."""
        if not self.group.is_idle(index):
            return
        with self._lock:
            self.group.ask(index, "collect", self._weights)
            self.under_way[index] = (self._order, self.version)
            self.sent = True
        self._order += 1

    def wait(self) -> None:
        """Wait until a part has arrived, or an actor was replaced or is ready again."""
        self._handle(self.group.next_event())

    @property
    def outstanding(self) -> int:
        """Parts that were asked for and not taken."""
        return len(self.under_way) + sum(map(len, self.parts))

    def restore(self, version: int, parts: Sequence[Sequence[dict[str, Any]]], *, sent: bool) -> None:
        """Go on with parts that were saved."""
        self.version, self.sent = version, sent
        for queue, saved in zip(self.parts, parts, strict=True):
            queue.clear()
            queue.extend(Part(part["order"], part["version"], arrays_of(part["arrays"])) for part in saved)
        self._order = 1 + max((part.order for queue in self.parts for part in queue), default=-1)

    def close(self) -> None:
        """End the actors, and leave Ray."""
        self.group.close()
        self._session.close()

    def _handle(self, event: Event) -> None:
        index = event.actor
        if event.kind == "died":
            self._note(event)
        elif event.collecting:
            part = Part(*self.under_way.pop(index), event.value)
            self.parts[index].append(part)
            ids, done = (part.arrays[key].values for key in (TRAJ_IDS, (NEXT, DONE)))
            self._goes_on[index] = tuple(ids[..., -1][~done[..., -1, 0]].tolist())

    def _note(self, event: Event) -> None:
        index, lost = event.actor, self.frames if event.collecting else 0
        self.under_way.pop(index, None)
        note = Replacement(index, event.value, lost, self._goes_on[index])
        self._goes_on[index] = ()
        self.replacements.append(note)
        text = f"Collector actor {index} died and is replaced; at most {lost} frames are lost: {note.cause}"
        warnings.warn(text, stacklevel=2)

    def settle(self) -> None:
        """Wait until no actor is at work."""
        while not all(self.group.is_idle(index) for index in range(len(self.parts))):
            self.wait()

    def query(self, requests: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the answers of all actors to one request each, which is repeated where an actor is replaced."""
        self.settle()
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

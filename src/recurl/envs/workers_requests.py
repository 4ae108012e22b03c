"""Requests to environments in worker processes, to all workers at once or to some of them."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Collection, Generator
from contextlib import contextmanager
from typing import Any

from recurl.envs.workers import Reply, WorkerGroup
from recurl.envs.workers_env import Announcement, Plan
from recurl.envs.workers_rounds import Rounds

__all__ = ["Requests"]


class Requests(Rounds):
    """Requests to workers that each serve several environments, independently of each other.

    A worker replies in the order of the requests. Replies for environments other than the awaited one are stored.

    Args:
        group: the worker processes.
        count: number of environments per worker.
    """

    def __init__(self, group: WorkerGroup, count: int) -> None:
        super().__init__(group, count)
        self._requested: list[deque[int]] = [deque() for _ in group.workers]
        self._replies: list[dict[int, Any]] = [{} for _ in range(count)]

    def announce(self, number: int, plan: Any) -> None:
        """Assign a number to a plan in all workers."""
        message = pickle.dumps(Announcement(number, plan))
        for index in range(len(self._requested)):
            self.group.ask(index, message)

    def ask_all(self, plan: Plan) -> None:
        """Tell all workers at once to run a plan; :meth:`answers` waits for them."""
        with self._all_or_nothing():
            self.begin(plan.place, plan)

    def ask(self, place: int, index: int, message: bytes, *, makes_envs: bool = False) -> None:
        """Send a request to a worker for its environment ``place``; see :meth:`WorkerGroup.ask`."""
        self._requested[index].append(place)
        self.group.ask(index, message, makes_envs=makes_envs)

    def answers(self, place: int, indices: Collection[int]) -> list[Any]:
        """Wait for the replies of these workers for their environments ``place``, and return them in worker order.

        After :meth:`ask_all`, wait until all workers have finished and return an empty list.

        Raises:
            WorkerError: see :meth:`WorkerGroup.answers`.
            RecurlError: likewise.
        """
        with self._all_or_nothing():
            if self.is_running(place):
                self.finish(place)
                return []
            kept = self._replies[place]
            pending = set(indices).difference(kept)
            while pending:
                for reply in self.group.replies(pending):
                    self.take(reply)
                pending.difference_update(kept)
        return [kept.pop(index) for index in sorted(indices)]

    def take(self, reply: Reply) -> None:
        """Store a reply, or raise its error."""
        if reply.error is not None:
            raise reply.error
        self._replies[self._requested[reply.worker].popleft()][reply.worker] = reply.value

    @contextmanager
    def _all_or_nothing(self) -> Generator[None]:
        """Stop all workers on an error or interrupt: outstanding replies would be mistaken for later ones."""
        try:
            yield
        except BaseException:
            self.group.kill()
            raise

    def close(self) -> None:
        """Tell the workers to exit, and free the resources shared with them."""
        self.group.close()
        self.free()

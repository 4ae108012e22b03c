"""Requests to environments in worker processes: to all workers at once, or to some of them."""

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
    """Workers that each serve several environments, which are asked independently of each other.

    A worker answers in the order of the requests. Answers to other environments than the awaited ones are kept.

    Args:
        group: the worker processes.
        count: environments of each.
    """

    def __init__(self, group: WorkerGroup, count: int) -> None:
        super().__init__(group, count)
        self._requested: list[deque[int]] = [deque() for _ in group.workers]
        self._answers: list[dict[int, Any]] = [{} for _ in range(count)]

    def announce(self, number: int, plan: Any) -> None:
        """Tell all workers that a number means a plan."""
        message = pickle.dumps(Announcement(number, plan))
        for index in range(len(self._requested)):
            self.group.ask(index, message)

    def ask_all(self, plan: Plan) -> None:
        """Ask all workers to carry out a plan, at once; :meth:`answers` waits until they have."""
        with self._all_or_nothing():
            self.begin(plan.place, plan)

    def ask(self, place: int, index: int, message: bytes, *, makes_envs: bool = False) -> None:
        """Send a request to a worker for its environment number ``place``; see :meth:`WorkerGroup.ask`."""
        self._requested[index].append(place)
        self.group.ask(index, message, makes_envs=makes_envs)

    def answers(self, place: int, indices: Collection[int]) -> list[Any]:
        """Return the answers of these workers for their environments number ``place``, in order of the workers.

        There are none to what all were asked at once; this waits until they have done it.

        Raises:
            WorkerError: see :meth:`WorkerGroup.answers`.
            RecurlError: likewise.
        """
        with self._all_or_nothing():
            if self.is_running(place):
                self.finish(place)
                return []
            kept = self._answers[place]
            pending = set(indices).difference(kept)
            while pending:
                for reply in self.group.replies(pending):
                    self.take(reply)
                pending.difference_update(kept)
        return [kept.pop(index) for index in sorted(indices)]

    def take(self, reply: Reply) -> None:
        """Keep an answer, or raise the error that it is."""
        if reply.error is not None:
            raise reply.error
        self._answers[self._requested[reply.worker].popleft()][reply.worker] = reply.value

    @contextmanager
    def _all_or_nothing(self) -> Generator[None]:
        """Stop all workers after an error, also an interrupt: outstanding answers would be taken for later ones."""
        try:
            yield
        except BaseException:
            self.group.kill()
            raise

    def close(self) -> None:
        """Ask the workers to end, and free what is shared with them."""
        self.group.close()
        self.free()

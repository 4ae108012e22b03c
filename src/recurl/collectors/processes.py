"""Transport of a collector's requests to worker processes."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from recurl.collectors.asynchronous import Event, Transport
from recurl.collectors.weights import SharedWeights
from recurl.collectors.worker import serve_collector
from recurl.core.errors import WorkerError
from recurl.core.seeding import derive_seed
from recurl.envs.rollout import Policy
from recurl.envs.workers import Reply, WorkerGroup, WorkerTask
from recurl.envs.workers_memory import SharedTensors
from recurl.sequences.trajectories import TRAJECTORY_IDS

__all__ = ["Processes"]


class Processes(Transport):
    """Worker processes, with weights and batches in shared memory. All are stopped when a call raises.

    Args:
        functions: creates the environment, for each worker.
        policy: the policy, sent by cloudpickle.
        options: further arguments of the workers' collectors.
        timeout: seconds that a step may take; None for no limit.
        restart: replace a worker that fails while it collects, unless it fails twice in a row.
    """

    def __init__(
        self,
        functions: Sequence[Callable[[], Any]],
        policy: Policy | None,
        options: dict[str, Any],
        *,
        timeout: float | None,
        restart: bool,
    ) -> None:
        self.reuses_memory = True
        self._weights = SharedWeights.of(policy) if isinstance(policy, nn.Module) else None
        self.group = WorkerGroup([WorkerTask(serve_collector, (make, policy, options)) for make in functions], timeout)
        self.infos = self.group.greetings
        self._restart = restart
        self._asked: dict[int, str] = {}  # requests without an answer, by worker
        self._memory: dict[int, SharedTensors] = {}
        self._fragile: set[int] = set()  # replaced workers that haven't delivered a batch yet
        for index in range(len(functions)):
            self._begin(index)

    def _begin(self, index: int) -> None:
        """Send a newly started worker its block of trajectory ids and the weights."""
        entries = None if self._weights is None else self._weights.memory.entries
        self.group.ask(index, pickle.dumps((TRAJECTORY_IDS.reserve(), entries)))
        if self._weights is not None:
            self.group.send_memory(index, self._weights.memory)

    def is_idle(self, index: int) -> bool:
        """Return whether a worker can take a request."""
        return index not in self._asked

    def ask(self, index: int, name: str, *arguments: Any) -> None:
        """Send a request to an idle worker."""
        # Saving may create environments to test the saved state.
        self.group.ask(index, pickle.dumps((name, *arguments)), makes_envs=name == "save")
        self._asked[index] = name

    def next_event(self) -> Event:
        """Wait for the next event of a worker."""
        try:
            while True:
                event = self._event(self.group.next_reply(self._asked))
                if event is not None:
                    return event
        except BaseException:  # including interrupts: outstanding replies would be mistaken for later ones
            self.group.kill()
            raise

    def _event(self, reply: Reply) -> Event | None:
        index, request = reply.worker, self._asked.get(reply.worker)
        if reply.error is not None:
            if not self._restart or index in self._fragile or request not in (None, "collect"):
                raise reply.error
            text = f"A worker failed and is replaced; the steps of its current batch are lost.\n{reply.error}"
            warnings.warn(f"{text}{reply.error.__cause__ or ''}", stacklevel=2)
            self.group.restart(index)
            self._asked[index] = "start"
            self._fragile.add(index)
            return Event(index, "lost")
        if request == "collect" and reply.value is not None:  # the entries of new shared memory
            memory = self.group.receive_memory(index, reply.value)
            if memory is not None:
                self._memory[index] = memory
            return None
        del self._asked[index]
        if request == "start":
            self._begin(index)
            return Event(index, "ready")
        if request != "collect":
            return Event(index, "answer", reply.value)
        self._fragile.discard(index)
        return Event(index, "batch", self._memory[index].tensors)

    def publish(self, weights: Any) -> None:
        """Write the weights to the shared memory, from which workers read when they begin a batch."""
        assert self._weights is not None
        try:
            self._weights.write(weights, self.group.timeout)
        except WorkerError:
            self.group.kill()
            raise

    def own_seed(self, seed: int, index: int) -> int:
        """Return the seed of the global generators of a worker."""
        return derive_seed(seed, "collector", index)

    def check_open(self) -> None:
        """Check that the workers are running and belong to this process."""
        self.group.check_open()

    def close(self) -> None:
        """Stop the workers and release all resources."""
        self.group.close()
        self._memory.clear()
        if self._weights is not None:
            self._weights.memory.close()

"""Collector of a worker, and its server in a worker process."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from recurl.collectors.collector import Collector
from recurl.collectors.weights import SharedWeights
from recurl.core.keys import NestedKey
from recurl.core.seeding import seed_everything
from recurl.envs import EnvBase
from recurl.envs.rollout import Policy
from recurl.envs.workers_child import Channel, Closed
from recurl.envs.workers_env import make_env
from recurl.envs.workers_memory import Entry, SharedTensors
from recurl.sequences.trajectories import TRAJECTORY_IDS

__all__ = ["CollectorInfo", "WorkerCollector", "serve_collector"]


class CollectorInfo(NamedTuple):
    """Properties of a worker's collector that the parent needs."""

    rows: torch.Size
    steps: int


class WorkerCollector(Collector):
    """Collector of a worker. The parent has already warned about the number of frames.

    Args:
        env: the environment.
        policy: the worker's copy of the policy.
        beat: function called after every step, if any.
        **options: further arguments of :class:`Collector`.
    """

    def __init__(
        self,
        env: EnvBase | Callable[[], EnvBase],
        policy: Policy | None,
        beat: Callable[[], None] | None = None,
        **options: Any,
    ) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "frames_per_batch=")
            super().__init__(env, policy, **options)
        self._beat = beat

    @property
    def info(self) -> CollectorInfo:
        """Properties that the parent needs."""
        return CollectorInfo(self.env.batch_size, self.steps_per_batch)

    def new_trajectories(self) -> None:
        """Begin new trajectories in all rows."""
        self._trajectories.start_new()

    def entries(self) -> dict[NestedKey, Tensor]:
        """Collect a batch and return its entries."""
        return cast(dict[NestedKey, Tensor], dict(self.collect().items(True, True)))

    def answer(self, name: str, *arguments: Any) -> Any:
        """Return the answer to a request, in a process where only this collector draws random numbers.

        Args:
            name: ``seed``, ``save``, ``load``, ``reset_rows``, or ``close``.
            *arguments: arguments of the request.
        """
        if name == "seed":
            seed, own_seed = arguments
            seed_everything(own_seed)
            return self.set_seed(seed)
        if name == "save":
            return {"collector": self.state_dict(), "rng": torch.get_rng_state()}
        if name == "load":
            state, first_id = arguments
            TRAJECTORY_IDS.start_at(first_id)
            torch.set_rng_state(state["rng"])
            return self.load_state_dict(state["collector"])
        return self.reset_rows(*arguments) if name == "reset_rows" else self.shutdown()

    def _stepped(self, rows: int) -> None:
        super()._stepped(rows)
        if self._beat is not None:
            self._beat()


def serve_collector(
    channel: Channel, create_env_fn: Callable[[], EnvBase], policy: Policy | None, options: dict[str, Any]
) -> None:
    """Serve the parent's requests, which consist of a name and arguments, until it closes the worker or exits.

    Args:
        channel: connection to the parent.
        create_env_fn: function that creates the environment.
        policy: the worker's copy of the policy.
        options: further arguments of :class:`Collector`.
    """
    env = make_env(create_env_fn)
    try:
        collector = WorkerCollector(env, policy, channel.beat, **options)
        channel.send(collector.info)
        first_id, entries = pickle.loads(channel.receive_bytes())
        TRAJECTORY_IDS.start_at(first_id)
        collector.new_trajectories()
        weights = None if entries is None else SharedWeights(channel.receive_memory(entries))
        memory: SharedTensors | None = None
        while True:
            name, *arguments = pickle.loads(channel.receive_bytes())
            if name == "close":
                break
            if name == "collect":
                if weights is not None and isinstance(collector.policy, nn.Module):
                    weights.refresh(collector.policy)
                memory = _deliver(channel, collector.entries(), memory)
            else:
                channel.send(collector.answer(name, *arguments))
    except Closed:
        pass
    finally:
        env.close()


def _deliver(channel: Channel, batch: dict[NestedKey, Tensor], memory: SharedTensors | None) -> SharedTensors:
    """Copy a batch to the shared memory and return it; it is replaced when the entries have changed."""
    entries = [Entry(key, tuple(value.shape), value.dtype) for key, value in batch.items()]
    if memory is None or memory.entries != tuple(entries):
        channel.send(entries)
        memory = channel.share(entries)
    for key, value in batch.items():
        memory.tensors[key].copy_(value)
    channel.send()
    return memory

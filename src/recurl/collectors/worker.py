"""Collector in a worker process."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDict
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

__all__ = ["CollectorInfo", "serve_collector"]


class CollectorInfo(NamedTuple):
    """Properties of a worker's collector that the parent needs."""

    rows: torch.Size
    steps: int


class _WorkerCollector(Collector):
    """Collector that signals every step to the parent.

    Args:
        channel: connection to the parent.
        env: the environment.
        policy: the worker's copy of the policy.
        **options: further arguments of :class:`Collector`.
    """

    def __init__(self, channel: Channel, env: EnvBase, policy: Policy | None, **options: Any) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "frames_per_batch=")  # the parent has already warned
            super().__init__(env, policy, **options)
        self._channel = channel

    def new_trajectories(self) -> None:
        """Begin new trajectories in all rows."""
        self._trajectories.start_new()

    def _stepped(self, rows: int) -> None:
        super()._stepped(rows)
        self._channel.beat()


def serve_collector(
    channel: Channel, create_env_fn: Callable[[], EnvBase], policy: Policy | None, options: dict[str, Any]
) -> None:
    """Serve the parent's requests until it closes the worker or exits.

    Args:
        channel: connection to the parent.
        create_env_fn: function that creates the environment.
        policy: the worker's copy of the policy.
        options: further arguments of :class:`Collector`.
    """
    env = make_env(create_env_fn)
    try:
        collector = _WorkerCollector(channel, env, policy, **options)
        channel.send(CollectorInfo(collector.env.batch_size, collector.steps_per_batch))
        _Server(channel, collector).run()
    except Closed:
        pass
    finally:
        env.close()


class _Server:
    """Server of the parent's requests, which consist of a name and arguments."""

    def __init__(self, channel: Channel, collector: _WorkerCollector) -> None:
        self._channel = channel
        self._collector = collector
        self._weights: SharedWeights | None = None
        self._memory: SharedTensors | None = None

    def run(self) -> None:
        requests = {
            "begin": self._begin,
            "collect": self._collect,
            "seed": self._seed,
            "save": self._save,
            "load": self._load,
            "reset_rows": self._reset_rows,
            "close": self._close,
        }
        while True:
            name, *arguments = pickle.loads(self._channel.receive_bytes())
            requests[name](*arguments)

    def _begin(self, first_id: int, weights: tuple[Entry, ...] | None) -> None:
        TRAJECTORY_IDS.start_at(first_id)
        self._collector.new_trajectories()
        if weights is not None:
            self._weights = SharedWeights(self._channel.receive_memory(weights))

    def _collect(self) -> None:
        if self._weights is not None and isinstance(self._collector.policy, nn.Module):
            self._weights.refresh(self._collector.policy)
        self._deliver(self._collector.collect())

    def _deliver(self, batch: TensorDict) -> None:
        """Copy a batch to shared memory, which is reused unless the entries have changed."""
        leaves = cast(dict[NestedKey, Tensor], dict(batch.items(True, True)))
        entries = [Entry(key, tuple(value.shape), value.dtype) for key, value in leaves.items()]
        memory = self._memory
        if memory is None or memory.entries != tuple(entries):
            self._channel.send(entries)
            memory = self._memory = self._channel.share(entries)
        for key, value in leaves.items():
            memory.tensors[key].copy_(value)
        self._channel.send()

    def _seed(self, seed: int, own_seed: int) -> None:
        seed_everything(own_seed)
        self._collector.set_seed(seed)

    def _save(self) -> None:
        self._channel.send({"collector": self._collector.state_dict(), "rng": torch.get_rng_state()})

    def _load(self, state: dict[str, Any], first_id: int) -> None:
        TRAJECTORY_IDS.start_at(first_id)
        torch.set_rng_state(state["rng"])
        self._channel.send(self._collector.load_state_dict(state["collector"]))

    def _reset_rows(self, rows: Tensor) -> None:
        self._channel.send(self._collector.reset_rows(rows))

    def _close(self) -> None:
        raise Closed

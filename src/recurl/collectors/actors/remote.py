"""Actor side of collection in Ray."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import cloudpickle
import torch
from torch import nn

from recurl._version import __version__
from recurl.collectors.actors.arrays import Array, arrays_of, tensors_of
from recurl.collectors.worker import CollectorInfo, WorkerCollector, answer, leaves
from recurl.core.errors import UsageError
from recurl.core.keys import NestedKey
from recurl.core.seeding import seed_everything
from recurl.envs.registrations import register_all
from recurl.envs.workers_child import Failure
from recurl.envs.workers_env import make_env
from recurl.modules import EGreedyModule
from recurl.sequences.trajectories import TRAJECTORY_IDS

__all__ = ["ActorArguments", "CollectorActor", "ReadyActor", "SharedArguments", "versions"]


def versions() -> dict[str, str]:
    """Return the versions that must be the same in all processes of a run."""
    return {"recurl": __version__, "torch": torch.__version__}


class SharedArguments(NamedTuple):
    """Arguments shared by all actors of a collector."""

    registered: list[Any]
    policy: bytes
    """The pickled policy."""
    options: dict[str, Any]
    """Arguments of :class:`~recurl.collectors.Collector`."""


class ActorArguments(NamedTuple):
    """Arguments specific to one actor."""

    create_env_fn: bytes
    """A pickled function that creates the environment."""
    seed: int
    """Seed of the global generators of its process."""
    env_seed: int | None
    first_id: int
    """Start of the actor's block of trajectory ids."""
    epsilon: float | None
    """Probability of random actions; None for the policy's own."""


class ReadyActor(NamedTuple):
    """Reply of an actor that is ready."""

    info: CollectorInfo
    process: int


class CollectorActor:
    """Ray actor that runs a collector; the class name is the name of the process.

    Every request returns its result, or a :class:`~recurl.envs.workers_child.Failure` if it raised.
    """

    def __init__(self) -> None:
        self._collector: WorkerCollector | None = None
        self._epsilon: float | None = None
        self._loaded: str | None = None

    def begin(self, expected: dict[str, str], shared: bytes, own: bytes) -> ReadyActor | Failure:
        """Create the environment and the collector.

        Args:
            expected: the driver's :func:`versions`.
            shared: a pickled :class:`SharedArguments`.
            own: a pickled :class:`ActorArguments`.
        """
        try:
            return self._begin(expected, shared, own)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the driver raises it
            return Failure.of(error)

    def _begin(self, expected: dict[str, str], shared: bytes, own: bytes) -> ReadyActor:
        found = versions()
        if found != expected:
            differ = [
                f"{name} {found[name]} instead of {expected[name]}" for name in found if found[name] != expected[name]
            ]
            raise UsageError(
                f"Actors must run the same versions as the driver, but {platform.node()} has "
                f"{' and '.join(differ)}: install the same versions there."
            )
        torch.set_num_threads(1)
        registered, policy, options = cast(SharedArguments, cloudpickle.loads(shared))
        register_all(registered)
        mine = cast(ActorArguments, cloudpickle.loads(own))
        seed_everything(mine.seed)
        env = make_env(cloudpickle.loads(mine.create_env_fn))
        if mine.env_seed is not None:
            env.set_seed(mine.env_seed)
        TRAJECTORY_IDS.start_at(mine.first_id)
        self._collector = WorkerCollector(env, cloudpickle.loads(policy), **options)
        self._epsilon = mine.epsilon
        return ReadyActor(self._collector.info, os.getpid())

    def collect(self, weights: list[Any]) -> dict[NestedKey, Array] | Failure:
        """Return the next batch.

        Args:
            weights: reference to the acting weights in Ray's object store, which are loaded if they are new; empty
                without weights.
        """
        try:
            assert self._collector is not None
            if weights and weights[0].hex() != self._loaded:
                self._load_weights(weights[0])
            return arrays_of(leaves(self._collector))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the driver raises it
            return Failure.of(error)

    def _load_weights(self, reference: Any) -> None:
        assert self._collector is not None
        policy = self._collector.policy
        assert isinstance(policy, nn.Module)
        stored: Mapping[str, Array] = cast(Any, importlib.import_module("ray")).get(reference)
        policy.load_state_dict(tensors_of(stored))
        if self._epsilon is not None:
            for module in policy.modules():
                if isinstance(module, EGreedyModule):
                    module.eps.fill_(self._epsilon)
        self._loaded = reference.hex()

    def call(self, name: str, *arguments: Any) -> Any:
        """Handle another request; see :func:`~recurl.collectors.worker.answer`."""
        try:
            assert self._collector is not None
            return answer(self._collector, name, *arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the driver raises it
            return Failure.of(error)

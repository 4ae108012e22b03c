"""Actor side of collection in Ray."""

from __future__ import annotations

import importlib
import os
import platform
from typing import Any, NamedTuple, cast

import cloudpickle
import torch
from torch import nn

from recurl._version import __version__
from recurl.collectors.actors.arrays import arrays_of, tensors_of
from recurl.collectors.worker import CollectorInfo, WorkerCollector
from recurl.core.errors import UsageError
from recurl.core.keys import NestedKey
from recurl.core.seeding import seed_everything
from recurl.envs.registrations import register_all
from recurl.envs.workers_child import Failure
from recurl.envs.workers_env import make_env
from recurl.modules import EGreedyModule
from recurl.sequences.trajectories import TRAJECTORY_IDS

__all__ = ["ActorArguments", "CollectorActor", "versions"]


def versions() -> dict[str, str]:
    """Return the versions that must be the same in all processes of a run."""
    return {"recurl": __version__, "torch": torch.__version__}


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


class CollectorActor:
    """Ray actor that runs a collector; the class name is the name of the process."""

    def __init__(self) -> None:
        self._loaded: str | None = None

    def call(self, name: str, *arguments: Any) -> Any:
        """Return the answer to a request, or a :class:`~recurl.envs.workers_child.Failure` if it raised.

        Args:
            name: ``begin``, ``collect``, or a request of :meth:`~recurl.collectors.worker.WorkerCollector.answer`.
            *arguments: arguments of the request.
        """
        try:
            own = {"begin": self._begin, "collect": self._collect}
            return own[name](*arguments) if name in own else self._collector.answer(name, *arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the driver raises it
            return Failure.of(error)

    def _begin(self, expected: dict[str, str], shared: bytes, own: bytes) -> tuple[CollectorInfo, int]:
        """Create the environment and the collector, and return its properties and the process id.

        Args:
            expected: the driver's :func:`versions`.
            shared: the pickled registrations, policy, and arguments of :class:`~recurl.collectors.Collector`.
            own: a pickled :class:`ActorArguments`.
        """
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
        registered, policy, options = cloudpickle.loads(shared)
        register_all(registered)
        mine = cast(ActorArguments, cloudpickle.loads(own))
        seed_everything(mine.seed)
        env = make_env(cloudpickle.loads(mine.create_env_fn))
        if mine.env_seed is not None:
            env.set_seed(mine.env_seed)
        TRAJECTORY_IDS.start_at(mine.first_id)
        self._collector = WorkerCollector(env, cloudpickle.loads(policy), **options)
        self._epsilon = mine.epsilon
        return self._collector.info, os.getpid()

    def _collect(self, weights: list[Any]) -> dict[NestedKey, Any]:
        """Return the next batch.

        Args:
            weights: reference to the acting weights in Ray's object store, which are loaded if they are new; empty
                without weights.
        """
        if weights and weights[0].hex() != self._loaded:
            policy = self._collector.policy
            assert isinstance(policy, nn.Module)
            policy.load_state_dict(tensors_of(cast(Any, importlib.import_module("ray")).get(weights[0])))
            for module in policy.modules():
                if self._epsilon is not None and isinstance(module, EGreedyModule):
                    module.eps.fill_(self._epsilon)
            self._loaded = weights[0].hex()
        return arrays_of(self._collector.entries())

"""Collection in Ray actors."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Unpack, cast

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from recurl.collectors.actors.group import ActorGroup, Recipe, Replacement
from recurl.collectors.actors.session import RaySession
from recurl.collectors.asynchronous import AsynchronousCollector, Part, WorkerOptions
from recurl.collectors.background import Extendable
from recurl.core.errors import ArgumentError
from recurl.core.keys import WEIGHTS_LAG, WEIGHTS_VERSION, NestedKey
from recurl.envs import EnvBase
from recurl.envs.pickling import pickled
from recurl.envs.registrations import registrations
from recurl.envs.rollout import Policy
from recurl.envs.workers_env import creators

__all__ = ["RayCollector"]


class RayCollector(AsynchronousCollector):
    """Collects with Ray actors, each of which runs a :class:`~recurl.collectors.Collector` with its own environment.

    Weights are sent to the actors once per version, through Ray's object store; batches are returned as arrays, without
    pickling. Every batch also has, int64 ``[*B, T]``: ``("collector", "version")``, the version of the acting weights,
    and ``("collector", "lag")``, the number of newer versions. Only weights that an actor has received count as a
    version, so the newest version increases by at most one per batch. Trajectory ids are unique across all actors.

    An actor that dies, alone or with its node, is replaced, with a warning. Its unfinished batch is lost. Every
    delivered step was executed exactly once, in order, and the requested number of steps is delivered. The trajectories
    of the dead actor end without being done, and its successor begins new ones, so no trajectory spans both;
    :attr:`replacements` lists them. An actor that raises ends the collection with its traceback. All actors exit with
    this object and with this process.

    If the program has initialized Ray (``ray.init``), that instance is used. Otherwise, the collector connects to
    ``address``, or starts a Ray instance on this machine that listens only on the loopback interface and is shut down
    at the end.

    Args:
        create_env_fn: function that creates an environment, or a list of functions, one per actor; all environments
            must have the same batch size ``[*B]``.
        policy: maps a root to one with ``"action"``; random actions when None. Actors run it on the CPU.
        num_collectors: number of actors; the number of functions when None.
        frames_per_batch: number of frames in a batch, rounded up (with a warning) to whole steps.
        total_frames: number of frames after which collection stops, rounded up (with a warning) to whole batches; -1
            for no limit.
        sync: collect each batch with all actors together, like :class:`~recurl.collectors.MultiSyncCollector`;
            otherwise each batch comes from one actor, as soon as it is ready, as in
            :class:`~recurl.collectors.MultiAsyncCollector`.
        max_lag: maximum number of versions by which the weights of a batch may be older than the newest. With ``sync``,
            an actor may be this many batches ahead, so that it acts while this process learns; 0, the default with
            ``sync``, gives batches from the newest weights. Otherwise, at least the number of actors, or None for no
            limit: the collector waits for a batch that would become too old.
        cat_results: with ``sync``: ``"stack"`` (or None) yields ``[num_collectors, *B, T]``; a number concatenates
            along that dimension of ``[*B, T]``.
        epsilons: probability of random actions for each actor, replacing that of the policy's
            :class:`~recurl.modules.EGreedyModule`; None for the policy's own.
        address: ``HOST:PORT`` of a Ray cluster, or ``"auto"``, if the program has not initialized Ray.
        num_cpus: CPUs that Ray reserves for each actor; by default 1, or 0 in a Ray instance started here.
        max_restarts: maximum number of successive replacements of an actor without a delivered batch.
        timeout: maximum seconds per batch before an actor counts as hung and is replaced; None for no limit.
        init_random_frames: number of initial frames with random actions, summed over actors.
        postproc: function applied to every batch, in this process; its result is yielded.
        replay_buffer: object whose ``extend(batch)`` receives the batches; see ``Collector``.
        storing_device: device of the batches.
        **options: ``reset_at_each_iter``, ``set_truncated``, ``max_frames_per_traj``,
            ``auto_register_policy_transforms``, ``device`` and ``exploration_type``; see ``Collector``.

    Attributes:
        discarded_frames: upper bound on the frames of batches ready or in progress when the collector was shut down.

    Raises:
        ArgumentError: a number is out of range, the batch sizes of the actors differ, ``address`` does not answer, or
            too few CPUs of the cluster are free.
        ArgumentTypeError: an argument is unknown, not callable, or can't be pickled; the message names the part.
        MissingDependencyError: Ray is not installed.
        UsageError: an actor has another version of recurl or torch.
        WorkerError: an actor did not start, or died too often.
        RecurlError: the ``Collector`` in an actor raised this error.
    """

    def __init__(  # noqa: PLR0913 - the customary arguments
        self,
        create_env_fn: Callable[[], EnvBase] | Sequence[Callable[[], EnvBase]],
        policy: Policy | None = None,
        *,
        num_collectors: int | None = None,
        frames_per_batch: int,
        total_frames: int = -1,
        sync: bool = True,
        max_lag: int | None = None,
        cat_results: str | int | None = None,
        epsilons: Sequence[float] | None = None,
        address: str | None = None,
        num_cpus: float | None = None,
        max_restarts: int = 3,
        timeout: float | None = None,
        init_random_frames: int = 0,
        postproc: Callable[[TensorDict], Any] | None = None,
        replay_buffer: Extendable | None = None,
        storing_device: torch.device | str = "cpu",
        **options: Unpack[WorkerOptions],
    ) -> None:
        functions = _functions(create_env_fn, num_collectors)
        count = self.num_collectors = len(functions)
        _check_numbers(count, epsilons, max_restarts, timeout, num_cpus)
        recipe = self._recipe = Recipe(functions, epsilons)

        def connect(given: dict[str, Any]) -> ActorGroup:
            shared = pickled("options", (registrations(), pickled("policy", _on_cpu(policy)), given))
            session = RaySession(address)
            try:
                needed = (0.0 if session.is_private else 1.0) if num_cpus is None else num_cpus
                session.check_free(count, needed)
            except BaseException:
                session.close()
                raise
            limits: dict[str, Any] = {"num_cpus": needed, "max_restarts": max_restarts, "timeout": timeout}
            return ActorGroup(session, recipe, count, shared, policy, **limits)

        super().__init__(
            connect,
            policy,
            count,
            "actors",
            sync=sync,
            max_lag=_checked_lag(max_lag, count, sync=sync),
            cat_results=cat_results,
            frames_per_batch=frames_per_batch,
            total_frames=total_frames,
            init_random_frames=init_random_frames,
            postproc=postproc,
            replay_buffer=replay_buffer,
            storing_device=storing_device,
            **options,
        )
        self._group = cast(ActorGroup, self._transport)
        self.discarded_frames = 0

    @property
    def processes(self) -> list[int]:
        """Process ids of the actors, each on the actor's machine; 0 for an actor that is starting."""
        return [actor.process for actor in self._group.actors]

    @property
    def replacements(self) -> list[Replacement]:
        """The actors that died, in order."""
        return self._group.replacements

    @property
    def lost_frames(self) -> int:
        """Upper bound on the frames executed but not delivered because their actors died."""
        return sum(replacement.lost_frames for replacement in self.replacements)

    def _entries(self, part: Part) -> dict[NestedKey, Tensor]:
        """Return the entries of a part, with the weights version and the lag at every step."""
        shape = [*self._rows, self.steps_per_batch]
        numbers = {WEIGHTS_VERSION: part.version, WEIGHTS_LAG: self.version - part.version}
        return {**part.entries, **{key: torch.full(shape, number) for key, number in numbers.items()}}

    def _state_dict(self) -> dict[str, Any]:
        return {**super()._state_dict(), "replaced": self._recipe.replaced + len(self.replacements)}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore a :meth:`state_dict`.

        Returns:
            Whether the states of all environments were restored; see :meth:`Collector.load_state_dict`.

        Raises:
            ArgumentError: the state was saved with another number of actors.
        """
        restored = super().load_state_dict(state)
        self._recipe.replaced = state["replaced"]
        return restored

    def _close(self) -> None:
        if self._group.actors:
            self.discarded_frames = self._outstanding * self.steps_per_batch * self._rows.numel()
        super()._close()


def _functions(create_env_fn: Any, count: int | None) -> list[Callable[[], Any]]:
    if count is None:
        if not isinstance(create_env_fn, Sequence):
            raise ArgumentError("Pass num_collectors, the number of actors, or a list with one function per actor.")
        count = len(create_env_fn)
    if count < 1:
        raise ArgumentError(f"num_collectors must be at least 1, got {count}.")
    return creators(count, create_env_fn)


def _checked_lag(max_lag: int | None, count: int, *, sync: bool) -> int | None:
    if sync:
        max_lag = max_lag or 0
        if max_lag < 0:
            raise ArgumentError(f"max_lag must not be negative, got {max_lag}.")
    elif max_lag is not None and max_lag < count:
        raise ArgumentError(
            f"max_lag must be at least the number of actors, {count}, if each collects separate batches, since the "
            f"batches of all other actors may be learned from before its own; got {max_lag}. Use sync=True."
        )
    return max_lag


def _check_numbers(
    count: int, epsilons: Sequence[float] | None, max_restarts: int, timeout: float | None, num_cpus: float | None
) -> None:
    if epsilons is not None and len(epsilons) != count:
        raise ArgumentError(f"There must be one epsilon for each of the {count} actors, got {len(epsilons)}.")
    if max_restarts < 0:
        raise ArgumentError(f"max_restarts must not be negative, got {max_restarts}.")
    if timeout is not None and not timeout > 0:  # also rejects NaN
        raise ArgumentError(f"timeout must be positive, or None for no limit, got {timeout}.")
    if num_cpus is not None and not 0 <= num_cpus < math.inf:
        raise ArgumentError(f"num_cpus must not be negative, got {num_cpus}.")


def _on_cpu(policy: Policy | None) -> Policy | None:
    if not isinstance(policy, nn.Module):
        return policy
    tensors = itertools.chain(policy.parameters(), policy.buffers())
    return policy if all(tensor.device.type == "cpu" for tensor in tensors) else copy.deepcopy(policy).cpu()

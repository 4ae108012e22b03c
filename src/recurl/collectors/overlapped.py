"""Collection in a worker process that overlaps with learning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from recurl.collectors.multi import MultiCollector
from recurl.collectors.weights import Weights
from recurl.core.errors import UsageError
from recurl.core.keys import NestedKey
from recurl.core.spans import WAITING, span
from recurl.envs import EnvBase
from recurl.envs.rollout import Policy
from recurl.sequences.trajectories import TRAJECTORY_IDS

__all__ = ["OverlappedCollector"]


class OverlappedCollector(MultiCollector):
    """Collects each batch ``[*B, T]`` in a worker while this process learns from the previous one.

    A batch begins when the previous one is fetched, with the policy's weights at that time: the first batch is
    on-policy, and every later one is exactly one update old. Its log-probabilities are those of the acting weights, so
    importance ratios are correct. The same seed gives the same batches, regardless of the speed of either process.

    Args:
        create_env_fn: function that creates the environment, in the worker.
        policy: maps a root to one with ``"action"``; random actions when None. Its current weights are sent to the
            worker at the beginning of each batch.
        **arguments: further arguments of ``MultiCollector``; see :class:`~recurl.collectors.MultiSyncCollector`.

    Raises:
        ArgumentError: a number is out of range.

    Example:
        >>> from recurl.envs import GymEnv
        >>> create = lambda: GymEnv("CartPole-v1", num_envs=2)
        >>> with OverlappedCollector(create, frames_per_batch=20, total_frames=40) as collector:
        ...     [batch.shape for batch in collector]
        [torch.Size([2, 10]), torch.Size([2, 10])]
    """

    def __init__(self, create_env_fn: Callable[[], EnvBase], policy: Policy | None = None, **arguments: Any) -> None:
        super().__init__([create_env_fn], policy, **arguments)
        self._source: Any = policy
        self._fetched: dict[NestedKey, Tensor] | None = None

    def _workers_per_batch(self) -> int:
        return 1

    def _collect(self) -> TensorDict:
        with span(WAITING):
            batch = self._wait()
        self._fetched = None
        self._start()
        return self._tensordict(batch, [*self._rows, self.steps_per_batch])

    def _start(self) -> None:
        # The worker is idle, so it can't read partially written weights.
        if self._weights is not None:
            self._write_weights(self._source)
        self._ask([0])

    def _wait(self) -> dict[NestedKey, Tensor]:
        """Wait for the current batch and return it; the worker is then idle."""
        if self._fetched is None:
            if not self._collecting:
                self._start()
            self._next_batch()
            self._fetched = {key: value.clone() for key, value in self._memory[0].tensors.items()}
        return self._fetched

    def update_policy_weights_(self, weights: Weights | None = None) -> None:
        """Set the source of the weights for the batches that begin after this call.

        Args:
            weights: module, state dict, or TensorDict of parameters; when None, the policy passed to the constructor.

        Raises:
            UsageError: the policy is not a module, so it has no weights; or the collector was shut down.
        """
        self._check_idle()
        if self._weights is None:
            raise UsageError(f"Only an nn.Module has weights to update, got a policy {type(self._policy).__name__}.")
        self._source = self._policy if weights is None else weights

    def reset_rows(self, rows: Tensor) -> None:
        """Begin new episodes in some rows after the current batch; see :meth:`Collector.reset_rows`."""
        self._check_idle()
        if self._collecting:
            self._wait()
        self._query_all("reset_rows", rows)

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state for exact continuation; waits for the current batch, which is included.

        It consists of tensors and plain Python values; see :meth:`Collector.state_dict`.
        """
        return self._between_batches(self._state_dict)

    def _state_dict(self) -> dict[str, Any]:
        has_batch = bool(self._collecting) or self._fetched is not None
        batch = dict(self._wait()) if has_batch else None
        return {"frames": self.frames, "batch": batch, "worker": self._query_all("save")[0]}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore a :meth:`state_dict`.

        Returns:
            Whether the environment's state was restored; see :meth:`Collector.load_state_dict`.
        """
        self._check_idle()
        if self._collecting:
            self._wait()
        self._fetched = state["batch"]
        TRAJECTORY_IDS.skip(state["worker"]["collector"]["traj_ids"])
        self.frames = state["frames"]
        return self._query_all("load", state["worker"], TRAJECTORY_IDS.reserve())[0]

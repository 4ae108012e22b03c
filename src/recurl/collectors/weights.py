"""Sharing of policy weights with worker processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from recurl.core.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from recurl.envs.workers_memory import SharedTensors

__all__ = ["SharedWeights", "Weights", "matching", "state_of", "tensors_of_policy"]

Weights: TypeAlias = nn.Module | TensorDictBase | dict[str, Tensor]

_VERSION = ("recurl", "version")


def state_of(weights: Any) -> dict[str, Tensor]:
    """Return the state dict of weights given as a module, a TensorDict or a state dict.

    Example:
        >>> list(state_of(nn.Linear(1, 1)))
        ['weight', 'bias']
    """
    if isinstance(weights, TensorDictBase):
        return cast(dict[str, Tensor], weights.flatten_keys(".").to_dict())
    return weights.state_dict() if isinstance(weights, nn.Module) else weights


def tensors_of_policy(policy: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a policy whose weights are sent to other processes.

    Raises:
        UnsupportedError: the state dict contains anything but tensors.
    """
    state = policy.state_dict()
    other = [name for name, value in state.items() if not isinstance(value, Tensor)]  # pyright: ignore[reportUnnecessaryIsInstance] - extra state
    if other:
        raise UnsupportedError(
            f"Only tensors can be shared with workers, but the policy's state dict also has {other}."
        )
    return state


def matching(weights: Weights, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights as a state dict with the names and shapes of ``like``.

    Raises:
        ArgumentError: names or shapes differ.
    """
    state = state_of(weights)
    expected, given = _shapes(like), _shapes(state)
    if given != expected:
        differ = sorted(n for n in given.keys() | expected.keys() if given.get(n) != expected.get(n))
        raise ArgumentError(f"The weights must have the policy's names and shapes, but they differ in {differ}.")
    return state


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    """Return the shapes of the tensors of a state dict, and None for extra state."""
    return {name: tuple(value.shape) if isinstance(value, Tensor) else None for name, value in state.items()}


class SharedWeights:
    """Weights in memory shared with workers, which reload them when they have changed.

    Args:
        memory: shared memory of the weights and their version number.
    """

    def __init__(self, memory: SharedTensors) -> None:
        self.memory = memory
        self._values = cast(dict[str, Tensor], {k: v for k, v in memory.tensors.items() if k != _VERSION})
        self._version = memory.tensors[_VERSION]
        self._seen = -1

    @classmethod
    def of(cls, policy: nn.Module) -> SharedWeights:
        """Return the weights of ``policy`` in new shared memory.

        Raises:
            UnsupportedError: the state dict of ``policy`` holds anything but tensors.
        """
        from recurl.envs.workers_memory import Entry, SharedTensors  # noqa: PLC0415 - for worker processes only

        state = tensors_of_policy(policy)
        entries = [Entry(name, tuple(value.shape), value.dtype) for name, value in state.items()]
        shared = cls(SharedTensors([*entries, Entry(_VERSION, (), torch.int64)]))
        shared.write(state)
        return shared

    def write(self, weights: Weights, seconds: float | None = None) -> None:
        """Replace the weights.

        Args:
            weights: the new weights.
            seconds: maximum time to wait for workers that are reading; None for no limit.

        Raises:
            ArgumentError: names or shapes differ from the policy's.
            WorkerError: a worker takes longer than ``seconds`` to read.
        """
        state = matching(weights, self._values)
        with torch.no_grad(), self.memory.lock(seconds):
            for name, value in self._values.items():
                value.copy_(state[name])
            self._version += 1

    def refresh(self, policy: nn.Module) -> None:
        """Load the weights into ``policy`` if they have changed since the last call."""
        if int(self._version) != self._seen:
            with self.memory.lock():
                self._seen = int(self._version)
                policy.load_state_dict(cast(Any, self._values))

"""Base class of replay buffer storages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.core.keys import NestedKey

__all__ = ["Storage"]


class Storage(ABC):
    """Base class of storages of ``max_size`` items, addressed by position.

    The first ``ndim`` dimensions of the data index items. With ``ndim=1`` a batch ``[N, ...]`` is N items. With
    ``ndim=2`` a batch ``[B, T]`` adds T steps to each of B lanes, which are rings of ``max_size // B`` steps, so that
    trajectories continue across batches.

    Attributes:
        lanes: number of lanes; 0 before the first data is added.
    """

    def __init__(self, max_size: int, ndim: int) -> None:
        if max_size < 1 or ndim < 1:
            raise ArgumentError(f"max_size and ndim must be positive, got {max_size} and {ndim}.")
        self.max_size = max_size
        self.ndim = ndim
        self.lanes = 0

    @property
    def capacity(self) -> int:
        """Number of steps that each lane can hold; known once data is added."""
        return self.max_size // max(self.lanes, 1)

    def prepare(self, data: Any) -> None:
        """Allocate memory at the first call, and check that ``data``, of batch size ``[*B, n, ...]``, can be stored.

        Raises:
            ArgumentError: the data has fewer than ``ndim`` batch dimensions, more rows than ``max_size``, or a
                different number of rows than before.
        """
        shape = self.batch_shape(data)
        if len(shape) < self.ndim:
            raise ArgumentError(
                f"A storage with ndim={self.ndim} needs data with at least as many batch dimensions, got shape "
                f"{tuple(shape)}."
            )
        lanes = shape[: self.ndim - 1].numel()
        if self.lanes == 0:
            if not 0 < lanes <= self.max_size:
                raise ArgumentError(f"Data of {lanes} rows doesn't fit into a storage of max_size={self.max_size}.")
            self.lanes = lanes
        elif lanes != self.lanes:
            raise ArgumentError(f"Data must have {self.lanes} rows, one per lane of the storage, got {lanes} rows.")

    @property
    def keys(self) -> set[NestedKey]:
        """Keys of the stored entries; empty before the first data is added, and for a list."""
        return set()

    def write(self, index: Tensor, entries: dict[NestedKey, Tensor]) -> None:
        """Overwrite some of the entries, each ``[N, ...]``, at ``index``, int64 ``[N]`` on the CPU.

        Raises:
            UnsupportedError: the storage is a list.
        """
        raise UnsupportedError(f"{type(self).__name__} can't change single entries: use LazyTensorStorage.")

    @abstractmethod
    def batch_shape(self, data: Any) -> torch.Size:
        """Return the batch dimensions of ``data``, which may index items."""

    @abstractmethod
    def set(self, index: Tensor, data: Any) -> None:
        """Write data ``[*B, n, ...]`` at positions ``index``, int64 with ``prod(B) * n`` elements."""

    @abstractmethod
    def get(self, index: Tensor) -> Any:
        """Return a copy of the items at ``index``, int64 ``[N]`` on the CPU, as a batch ``[N, ...]``."""

    @abstractmethod
    def state_dict(self, filled: int) -> dict[str, Any]:
        """Return the contents as tensors and plain Python values; each lane holds ``filled`` steps."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the contents from a :meth:`state_dict`."""

    @abstractmethod
    def dumps(self, path: Path, filled: int) -> None:
        """Write the contents to the folder ``path``; each lane holds ``filled`` steps."""

    @abstractmethod
    def loads(self, path: Path) -> None:
        """Restore the contents written by :meth:`dumps`."""

"""The base of all specs."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar, cast

import torch

from recurl.errors import ArgumentError

_S = TypeVar("_S", bound="TensorSpec")
Device: TypeAlias = torch.device | str | None


class TensorSpec(ABC):
    """Base of all specs.

    Attributes:
        shape: shape of the tensors described, batch dimensions included.
        dtype: their dtype (``None`` for a :class:`Composite`).
        device: where :meth:`rand` and :meth:`zero` create them (``None``: torch's default device).
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype | None, device: Device) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.device = None if device is None else torch.device(device)

    @abstractmethod
    def rand(self) -> Any:
        """Return a random member of the domain, from torch's global random generator."""

    @abstractmethod
    def is_in(self, value: Any) -> bool:
        """Return whether ``value`` has the shape and dtype of this spec and lies in its domain."""

    def zero(self) -> Any:
        """Return zeros of the shape and dtype of this spec (which need not lie in its domain)."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    def expand(self: _S, *shape: int | Sequence[int]) -> _S:
        """Return this spec with the shape ``shape``, which must end with its present shape.

        Raises:
            ArgumentError: ``shape`` does not end with the present shape.

        Example:
            >>> from recurl.specs import Unbounded
            >>> Unbounded(3).expand(8, 3).shape
            torch.Size([8, 3])
        """
        target = as_size(shape)
        if len(target) < len(self.shape) or target[len(target) - len(self.shape) :] != self.shape:
            raise ArgumentError(
                f"A spec of shape {list(self.shape)} can't expand to {list(target)}: it must end with it."
            )
        out = self.clone()
        out.shape = target
        return out

    def to(self: _S, device: Device) -> _S:
        """Return this spec for tensors on ``device``."""
        out = self.clone()
        out.device = None if device is None else torch.device(device)
        return out

    def clone(self: _S) -> _S:
        """Return an independent copy."""
        return copy.copy(self)

    def _domain(self) -> tuple[Any, ...]:
        """Return what, besides shape, dtype and device, makes two specs equal."""
        return ()

    def _fits(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.shape == self.shape and value.dtype == self.dtype

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return False
        other = cast(TensorSpec, other)
        same = (self.shape, self.dtype, self.device) == (other.shape, other.dtype, other.device)
        return same and self._domain() == other._domain()

    __hash__ = None  # type: ignore[assignment] # mutable

    def __repr__(self) -> str:
        domain = "".join(f", {value}" for value in self._domain())
        return f"{type(self).__name__}(shape={list(self.shape)}, dtype={self.dtype}, device={self.device}{domain})"


def as_size(shape: tuple[int | Sequence[int], ...]) -> torch.Size:
    """Return ``shape``, given as several ints or as one sequence, as a size."""
    if len(shape) == 1 and not isinstance(shape[0], int):
        return torch.Size(shape[0])
    return torch.Size(cast(tuple[int, ...], shape))

"""Base class of all specs."""

from __future__ import annotations

import copy
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import torch

from recurl.core.errors import ArgumentError, ArgumentTypeError

_S = TypeVar("_S", bound="TensorSpec")
Device: TypeAlias = torch.device | str | None


class TensorSpec(ABC):
    """Base class of all specs.

    Args:
        shape: shape of the tensors, an int or a sequence of ints.
        dtype: dtype of the tensors.
        device: device of the tensors.

    Raises:
        ArgumentTypeError: the shape or dtype has the wrong type.
        ArgumentError: a size is negative, or the device doesn't exist.

    Attributes:
        shape: shape of the tensors, including batch dimensions.
        dtype: dtype of the tensors (``None`` for a :class:`Composite`).
        device: device on which :meth:`rand` and :meth:`zero` create tensors (``None``: torch's default device).
    """

    def __init__(self, shape: int | Sequence[int], dtype: torch.dtype | None, device: Device) -> None:
        if dtype is not None and not isinstance(dtype, torch.dtype):  # type: ignore[reportUnnecessaryIsInstance] # users
            raise ArgumentTypeError(f"The dtype of a spec must be a torch.dtype, such as torch.float32, got {dtype!r}.")
        self.shape = as_size(shape)
        self.dtype = dtype
        self.device = _device(device)

    @abstractmethod
    def rand(self) -> Any:
        """Return a random sample of the domain, drawn from torch's global generator."""

    @abstractmethod
    def is_in(self, value: Any) -> bool:
        """Return whether ``value`` has the shape and dtype of this spec and is in its domain."""

    def zero(self) -> Any:
        """Return zeros of this spec's shape and dtype, which need not be in its domain."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    def expand(self: _S, *shape: int | Sequence[int]) -> _S:
        """Return this spec expanded to ``shape``, which must end with the current shape.

        Raises:
            ArgumentError: ``shape`` does not end with the current shape.

        Example:
            >>> from recurl.core.specs import Unbounded
            >>> Unbounded(3).expand(8, 3).shape
            torch.Size([8, 3])
        """
        target = as_size(cast(Any, shape[0] if len(shape) == 1 else shape))
        if len(target) < len(self.shape) or target[len(target) - len(self.shape) :] != self.shape:
            raise ArgumentError(
                f"A spec of shape {list(self.shape)} can't expand to {list(target)}: the new shape must end with the "
                "shape of the spec."
            )
        out = self.clone()
        out.shape = target
        return out

    def flatten(self: _S, dims: int) -> _S:
        """Return this spec with its first ``dims`` dimensions flattened into one.

        Example:
            >>> from recurl.core.specs import Unbounded
            >>> Unbounded(2, 4, 3).flatten(2).shape
            torch.Size([8, 3])
        """
        out = self.clone()
        out.shape = torch.Size([self.shape[:dims].numel(), *self.shape[dims:]])
        return out

    def to(self: _S, device: Device) -> _S:
        """Return this spec for tensors on ``device``."""
        out = self.clone()
        out.device = _device(device)
        return out

    def clone(self: _S) -> _S:
        """Return an independent copy."""
        return copy.copy(self)

    def _domain(self) -> tuple[Any, ...]:
        """Return the values, other than shape, dtype, and device, that determine equality."""
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


def as_size(shape: int | Sequence[int]) -> torch.Size:
    """Return ``shape`` as a ``torch.Size``.

    Raises:
        ArgumentTypeError: ``shape`` is neither an int nor a sequence of ints.
        ArgumentError: a size is negative.
    """
    sizes = list(shape) if isinstance(shape, Iterable) else [shape]
    try:
        found = torch.Size([operator.index(size) for size in sizes])
    except TypeError as error:
        raise ArgumentTypeError(f"A shape must be an int or a sequence of ints, got {shape!r}.") from error
    if any(size < 0 for size in found):
        raise ArgumentError(f"The sizes of a shape must not be negative, got {list(found)}.")
    return found


def _device(device: Device) -> torch.device | None:
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        message = str(error).splitlines()[0]
        raise ArgumentError(f"The device of a spec must be a torch device, got {device!r}: {message}") from error

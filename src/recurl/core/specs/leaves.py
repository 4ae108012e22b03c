"""Specs of individual tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch

from recurl.core.errors import ArgumentError, ArgumentTypeError
from recurl.core.specs.base import Device, TensorSpec, as_size


class Unbounded(TensorSpec):
    """Any value of the dtype. Random floats are standard normal, random integers uniform over the dtype's range.

    Args:
        *sizes: shape, as ints or one sequence.
        shape: shape, as an int or a sequence.
        device: see :class:`TensorSpec`.
        dtype: torch's default dtype when None.

    Example:
        >>> Unbounded(2, 3).is_in(torch.zeros(2, 3))
        True
    """

    def __init__(
        self,
        *sizes: int | Sequence[int],
        shape: int | Sequence[int] | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if sizes and shape is not None:
            raise ArgumentError(f"A shape must be given once, got {sizes} and shape={shape!r}.")
        given: Any = sizes[0] if len(sizes) == 1 else sizes if shape is None else shape
        super().__init__(given, dtype or torch.get_default_dtype(), device)

    def rand(self) -> torch.Tensor:
        """Return a standard normal sample (floats) or uniform integers."""
        dtype = cast(torch.dtype, self.dtype)
        if dtype.is_floating_point:
            return torch.randn(self.shape, dtype=dtype, device=self.device)
        if dtype is torch.bool:
            return torch.randint(0, 2, self.shape, device=self.device).bool()
        info = torch.iinfo(dtype)
        return torch.randint(max(info.min, -(2**62)), min(info.max, 2**62), self.shape, device=self.device).to(dtype)

    def is_in(self, value: Any) -> bool:
        """Return whether ``value`` has the shape and dtype of this spec."""
        return self._fits(value)


class Bounded(TensorSpec):
    """Values between ``low`` and ``high``, inclusive; either bound may be infinite.

    Args:
        low: lower bound, a number or a tensor that broadcasts to ``shape``.
        high: upper bound, a number or a tensor that broadcasts to ``shape``.
        shape: shape of the values; the broadcast shape of the bounds when None.
        device: see :class:`TensorSpec`.
        dtype: torch's default dtype when None.

    Raises:
        ArgumentError: ``low > high`` somewhere, or a bound does not broadcast to ``shape`` or fit the dtype.

    Example:
        >>> Bounded(-2.0, 2.0, shape=(1,)).is_in(torch.tensor([2.5]))
        False
    """

    def __init__(
        self,
        low: float | torch.Tensor,
        high: float | torch.Tensor,
        shape: int | Sequence[int] | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        dtype = dtype or torch.get_default_dtype()
        size = None if shape is None else as_size(shape)
        low, high = (_bound(name, bound, dtype) for name, bound in (("low", low), ("high", high)))
        try:
            size = torch.broadcast_shapes(low.shape, high.shape) if size is None else size
            self._low, self._high = low.expand(size), high.expand(size)
        except RuntimeError as error:
            raise ArgumentError(
                f"The bounds must broadcast to the shape of the spec, got low {list(low.shape)}, "
                f"high {list(high.shape)} and shape {None if size is None else list(size)}."
            ) from error
        if not bool((self._low <= self._high).all()):
            raise ArgumentError(f"Every low must be <= its high, got low={low} and high={high}.")
        super().__init__(size, dtype, device)
        self._low, self._high = self._low.to(self.device), self._high.to(self.device)

    def to(self, device: Device) -> Bounded:
        """Return this spec, and its bounds, for tensors on ``device``."""
        out = super().to(device)
        out._low, out._high = self._low.to(out.device), self._high.to(out.device)
        return out

    def flatten(self, dims: int) -> Bounded:
        """Return this spec with its first ``dims`` dimensions flattened into one."""
        out = super().flatten(dims)
        out._low, out._high = (bound.expand(self.shape).reshape(out.shape) for bound in (self._low, self._high))
        return out

    @property
    def low(self) -> torch.Tensor:
        """Lower bounds, with the spec's shape and device."""
        return self._low.expand(self.shape)

    @property
    def high(self) -> torch.Tensor:
        """Upper bounds, with the spec's shape and device."""
        return self._high.expand(self.shape)

    def rand(self) -> torch.Tensor:
        """Return a uniform sample, or a standard normal one clamped to the bounds where a bound is infinite."""
        dtype = cast(torch.dtype, self.dtype)
        low, high = self.low.double(), self.high.double()
        width = high - low
        if not dtype.is_floating_point:
            sample = low + torch.rand(self.shape, dtype=torch.float64, device=self.device) * (width + 1)
            return sample.floor().minimum(high).to(dtype)
        uniform = low + torch.rand(self.shape, dtype=torch.float64, device=self.device) * width
        normal = torch.randn(self.shape, dtype=torch.float64, device=self.device).clamp(low, high)
        return torch.where(width.isfinite(), uniform, normal).to(dtype).clamp(self.low, self.high)

    def is_in(self, value: Any) -> bool:
        """Return whether ``value`` has the shape and dtype of this spec and is within the bounds."""
        if not self._fits(value):
            return False
        return bool(((value >= self._low.to(value.device)) & (value <= self._high.to(value.device))).all())

    def _domain(self) -> tuple[Any, ...]:
        return (self._low.expand(self.shape).tolist(), self._high.expand(self.shape).tolist())

    def __repr__(self) -> str:
        low, high = float(self._low.double().min()), float(self._high.double().max())
        about = f"shape={list(self.shape)}, dtype={self.dtype}, device={self.device}"
        return f"Bounded({about}, smallest low={low:g}, largest high={high:g})"


class Categorical(TensorSpec):
    """Integers ``0 .. n-1``.

    Args:
        n: number of values, at least 1.
        shape: shape of the values.
        device: see :class:`TensorSpec`.
        dtype: dtype of the values.

    Raises:
        ArgumentError: ``n`` is not a positive integer, or the dtype can't represent ``n`` categories.

    Example:
        >>> Categorical(4).is_in(torch.tensor(3))
        True
    """

    def __init__(
        self, n: int, shape: int | Sequence[int] = (), device: Device = None, dtype: torch.dtype = torch.int64
    ) -> None:
        super().__init__(shape, dtype, device)
        self.n = _check_capacity(_category_count(n), dtype)

    def rand(self) -> torch.Tensor:
        """Return uniform integers."""
        return torch.randint(0, self.n, self.shape, dtype=self.dtype, device=self.device)

    def is_in(self, value: Any) -> bool:
        """Return whether ``value`` has the shape and dtype of this spec and is in ``0 .. n-1``."""
        return self._fits(value) and bool(((value >= 0) & (value < self.n)).all())

    def _domain(self) -> tuple[Any, ...]:
        return (self.n,)


class OneHot(TensorSpec):
    """One-hot vectors of length ``n`` along the last dimension.

    Args:
        n: number of categories, at least 1.
        shape: shape of the values, ending with ``n``; ``(n,)`` when None.
        device: see :class:`TensorSpec`.
        dtype: dtype of the values.

    Raises:
        ArgumentError: the last dimension of ``shape`` is not ``n``.

    Example:
        >>> OneHot(3).is_in(torch.tensor([0, 1, 0]))
        True
    """

    def __init__(
        self,
        n: int,
        shape: int | Sequence[int] | None = None,
        device: Device = None,
        dtype: torch.dtype = torch.int64,
    ) -> None:
        self.n = _category_count(n)
        size = as_size(self.n if shape is None else shape)
        if not size or size[-1] != self.n:
            raise ArgumentError(f"The last dimension of a OneHot spec must be n={n}, got shape {list(size)}.")
        super().__init__(size, dtype, device)

    def rand(self) -> torch.Tensor:
        """Return uniform one-hot vectors."""
        index = torch.randint(0, self.n, self.shape[:-1], device=self.device)
        return torch.nn.functional.one_hot(index, self.n).to(self.dtype)

    def is_in(self, value: Any) -> bool:
        """Return whether ``value`` has the shape and dtype of this spec and every vector is one-hot."""
        if not self._fits(value):
            return False
        return bool(((value == 0) | (value == 1)).all()) and bool((value.sum(-1) == 1).all())

    def _domain(self) -> tuple[Any, ...]:
        return (self.n,)


class MultiCategorical(TensorSpec):
    """Several integers, the i-th in ``0 .. nvec[i]-1``.

    Args:
        nvec: number of values of each integer, each at least 1; nested sequences for several dimensions.
        shape: shape of the values, ending with the shape of ``nvec``; the shape of ``nvec`` when None.
        device: see :class:`TensorSpec`.
        dtype: dtype of the values.

    Attributes:
        nvec: numbers of values, as (nested) tuples.
        sizes: the same numbers as a flat tuple.

    Raises:
        ArgumentError: the shape does not end with the shape of ``nvec``, or the dtype can't represent a number.
        ArgumentTypeError: ``nvec`` is not a sequence of numbers.

    Example:
        >>> MultiCategorical([2, 5]).is_in(torch.tensor([1, 4]))
        True
        >>> MultiCategorical([[2, 5], [3, 3]]).shape
        torch.Size([2, 2])
    """

    def __init__(
        self,
        nvec: Sequence[Any],
        shape: int | Sequence[int] | None = None,
        device: Device = None,
        dtype: torch.dtype = torch.int64,
    ) -> None:
        self.nvec = _nested_tuple(nvec)
        try:
            self._sizes = torch.tensor(self.nvec, dtype=torch.int64)
        except ValueError as error:
            raise ArgumentError(f"The rows of nvec must have equal lengths, got {self.nvec}.") from error
        self.sizes: tuple[int, ...] = tuple(self._sizes.flatten().tolist())
        inner = self._sizes.shape
        size = inner if shape is None else as_size(shape)
        if len(size) < len(inner) or size[len(size) - len(inner) :] != inner:
            raise ArgumentError(
                f"The last dimensions of a MultiCategorical spec must be those of nvec, {list(inner)}, "
                f"got shape {list(size)}."
            )
        super().__init__(size, dtype, device)
        _check_capacity(max(self.sizes, default=1), dtype)

    def rand(self) -> torch.Tensor:
        """Return uniform integers."""
        sizes = self._sizes_on(self.device)
        sample = torch.rand(self.shape, dtype=torch.float64, device=self.device) * sizes
        return sample.long().minimum(sizes - 1).to(self.dtype)

    def is_in(self, value: Any) -> bool:
        """Return whether ``value`` has the shape and dtype of this spec and every integer is in its range."""
        if not self._fits(value):
            return False
        return bool(((value >= 0) & (value < self._sizes_on(value.device))).all())

    def _sizes_on(self, device: torch.device | None) -> torch.Tensor:
        """Return the sizes on a device; they are copied there the first time only."""
        if self._sizes.device != device and device is not None:
            self._sizes = self._sizes.to(device)
        return self._sizes

    def _domain(self) -> tuple[Any, ...]:
        return (self.nvec,)


class Binary(TensorSpec):
    """Zeros and ones (or False and True).

    Args:
        size: shape of the values, an int or a sequence. An int passed along with ``shape`` is ``n``, as in TorchRL.
        device: see :class:`TensorSpec`.
        dtype: dtype of the values.
        shape: shape of the values, if ``size`` is None.
        n: size of the last dimension, as in TorchRL; inferred from the shape when None. Without a shape, the only
            dimension.

    Raises:
        ArgumentError: the last dimension of ``shape`` is not ``n``.

    Example:
        >>> Binary((1,)).zero()
        tensor([False])
        >>> Binary(2).shape, Binary(n=2).shape, Binary(n=2, shape=(3, 2)).shape
        (torch.Size([2]), torch.Size([2]), torch.Size([3, 2]))
    """

    def __init__(
        self,
        size: int | Sequence[int] | None = None,
        device: Device = None,
        dtype: torch.dtype = torch.bool,
        *,
        shape: int | Sequence[int] | None = None,
        n: int | None = None,
    ) -> None:
        if isinstance(size, int) and shape is not None and n is None:
            n, size = size, None  # as in TorchRL
        if size is not None and shape is not None:
            raise ArgumentError(f"A shape must be given once, got {size} and shape={shape!r}.")
        shape = size if shape is None else shape
        size = as_size((() if n is None else n) if shape is None else shape)
        if n is not None and (not size or size[-1] != n):
            raise ArgumentError(f"The last dimension of a Binary spec must be n={n}, got shape {list(size)}.")
        super().__init__(size, dtype, device)

    def rand(self) -> torch.Tensor:
        """Return zeros and ones with equal probability."""
        return torch.randint(0, 2, self.shape, device=self.device).to(self.dtype)

    def is_in(self, value: Any) -> bool:
        """Return whether ``value`` has the shape and dtype of this spec and all its values are 0 or 1."""
        return self._fits(value) and bool(((value == 0) | (value == 1)).all())


def _bound(name: str, bound: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a bound as a tensor of ``dtype``; raise if the conversion changes it, such as a fraction to an integer."""
    try:
        found = torch.as_tensor(bound, dtype=dtype).cpu()
        exact = dtype.is_floating_point or bool((found == torch.as_tensor(bound).cpu()).all())
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(f"{name} must be a number or tensor that {dtype} can represent, got {bound!r}.") from error
    if not exact:
        raise ArgumentError(f"{name} must be a number or tensor that {dtype} can represent, got {bound!r}.")
    return found


def _nested_tuple(nvec: Any) -> tuple[Any, ...]:
    if isinstance(nvec, str) or not isinstance(nvec, Iterable) or getattr(nvec, "ndim", 1) == 0:
        raise ArgumentTypeError(f"nvec must be a sequence of numbers of categories, such as [2, 3], got {nvec!r}.")
    return tuple(
        _nested_tuple(n) if isinstance(n, Sequence) or getattr(n, "ndim", 0) else _category_count(n) for n in nvec
    )


def _category_count(n: Any) -> int:
    try:
        whole = math.floor(n)
    except TypeError as error:
        raise ArgumentTypeError(f"The number of categories must be an integer >= 1, got {n!r}.") from error
    except (OverflowError, ValueError):  # infinite, or NaN
        whole = 0
    if whole != n or whole < 1:
        raise ArgumentError(f"The number of categories must be an integer >= 1, got {n!r}.")
    return int(whole)


def _check_capacity(n: int, dtype: torch.dtype) -> int:
    """Return a number of categories; raise if the dtype can't represent it."""
    largest = 1 if dtype is torch.bool else n if dtype.is_floating_point else torch.iinfo(dtype).max
    if n - 1 > largest:
        raise ArgumentError(f"{dtype} can't represent {n} categories (0 to {n - 1}): choose a larger dtype.")
    return n

"""Array namespaces for a task's dynamics: the same functions for NumPy arrays and for tensors.

Names are those of the array API standard as far as NumPy and torch share them. Where the two differ, the functions here
bridge the difference. Both follow NumPy's rules for new arrays: floating-point ones are float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recurl.envs.tasks.tensor_functions import functions_on, numpy_dtype

__all__ = ["HOST", "Draw", "Namespace", "RowDraw", "TensorDraw", "tensors_on"]


class Namespace:
    """Array functions: those of a module, with overrides.

    Args:
        module: `numpy` or `torch`.
        own: functions and dtypes that the module lacks or defines differently.

    Example:
        >>> HOST.astype(HOST.where(HOST.arange(3) > 1, 1.0, 0.0), HOST.float32)
        array([0., 0., 1.], dtype=float32)
    """

    def __init__(self, module: Any, own: dict[str, Any]) -> None:
        self._module = module
        vars(self).update(own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._module, name)
        setattr(self, name, found)  # so that the next access is as fast as the module's own
        return found


class Draw(Protocol):
    """Source of random numbers for rows that begin an episode, independent of each other, with rows last."""

    def uniform(self, low: float, high: float, shape: tuple[int, ...] = ()) -> Any:
        """Return real numbers in `[low, high)`, float64 `[*shape, rows]`."""
        ...

    def normal(self, shape: tuple[int, ...] = ()) -> Any:
        """Return numbers of the standard normal distribution, float64 `[*shape, rows]`."""
        ...

    def integers(self, high: int, shape: tuple[int, ...] = ()) -> Any:
        """Return integers in `[0, high)`, int64 `[*shape, rows]`."""
        ...


class RowDraw:
    """Random numbers from one generator per row. The numbers of a row depend on its generator alone.

    Args:
        generators: the rows' generators.

    Example:
        >>> RowDraw([np.random.default_rng(seed) for seed in (0, 1, 2)]).integers(10, (2,)).shape
        (2, 3)
    """

    def __init__(self, generators: Sequence[np.random.Generator]) -> None:
        self._generators = generators

    def uniform(self, low: float, high: float, shape: tuple[int, ...] = ()) -> NDArray[np.float64]:
        """Return real numbers in `[low, high)`, float64 `[*shape, rows]`."""
        size = shape or None  # a generator is faster with None than with ()
        return _rows_last([rng.uniform(low, high, size) for rng in self._generators])

    def normal(self, shape: tuple[int, ...] = ()) -> NDArray[np.float64]:
        """Return numbers of the standard normal distribution, float64 `[*shape, rows]`."""
        size = shape or None
        return _rows_last([rng.standard_normal(size) for rng in self._generators])

    def integers(self, high: int, shape: tuple[int, ...] = ()) -> NDArray[np.int64]:
        """Return integers in `[0, high)`, int64 `[*shape, rows]`."""
        size = shape or None
        return _rows_last([rng.integers(high, size=size) for rng in self._generators])


def _rows_last(drawn: Sequence[Any]) -> NDArray[Any]:
    array = np.array(drawn)
    return array.T if array.ndim < 3 else np.moveaxis(array, 0, -1)


class TensorDraw:
    """Random numbers of all rows from a single torch generator, on its device.

    Args:
        generator: the generator.
        rows: number of rows.

    Example:
        >>> TensorDraw(torch.Generator().manual_seed(0), 3).uniform(-1.0, 1.0, (2,)).shape
        torch.Size([2, 3])
    """

    def __init__(self, generator: torch.Generator, rows: int) -> None:
        self._generator = generator
        self._rows = rows

    def uniform(self, low: float, high: float, shape: tuple[int, ...] = ()) -> Tensor:
        """Return real numbers in `[low, high)`, float64 `[*shape, rows]`."""
        return self._empty(shape).uniform_(low, high, generator=self._generator)

    def normal(self, shape: tuple[int, ...] = ()) -> Tensor:
        """Return numbers of the standard normal distribution, float64 `[*shape, rows]`."""
        return self._empty(shape).normal_(generator=self._generator)

    def integers(self, high: int, shape: tuple[int, ...] = ()) -> Tensor:
        """Return integers in `[0, high)`, int64 `[*shape, rows]`."""
        device = self._generator.device
        return torch.randint(high, (*shape, self._rows), generator=self._generator, device=device)

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty((*shape, self._rows), dtype=torch.float64, device=self._generator.device)


@cache
def _rows(count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return np.array(count), np.arange(count)  # arithmetic with an array is faster than with a number


def _host_stack(arrays: Sequence[NDArray[Any]], axis: int = 0) -> NDArray[Any]:
    return np.array(arrays) if axis == 0 else np.stack(arrays, axis)  # np.array is four times as fast


def _host_take(table: NDArray[Any], index: NDArray[np.int64], axis: int = 0) -> NDArray[Any]:
    return table.take(index, axis)


def _host_pick(table: NDArray[Any], index: NDArray[np.int64]) -> NDArray[Any]:
    count, rows = _rows(table.shape[1])
    return table.take(index * count + rows)


def _host_astype(array: NDArray[Any], dtype: Any) -> NDArray[Any]:
    return array.astype(dtype, order="C")


HOST = Namespace(
    np,
    {
        "astype": _host_astype,
        "bool": np.bool_,
        "concat": np.concatenate,
        "pick": _host_pick,
        "stack": _host_stack,
        "take": _host_take,
    },
)
"""Namespace of NumPy arrays. In addition to NumPy: `pick(table, index)`, the entry `table[index[row], row]` per row."""


def tensors_on(device: torch.device | str) -> Namespace:
    """Return the namespace of tensors on a device, where new ones are created.

    Its functions don't synchronize with the device, except `asarray` for the first use of a NumPy array, which is then
    cached.

    Args:
        device: the device.

    Example:
        >>> xp = tensors_on("cpu")
        >>> xp.pick(xp.asarray(np.arange(6).reshape(3, 2)), xp.asarray([2, 0]))
        tensor([4, 1])
    """
    kept: dict[int, tuple[Any, Tensor]] = {}  # by id, along with the array, so that the id stays unique

    def asarray(value: Any, dtype: torch.dtype | None = None) -> Tensor:
        if isinstance(value, Tensor) or dtype is not None:
            return torch.as_tensor(value, dtype=dtype, device=device)
        if not isinstance(value, np.ndarray):
            return torch.as_tensor(value, dtype=numpy_dtype(value), device=device)
        if id(value) not in kept:
            kept[id(value)] = (value, torch.as_tensor(value, device=device))
        return kept[id(value)][1]

    def new(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(*arguments: Any, dtype: torch.dtype = torch.float64) -> Tensor:
            return function(*arguments, dtype=dtype, device=device)

        return make

    def arange(*arguments: Any, dtype: torch.dtype | None = None) -> Tensor:
        dtype = numpy_dtype(*arguments) if dtype is None else dtype
        return torch.arange(*arguments, dtype=dtype, device=device)

    def full(shape: int | tuple[int, ...], value: Any, dtype: torch.dtype | None = None) -> Tensor:
        shape, dtype = (shape,) if isinstance(shape, int) else shape, numpy_dtype(value) if dtype is None else dtype
        return torch.full(shape, value, dtype=dtype, device=device)

    own: dict[str, Any] = {name: new(getattr(torch, name)) for name in ("empty", "eye", "linspace", "ones", "zeros")}
    return Namespace(torch, {**own, "arange": arange, "asarray": asarray, "full": full, **functions_on(device)})

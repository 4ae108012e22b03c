"""Array API functions on tensors, where torch has another name or another signature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from recurl.core.torch_compat import is_compiling

__all__ = ["functions_on", "numpy_dtype"]

_Axes: TypeAlias = int | tuple[int, ...] | None
_Function: TypeAlias = Callable[..., Any]

_REAL_FUNCTIONS = (
    *("acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "exp", "expm1", "log", "log10", "log1p"),
    *("log2", "mean", "sin", "sinh", "sqrt", "tan", "tanh"),
)
_BINARY_FUNCTIONS = (
    *("add", "bitwise_and", "bitwise_or", "bitwise_xor", "floor_divide", "greater", "greater_equal", "less"),
    *("less_equal", "logical_and", "logical_or", "logical_xor", "maximum", "minimum", "multiply", "not_equal"),
    *("pow", "remainder", "subtract", "bitwise_left_shift", "bitwise_right_shift"),
)
_REAL_BINARY_FUNCTIONS = ("atan2", "copysign", "divide", "hypot", "logaddexp")
_ALIASES = {"arctan2": "atan2", "mod": "remainder", "power": "pow"}


def numpy_dtype(*values: Any) -> torch.dtype:
    """Return the dtype that NumPy infers for Python numbers or lists of them, where torch infers float32 for floats.

    Example:
        >>> numpy_dtype(0.5), numpy_dtype(1, 2), numpy_dtype([1, 0.5])
        (torch.float64, torch.int64, torch.float64)
    """
    return torch.from_numpy(np.empty(0, np.result_type(*map(np.asarray, values)))).dtype


def functions_on(device: torch.device | str) -> dict[str, _Function]:
    """Return the functions by name.

    Python numbers combined with tensors follow NumPy's dtype rules, and functions of real numbers convert integers to
    float64.

    Args:
        device: device on which Python numbers become tensors.

    Example:
        >>> xp = functions_on("cpu")
        >>> xp["maximum"](torch.tensor([-1.0, 2.0]), 0.0), xp["sqrt"](torch.tensor([4]))
        (tensor([0., 2.]), tensor([2.], dtype=torch.float64))
    """
    mixed = _MixedFunctions(device)
    own = {name: mixed.real_unary(getattr(torch, name)) for name in _REAL_FUNCTIONS}
    own |= {"std": mixed.real_unary(_std), "var": mixed.real_unary(_var), "equal": mixed.binary(torch.eq)}
    own |= {name: mixed.binary(getattr(torch, name)) for name in _BINARY_FUNCTIONS}
    own |= {name: mixed.real_binary(getattr(torch, name)) for name in _REAL_BINARY_FUNCTIONS}
    own |= {name: own[same] for name, same in _ALIASES.items()}
    return own | {"clip": mixed.clip, "where": mixed.where} | _ARRAY_FUNCTIONS


class _MixedFunctions:
    """Functions of tensors mixed with Python numbers, which become tensors on a device."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = device

    def _as_tensor(self, value: Any, other: Any) -> Tensor:
        if isinstance(value, Tensor):
            return value
        dtype = numpy_dtype(value) if isinstance(other, Tensor) else numpy_dtype(value, other)
        if isinstance(other, Tensor) and (other.is_floating_point() or not dtype.is_floating_point):
            dtype = torch.result_type(other, value)
        return torch.full((), value, dtype=dtype, device=self._device)

    def _promote(self, one: Any, other: Any) -> tuple[Tensor, Tensor]:
        return self._as_tensor(one, other), self._as_tensor(other, one)

    def _as_real(self, value: Any) -> Tensor:
        tensor = value if isinstance(value, Tensor) else self._as_tensor(float(value), 0.0)
        return tensor if tensor.is_floating_point() else tensor.to(torch.float64)

    def real_unary(self, function: _Function) -> _Function:
        """Wrap a function of a real argument."""
        return lambda value, *arguments, **named: function(self._as_real(value), *arguments, **named)

    def binary(self, function: _Function) -> _Function:
        """Wrap a function of two arguments."""
        return lambda one, other: function(*self._promote(one, other))

    def real_binary(self, function: _Function) -> _Function:
        """Wrap a function of two arguments with a real result."""

        def call(one: Any, other: Any) -> Tensor:
            pair = self._promote(one, other)
            return function(*(pair if any(tensor.is_floating_point() for tensor in pair) else map(self._as_real, pair)))

        return call

    def where(self, condition: Tensor, one: Any, other: Any) -> Tensor:
        """Return ``one`` where the condition holds, ``other`` elsewhere."""
        tensors = [value for value in (one, other) if isinstance(value, Tensor)]
        if not tensors:
            one = torch.full((), one, dtype=numpy_dtype(one, other), device=self._device)
        elif not tensors[0].is_floating_point() and isinstance(other if one is tensors[0] else one, float):
            one, other = self._promote(one, other)
        return torch.where(condition, one, other)  # a number needs no extra kernel here

    def clip(self, array: Tensor, min: Any = None, max: Any = None) -> Tensor:  # noqa: A002 - the standard's names
        """Clip ``array`` to the range from ``min`` to ``max``."""
        if not isinstance(min, Tensor) and not isinstance(max, Tensor):
            return torch.clip(array, min, max)
        above = array if min is None else torch.maximum(*self._promote(array, min))
        return above if max is None else torch.minimum(*self._promote(above, max))


def _max(array: Tensor, axis: _Axes = None, keepdims: bool = False) -> Tensor:
    return torch.amax(array, () if axis is None else axis, keepdims)


def _min(array: Tensor, axis: _Axes = None, keepdims: bool = False) -> Tensor:
    return torch.amin(array, () if axis is None else axis, keepdims)


def _std(array: Tensor, axis: _Axes = None, correction: float = 0.0, keepdims: bool = False) -> Tensor:
    return torch.std(array, axis, correction=correction, keepdim=keepdims)


def _var(array: Tensor, axis: _Axes = None, correction: float = 0.0, keepdims: bool = False) -> Tensor:
    return torch.var(array, axis, correction=correction, keepdim=keepdims)


def _argsort(array: Tensor, axis: int = -1) -> Tensor:
    return _argsort_opaque(array, axis) if is_compiling() else array.argsort(axis)


@torch.library.custom_op("recurl::argsort", mutates_args=(), schema="(Tensor tensor, int axis) -> Tensor")
def _argsort_opaque(tensor: Tensor, axis: int) -> Tensor:
    """Sort with torch's kernel, hidden from Inductor, whose unrolled comparison network takes 2 to 5 s to compile."""
    return tensor.argsort(axis).contiguous()


@_argsort_opaque.register_fake
def _(tensor: Tensor, axis: int) -> Tensor:
    return torch.empty_like(tensor, dtype=torch.int64, memory_format=torch.contiguous_format)


def _astype(array: Tensor, dtype: torch.dtype) -> Tensor:
    return array.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _cumulative_sum(array: Tensor, axis: int | None = None) -> Tensor:
    return torch.cumsum(array.reshape(-1), 0) if axis is None else torch.cumsum(array, axis)


def _flip(array: Tensor, axis: _Axes = None) -> Tensor:
    axes = range(array.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
    return torch.flip(array, tuple(axes))


def _permute_dims(array: Tensor, axes: tuple[int, ...] | None = None) -> Tensor:
    return torch.permute(array, tuple(reversed(range(array.ndim))) if axes is None else axes)


def _pick(table: Tensor, index: Tensor) -> Tensor:
    return table.gather(0, index.unsqueeze(0)).squeeze(0)


def _repeat(array: Tensor, repeats: int, axis: int | None = None) -> Tensor:
    return torch.repeat_interleave(array, repeats, axis)


def _roll(array: Tensor, shift: Any, axis: Any = None) -> Tensor:
    return torch.roll(array, shift, axis)


def _sort(array: Tensor, axis: int = -1) -> Tensor:
    return torch.sort(array, axis).values


def _stack(arrays: Any, axis: int = 0) -> Tensor:
    return torch.stack(tuple(arrays), axis)


def _take(table: Tensor, index: Tensor, axis: int = 0) -> Tensor:
    return table.index_select(axis, index)


def _take_along_axis(array: Tensor, indices: Tensor, axis: int = -1) -> Tensor:
    return torch.take_along_dim(array, indices, axis)


def _unstack(array: Tensor, axis: int = 0) -> tuple[Tensor, ...]:
    return torch.unbind(array, axis)


def _vecdot(one: Tensor, other: Tensor, axis: int = -1) -> Tensor:
    return (one * other).sum(axis)


_ARRAY_FUNCTIONS: dict[str, _Function] = {
    "amax": _max,
    "amin": _min,
    "argsort": _argsort,
    "astype": _astype,
    "bitwise_invert": torch.bitwise_not,
    "cumulative_sum": _cumulative_sum,
    "expand_dims": torch.unsqueeze,
    "flip": _flip,
    "matrix_transpose": torch.adjoint,
    "max": _max,
    "min": _min,
    "permute_dims": _permute_dims,
    "pick": _pick,
    "repeat": _repeat,
    "roll": _roll,
    "sort": _sort,
    "stack": _stack,
    "take": _take,
    "take_along_axis": _take_along_axis,
    "transpose": _permute_dims,
    "unstack": _unstack,
    "vecdot": _vecdot,
}

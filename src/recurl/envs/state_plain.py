"""Plain values as JSON and bytes: numbers, strings, arrays, tensors, and containers of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch

from recurl.core.errors import ArgumentError

__all__ = ["PlainReader", "PlainWriter", "UnsavableError"]

MAX_BYTES = 2**26
"""Maximum size of the state of one environment."""

_SCALARS = (type(None), bool, int, float, str)
_ARRAY_KINDS = "biufcSUmM"


class UnsavableError(Exception):
    """Raised for a value that can't be saved; the message gives the value's type and location."""


class PlainWriter:
    """Writer of values as JSON, with the contents of arrays, tensors, and byte strings in a separate byte buffer.

    Numbers, strings, booleans, and None are written as they are; any other value is a list that starts with a tag.

    Args:
        data: buffer to append to; a new one when None.
        most: maximum number of bytes, and of JSON characters.

    Example:
        >>> writer = PlainWriter()
        >>> writer.value({"seen": (1, 2.5)}, "state")
        ['dict', [['seen', ['tuple', [1, 2.5]]]]]
    """

    def __init__(self, data: bytearray | None = None, most: int = MAX_BYTES) -> None:
        self.data = bytearray() if data is None else data
        self.most = most
        self._immutable: dict[type, Callable[[Any, str], Any]] = {
            tuple: lambda value, at: ["tuple", self._items(value, at)],
            frozenset: lambda value, at: ["frozenset", self._items(value, at)],
            bytes: lambda value, _: ["bytes", *self.put(value)],
            complex: lambda value, _: ["complex", value.real, value.imag],
            slice: lambda value, at: ["slice", self._items((value.start, value.stop, value.step), at)],
            range: lambda value, _: ["range", [value.start, value.stop, value.step]],
            type(Ellipsis): lambda _, __: ["ellipsis"],
        }

    def value(self, value: Any, at: str) -> Any:
        """Return ``value``, found at the path ``at``, as JSON.

        Raises:
            UnsavableError: the type of the value is not supported.
        """
        kind = type(value)
        if kind in _SCALARS:
            return value
        if kind in self._immutable:
            return self._immutable[kind](value, at)
        if isinstance(value, np.generic):
            return ["number", self._dtype(value.dtype, at), *self.put(value.tobytes())]
        if isinstance(value, np.dtype):
            return ["dtype", self._dtype(cast("np.dtype[Any]", value), at)]
        return self.other(value, at)

    def other(self, value: Any, at: str) -> Any:
        """Return a mutable value as JSON."""
        if type(value) is list:
            return ["list", self._items(value, at)]
        if type(value) is dict:
            return ["dict", self._pairs(cast("dict[Any, Any]", value), at)]
        if type(value) is np.ndarray:
            return self.array(value, at)
        if type(value) is torch.Tensor:
            return ["tensor", *self.array(value.detach().cpu().contiguous().numpy(), at)[1:]]
        raise unsavable(value, at)

    def array(self, value: np.ndarray[Any, Any], at: str) -> list[Any]:
        """Return the tag, dtype, shape, memory order, offset, and size of an array."""
        fortran_order = value.flags.f_contiguous and not value.flags.c_contiguous
        dtype = self._dtype(value.dtype, at)
        data = value.tobytes("F" if fortran_order else "C")
        return ["array", dtype, list(value.shape), fortran_order, *self.put(data)]

    def put(self, data: bytes | bytearray) -> tuple[int, int]:
        """Append bytes and return their offset and count."""
        start = len(self.data)
        if start + len(data) > self.most:
            raise self._too_large()
        self.data += data
        return start, len(data)

    def state(self, content: Any) -> dict[str, Any]:
        """Return JSON and bytes, suitable for ``torch.save``."""
        try:
            text = json.dumps(content, separators=(",", ":"))
        except (ValueError, RecursionError) as error:
            raise UnsavableError(f"it can't be written: {error}") from error
        if len(text) > self.most:
            raise self._too_large()
        return {"objects": text, "bytes": torch.frombuffer(bytearray(self.data or b"\0"), dtype=torch.uint8)}

    def _too_large(self) -> UnsavableError:
        return UnsavableError(f"its state is larger than {self.most >> 20} MiB")

    def _items(self, values: Any, at: str) -> list[Any]:
        return [self.value(item, f"{at}[{index}]") for index, item in enumerate(values)]

    def _pairs(self, values: dict[Any, Any], at: str) -> list[Any]:
        return [[self.value(key, f"{at} key"), self.value(item, f"{at}[{key!r}]")] for key, item in values.items()]

    @staticmethod
    def _dtype(dtype: np.dtype[Any], at: str) -> str:
        if dtype.kind not in _ARRAY_KINDS:
            raise UnsavableError(f"{at} holds NumPy values of dtype {dtype}")
        return dtype.str


class PlainReader:
    """Reader of the output of :class:`PlainWriter`.

    Args:
        data: the byte buffer that belongs to the JSON.
    """

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self._immutable: dict[str, Callable[..., Any]] = {
            "tuple": lambda fresh, items: tuple(self._items(items, fresh)),
            "frozenset": lambda _, items: frozenset(self._items(items, None)),
            "bytes": lambda _, start, count: self.get(start, count),
            "complex": lambda _, real, imag: complex(real, imag),
            "slice": lambda _, items: slice(*self._items(items, None)),
            "range": lambda _, items: range(*items),
            "ellipsis": lambda _: ...,
            "number": lambda _, dtype, start, count: np.frombuffer(self.get(start, count), _checked(dtype))[0],
            "dtype": lambda _, dtype: _checked(dtype),
        }

    def value(self, written: Any, fresh: Any = None) -> Any:
        """Return a value.

        Args:
            written: JSON of the value.
            fresh: value at the same place in a fresh environment; None if there is none.
        """
        if not isinstance(written, list):
            return written
        tag, *rest = cast("list[Any]", written)
        if tag in self._immutable:
            return self._immutable[tag](fresh, *rest)
        return self.other(tag, rest, fresh)

    def other(self, tag: str, rest: list[Any], fresh: Any) -> Any:
        """Return a mutable value."""
        del fresh
        if tag == "list":
            return self._items(rest[0], None)
        if tag == "dict":
            return {self.value(key): self.value(item) for key, item in rest[0]}
        if tag == "array":
            return self.array(*rest)
        if tag == "tensor":
            return torch.from_numpy(self.array(*rest))
        raise ArgumentError(f"A saved environment has no values of kind {tag!r}.")

    def array(
        self, dtype: str, shape: list[int], fortran_order: bool, start: int, count: int
    ) -> np.ndarray[Any, np.dtype[Any]]:
        """Return a new array."""
        kind = _checked(dtype)
        if math.prod(shape) * kind.itemsize != count or min(shape, default=0) < 0:
            raise ArgumentError(f"A saved array of shape {shape} and dtype {dtype} has {count} bytes.")
        flat = np.frombuffer(bytearray(self.get(start, count)), kind) if count else np.empty(0, kind)
        return flat.reshape(shape, order="F" if fortran_order else "C")

    def get(self, start: int, count: int) -> bytes:
        """Return a range of the byte buffer."""
        if not 0 <= start <= start + count <= len(self.data):
            raise ArgumentError("A saved environment refers to bytes that it doesn't contain.")
        return bytes(self.data[start : start + count])

    def _items(self, items: list[Any], fresh: Any) -> list[Any]:
        known: Any = fresh if isinstance(fresh, tuple | list) and len(cast("list[Any]", fresh)) == len(items) else None
        return [self.value(item, None if known is None else known[index]) for index, item in enumerate(items)]


def unsavable(value: object, at: str) -> UnsavableError:
    """Return the error for a value that can't be saved."""
    kind = type(value)
    module = getattr(kind, "__module__", "builtins")  # types of some C libraries have no module
    name = kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"
    return UnsavableError(f"{at} is of type {name}, whose state can't be read")


def _checked(dtype: str) -> np.dtype[Any]:
    found = np.dtype(dtype)
    if found.kind not in _ARRAY_KINDS:
        raise ArgumentError(f"A saved environment has no values of dtype {dtype!r}.")
    return found

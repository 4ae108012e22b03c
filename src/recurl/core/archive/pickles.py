"""Restricted interpreter of the pickle in a ``torch.save`` file, for tensors and plain values only.

Functions named by a file are never imported: the few that such files need are in a table here. Time and memory are
bounded by the lengths of the pickle and of the file.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from recurl.core.archive.values import DEPTH, check_key, is_plain, parts_of
from recurl.core.errors import ArgumentError, ArgumentTypeError

__all__ = ["ContentError", "read_values"]

_PROTOCOL = 2
_EXPANSION = 4  # maximum number of parts of the value per byte of the pickle
_REPEATED = 16  # maximum total bytes of tensors per byte of the file: tensors may share memory
_DIMENSIONS = 64
_STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}
_QUANTIZED = ("quint8", "qint8", "qint32", "quint4x2", "quint2x4")


class ContentError(ArgumentError):
    """The pickle contains something other than tensors and plain values."""


class _Kind(NamedTuple):
    """Class of a storage; untyped if ``dtype`` is None."""

    dtype: torch.dtype | None


class _Storage(NamedTuple):
    data: Tensor
    dtype: torch.dtype | None


class _Function:
    """A function that a pickle may call."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call


class _Mark:
    """Stack marker before the arguments of an instruction."""


def read_values(data: bytes, length: int, read_storage: Callable[[str], Tensor]) -> Any:
    """Return the value in a pickle.

    Args:
        data: the pickle.
        length: number of bytes of the file that contains it.
        read_storage: returns the bytes of a storage, given its key, as uint8 ``[N]``.

    Raises:
        ContentError: it contains anything that :func:`recurl.core.archive.values.savable` rejects, or is damaged.
    """
    interpreter = _Interpreter(data, length, read_storage)
    try:
        value = interpreter.run()
    except ArgumentError:
        raise
    except ArgumentTypeError as error:
        raise ContentError(str(error).rstrip(".")) from None
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError, struct.error) as error:
        raise ContentError(f"it is damaged ({type(error).__name__})") from None
    _check(value, _EXPANSION * len(data))
    return value


def _check(value: Any, most: int) -> None:
    """Reject values nested too deeply or in themselves, or shared so often that traversing them never ends."""
    left, seen = [(value, 0)], 0
    while left:
        part, depth = left.pop()
        parts = parts_of(part)
        if parts is None:
            if not is_plain(part) and not isinstance(part, Tensor):
                _refuse("something other than tensors and plain values")
            continue
        inner = [(one, depth + 1) for one in parts]
        seen += len(inner)
        if inner and depth >= DEPTH:
            _refuse("containers that are nested too deeply")
        if seen > most:
            _refuse("containers that are referenced too often")
        left += inner


def _refuse(what: str) -> NoReturn:
    raise ContentError(f"it holds {what}")


class _Interpreter:
    """Stack machine for pickles of protocol 2."""

    def __init__(self, data: bytes, length: int, read_storage: Callable[[str], Tensor]) -> None:
        self._data = data
        self._position = 0
        self._left = _REPEATED * length
        self._read_storage = read_storage
        self._storages: dict[str, Tensor] = {}
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._globals = {
            "torch._utils _rebuild_tensor_v2": _Function(self._tensor),
            "torch._utils _rebuild_tensor_v3": _Function(self._tensor_of_dtype),
            "torch._utils _rebuild_parameter": _Function(_parameter),
            "torch Size": _Function(_size),
            "torch device": _Function(_device),
            "torch.storage UntypedStorage": _Kind(None),
            "collections OrderedDict": _Function(_ordered_dict),
            "_codecs encode": _Function(_encode),
            "__builtin__ bytes": _Function(lambda: b""),
            "__builtin__ bytearray": _Function(_bytearray),
            "__builtin__ complex": _Function(_complex),
            "__builtin__ set": _Function(lambda parts: set(_hashable(parts))),
            "__builtin__ frozenset": _Function(lambda parts: frozenset(_hashable(parts))),
        }

    def run(self) -> Any:
        """Run all instructions."""
        table = _INSTRUCTIONS
        while (code := self._byte()) != _STOP:
            instruction = table.get(code)
            if instruction is None:
                _refuse(f"an instruction that recurl doesn't write ({code:#04x})")
            instruction(self)
        (value,) = self._stack
        return value

    def _take(self, count: int) -> bytes:
        part = self._data[self._position : self._position + count]
        if len(part) != count:
            _refuse("fewer parts than declared")
        self._position += count
        return part

    def _byte(self) -> int:
        return self._take(1)[0]

    def _unpack(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _since_mark(self) -> list[Any]:
        stack = self._stack
        place = len(stack) - 1
        while type(stack[place]) is not _Mark:
            place -= 1
            if place < 0:
                _refuse("no mark")
        parts = stack[place + 1 :]
        del stack[place:]
        return parts

    def _protocol(self) -> None:
        if self._byte() != _PROTOCOL:
            _refuse("a pickle of another protocol")

    def _tuple(self, count: int) -> None:
        parts = tuple(self._stack[-count:])
        if len(parts) != count:
            _refuse("fewer parts than declared")
        del self._stack[-count:]
        self._push(parts)

    def _text(self) -> str:
        return self._take(self._unpack("<I")).decode("utf-8", "surrogatepass")

    def _put(self, place: int) -> None:
        self._memo[place] = self._stack[-1]

    def _append(self, parts: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            _refuse("an append to something that isn't a list")
        target += parts

    def _set_items(self, parts: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) not in (dict, OrderedDict) or len(parts) % 2:
            _refuse("items of something that isn't a dict")
        for key, value in zip(parts[::2], parts[1::2], strict=True):
            check_key(key)
            target[key] = value

    def _global(self) -> None:
        end = self._data.index(b"\n", self._data.index(b"\n", self._position) + 1)
        name = self._take(end - self._position).decode("ascii").replace("\n", " ")
        self._position += 1
        module, _, last = name.partition(" ")
        if name in self._globals:
            self._push(self._globals[name])
        elif module == "torch" and last in _STORAGES:
            self._push(_Kind(_STORAGES[last]))
        elif module == "torch" and isinstance(getattr(torch, last, None), torch.dtype) and last not in _QUANTIZED:
            self._push(getattr(torch, last))
        else:
            _refuse(f"{name[:80].replace(' ', '.')}, which is not a tensor or a plain value")

    def _reduce(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if type(function) is not _Function or type(arguments) is not tuple:
            _refuse("a call of something that isn't a function")
        self._push(function.call(*arguments))

    def _build(self) -> None:
        """Attach the metadata of ``torch.nn.Module.state_dict``."""
        state, target = self._stack.pop(), self._stack[-1]
        if type(target) is not OrderedDict or type(state) is not dict or [*state] != ["_metadata"]:
            _refuse("an object with attributes")
        metadata = state["_metadata"]
        if type(metadata) not in (dict, OrderedDict):
            _refuse("an object with attributes")
        target._metadata = metadata  # pyright: ignore[reportAttributeAccessIssue] - as torch does

    def _storage(self) -> None:
        kind_of, kind, key, location, count = self._stack.pop()
        if kind_of != "storage" or type(kind) is not _Kind or type(key) is not str or type(location) is not str:
            _refuse("an invalid storage")
        if key not in self._storages:
            self._storages[key] = self._read_storage(key)
        data = self._storages[key]
        size = 1 if kind.dtype is None else kind.dtype.itemsize
        if type(count) is not int or count * size != data.numel():
            _refuse(f"a storage whose size differs from its data (data/{key[:20]})")
        self._push(_Storage(data, kind.dtype))

    def _tensor(
        self, storage: _Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *rest: Any
    ) -> Tensor:
        if type(storage) is not _Storage or storage.dtype is None:
            _refuse("a tensor without a storage")
        return self._view(storage.data, storage.dtype, offset, size, stride, *rest)

    def _tensor_of_dtype(
        self,
        storage: _Storage,
        offset: int,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        grad: bool,
        hooks: Any,
        dtype: torch.dtype,
        *rest: Any,
    ) -> Tensor:
        if type(storage) is not _Storage or type(dtype) is not torch.dtype:
            _refuse("a tensor without a storage")
        return self._view(storage.data, dtype, offset, size, stride, grad, hooks, *rest)

    def _view(
        self,
        data: Tensor,
        dtype: torch.dtype,
        offset: int,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        grad: bool = False,
        hooks: Any = None,
        *metadata: Any,
    ) -> Tensor:
        if any(metadata) or hooks or type(grad) is not bool:
            _refuse("a tensor with hooks, or a conjugated or negated one")
        if len(_naturals(size)) != len(_naturals(stride)) or len(size) > _DIMENSIONS:
            _refuse("a tensor with different numbers of sizes and strides, or with too many")
        (offset,) = _naturals((offset,))
        count, last = 1, offset
        for one, step in zip(size, stride, strict=True):
            count *= one
            last += (one - 1) * step
        there = data.numel() // dtype.itemsize
        if count and (count > there or last >= there):
            _refuse(f"a tensor {list(size)[:8]} that exceeds its storage")
        self._left -= count * dtype.itemsize
        if self._left < 0:
            _refuse("tensors that share memory too often")
        if not count:
            return torch.empty(size, dtype=dtype).requires_grad_(grad)
        view = torch.empty(0, dtype=dtype).set_(data.untyped_storage(), offset, size, stride)  # pyright: ignore[reportUnknownMemberType, reportArgumentType] - not annotated
        return view.requires_grad_(grad)


def _naturals(numbers: Any) -> tuple[int, ...]:
    if type(numbers) is not tuple or any(type(one) is not int or not 0 <= one < 1 << 62 for one in numbers):
        _refuse("a tensor whose sizes and strides are not natural numbers")
    return numbers


def _ordered_dict() -> OrderedDict[Any, Any]:
    return OrderedDict()


def _parameter(data: Any, grad: Any, hooks: Any) -> Tensor:
    if not isinstance(data, Tensor) or type(grad) is not bool or hooks:
        _refuse("an invalid parameter")
    return torch.nn.Parameter(data.detach(), grad)


def _size(sizes: Any) -> torch.Size:
    return torch.Size(_naturals(sizes))


def _device(kind: Any, index: Any = 0) -> torch.device:
    if type(kind) is not str or len(kind) > _DIMENSIONS or type(index) is not int:
        _refuse("an invalid device")
    try:
        return torch.device(kind, index) if index else torch.device(kind)
    except RuntimeError:
        _refuse("an invalid device")


def _encode(text: Any, coding: Any) -> bytes:
    if type(text) is not str or coding != "latin1":
        _refuse("invalid text")
    return text.encode("latin1")


def _bytearray(data: Any = b"") -> bytearray:
    if type(data) is not bytes:
        _refuse("invalid bytes")
    return bytearray(data)


def _complex(real: Any, imaginary: Any) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        _refuse("an invalid complex number")
    return complex(real, imaginary)


def _hashable(parts: Any) -> list[Any]:
    if type(parts) is not list:
        _refuse("an invalid set")
    for part in parts:
        check_key(part)
    return parts


_STOP = ord(".")
_INSTRUCTIONS: dict[int, Callable[[Any], None]] = {
    0x80: lambda self: self._protocol(),
    ord("("): lambda self: self._push(_Mark()),
    ord("}"): lambda self: self._push({}),
    ord("]"): lambda self: self._push([]),
    ord(")"): lambda self: self._push(()),
    ord("t"): lambda self: self._push(tuple(self._since_mark())),
    0x85: lambda self: self._tuple(1),
    0x86: lambda self: self._tuple(2),
    0x87: lambda self: self._tuple(3),
    ord("N"): lambda self: self._push(None),
    0x88: lambda self: self._push(True),
    0x89: lambda self: self._push(False),
    ord("J"): lambda self: self._push(self._unpack("<i")),
    ord("K"): lambda self: self._push(self._byte()),
    ord("M"): lambda self: self._push(self._unpack("<H")),
    0x8A: lambda self: self._push(int.from_bytes(self._take(self._byte()), "little", signed=True)),
    ord("G"): lambda self: self._push(self._unpack(">d")),
    ord("X"): lambda self: self._push(self._text()),
    ord("q"): lambda self: self._put(self._byte()),
    ord("r"): lambda self: self._put(self._unpack("<I")),
    ord("h"): lambda self: self._push(self._memo[self._byte()]),
    ord("j"): lambda self: self._push(self._memo[self._unpack("<I")]),
    ord("a"): lambda self: self._append([self._stack.pop()]),
    ord("e"): lambda self: self._append(self._since_mark()),
    ord("s"): lambda self: self._set_items([self._stack.pop(-2), self._stack.pop()]),
    ord("u"): lambda self: self._set_items(self._since_mark()),
    ord("c"): lambda self: self._global(),
    ord("R"): lambda self: self._reduce(),
    ord("b"): lambda self: self._build(),
    ord("Q"): lambda self: self._storage(),
}

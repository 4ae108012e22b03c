"""C++ forms of modules without a registered one, from a ``forward`` made of layers and operations that have a form.

``forward`` runs once on symbols, with a stand-in for the module. It is read before it runs: only functions without side
effects are allowed, so that one run stands for all. Nothing global is patched, so other threads aren't affected.
"""

from __future__ import annotations

import builtins
import dis
import linecache
import math
import os
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from recurl.core.torch_compat import children_of, tensors_of
from recurl.execution.compiled.compilation import Compilation, NotCompiled, Signal
from recurl.execution.compiled.translations import register_translation

_LIBRARIES = ("torch.", "tensordict.", "torchrl.")
_PURE = {abs, all, any, bool, enumerate, float, int, len, max, min, range, reversed, sum, super, tuple, zip}
_WRITES = ("STORE_ATTR", "DELETE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR", "STORE_GLOBAL", "DELETE_GLOBAL")
_BLOCKS = {"PUSH_EXC_INFO": "catches exceptions or has a with block", "LOAD_BUILD_CLASS": "defines a class"}
_REFUSED = {**dict.fromkeys(_WRITES, "sets"), "IMPORT_NAME": "imports", **_BLOCKS}
_NUMBERS = (bool, int, float, str, type(None), type(Ellipsis), torch.dtype)
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")


class _NoForm(Exception):
    """Raised in ``forward`` where it has no C++ form."""


def _translate(program: Compilation, module: nn.Module, *inputs: Signal) -> tuple[Signal, ...]:
    """Add the computation of a module's ``forward`` to the program.

    Raises:
        NotCompiled: it has no C++ form; the message names the line and the operation.
    """
    cls = type(module)
    refusal = f"{cls.__name__} has no C++ implementation"
    if cls.__module__.startswith(_LIBRARIES) or isinstance(module, TensorDictModuleBase):
        raise NotCompiled(refusal)
    reader = _Reader(cls)
    try:
        reader.method("forward")
        with _Symbols(program) as symbols:
            forward: Any = cls.forward
            found = forward(_StandIn(module, symbols), *map(symbols.wrap, inputs))
        outputs = found if type(found) is tuple else (found,)
        if not all(isinstance(output, _Symbol) for output in outputs):
            raise _NoForm("it returns something else than tensors")
    except NotCompiled:
        raise
    except Exception as error:
        raise NotCompiled(f"{refusal}: {_line(error, reader.place)}{error or type(error).__name__}") from error
    return tuple(output.signal for output in outputs)


def _line(error: Exception, read: tuple[str, int]) -> str:
    """Return the user's line that raised an error, or that was read last, as the beginning of a message."""
    inner = (__file__, os.path.dirname(torch.__file__))
    frames = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(error.__traceback__)]
    places = [place for place in (read, *frames) if place[1] and not place[0].startswith(inner)]
    return f"line {places[-1][1]}, {linecache.getline(*places[-1]).strip()!r}: " if places else ""


# -- reading


class _Reader:
    """Check of functions before they run: they use nothing but layers, operations with a form, and pure functions.

    Attributes:
        place: file and line that were read last.
    """

    def __init__(self, cls: type) -> None:
        self._cls = cls
        self._seen = set[CodeType]()
        self.place = ("", 0)

    def method(self, name: str) -> None:
        """Check all definitions of a method, since one may call another by ``super()``."""
        for owner in self._cls.__mro__:
            found: Any = vars(owner).get(name)
            found = getattr(found, "fget", getattr(found, "__func__", found))
            if isinstance(found, FunctionType) and not owner.__module__.startswith(_LIBRARIES):
                self._function(found)

    def value(self, name: str, value: Any) -> None:
        """Check a value that a function reads."""
        if isinstance(value, FunctionType) and not value.__globals__["__name__"].startswith(_LIBRARIES):
            self._function(value)
        elif isinstance(value, tuple):
            for part in value:
                self.value(name, part)
        elif not (isinstance(value, _NUMBERS) or name == "__class__" or _is_pure(value)):
            raise _NoForm(f"{name} has no operation in C++")

    def _function(self, function: FunctionType) -> None:
        code = function.__code__
        if code in self._seen:
            return
        self.place = code.co_filename, code.co_firstlineno
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        read = {name: cell.cell_contents for name, cell in cells}
        read |= {"a default": (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())}
        for name, value in read.items():
            self.value(name, value)
        self._code(code, function.__globals__)

    def _code(self, code: CodeType, scope: dict[str, Any]) -> None:
        self._seen.add(code)
        for step in _read(code):
            self.place = code.co_filename, step.line
            if step.refused:
                raise _NoForm(f"it {step.refused}")
            for name in step.attributes:
                self.method(name)
            if step.reads:
                names, value = step.reads.split("."), None
                for i, name in enumerate(names):
                    value = getattr(value, name, None) if i else scope.get(name, getattr(builtins, name, None))
                    if not isinstance(value, ModuleType):
                        self.value(".".join(names[: i + 1]), value)
                        break
                else:
                    raise _NoForm(f"it reads the module {step.reads}")
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._code(constant, scope)


class _Step(NamedTuple):
    """What an instruction does: reason to refuse it, attributes, or a global name with the attributes of it."""

    line: int
    refused: str = ""
    attributes: tuple[str, ...] = ()
    reads: str = ""


@lru_cache(256)
def _read(code: CodeType) -> list[_Step]:
    found, line = list[_Step](), code.co_firstlineno
    chain = False  # whether an attribute continues the name before
    for step in dis.get_instructions(code):
        name, line = str(step.argval), (step.positions and step.positions.lineno) or line
        if step.opname in ("CACHE", "PUSH_NULL"):
            continue
        if step.opname in _REFUSED or (step.opname == "STORE_DEREF" and name in code.co_freevars):
            what = "" if step.opname in _BLOCKS else f" {step.argval or 'an item'}"
            found.append(_Step(line, _REFUSED.get(step.opname, "sets") + what))
        elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            found.append(_Step(line, reads=name))
        elif step.opname in _ATTRIBUTES and name.startswith("__"):
            found.append(_Step(line, f"reads {name}"))
        elif step.opname in _ATTRIBUTES and chain:
            found[-1] = found[-1]._replace(reads=f"{found[-1].reads}.{name}", attributes=(*found[-1].attributes, name))
        elif step.opname in _ATTRIBUTES:
            found.append(_Step(line, attributes=(name,)))
        chain = step.opname in ("LOAD_GLOBAL", "LOAD_NAME") or (chain and step.opname in _ATTRIBUTES)
    return found


def _is_pure(value: object) -> bool:
    try:
        return value in _PURE or value in _OPERATIONS or getattr(value, "__module__", None) == math.__name__
    except TypeError:  # not hashable
        return False


# -- running


class _Symbol(Tensor):
    """Tensor that stands for a signal; operations on it are added to the program."""

    signal: Signal


class _StandIn:
    """A module in its own ``forward``: reads numbers, weights and children of the module, and sets nothing."""

    __slots__ = ("_of", "_symbols")
    _of: Any
    _symbols: Any

    def __init__(self, module: nn.Module, symbols: _Symbols) -> None:
        object.__setattr__(self, "_of", module)
        object.__setattr__(self, "_symbols", symbols)

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - for isinstance and super()
        return type(self._of)

    def __setattr__(self, name: str, value: object) -> None:
        raise _NoForm(f"it sets {name}")

    def __call__(self, *inputs: Any) -> Any:
        symbols = self._symbols
        with symbols.suspended():
            signals = [symbols.unwrap(value) for value in inputs]
            return symbols.wrap(symbols.program.apply(self._of, *signals))

    def __getattr__(self, name: str) -> Any:
        module = self._of
        owner = next((base for base in type(module).__mro__ if name in vars(base)), nn.Module)
        found: Any = vars(owner).get(name)
        for held in () if isinstance(found, property) else (*tensors_of(module), children_of(module), vars(module)):
            if name in held:
                return self._held(name, held[name])
        if owner is nn.Module or isinstance(found, classmethod):
            raise _NoForm(f"it reads {name}, which is no weight, child or number")
        if not isinstance(found, FunctionType | property | staticmethod):
            return self._held(name, found)
        _Reader(type(module)).method(name)
        return found.__get__(self, type(module))

    def _held(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            self._symbols.weights[id(value)] = value
        elif isinstance(value, nn.Module):
            return _StandIn(value, self._symbols)
        elif isinstance(value, tuple):
            return tuple(self._held(name, part) for part in value)
        else:
            _Reader(type(self._of)).value(name, value)
        return value

    def _children(self) -> list[_StandIn]:
        cls: Any = type(self._of)
        names = ("__iter__", "__len__", "__getitem__")
        if not any(
            all(getattr(cls, n, 0) is getattr(known, n) for n in names) for known in (nn.ModuleList, nn.Sequential)
        ):
            raise _NoForm(f"{cls.__name__} is no list of modules")
        return [self._held("children", child) for child in children_of(self._of).values()]

    def __iter__(self) -> Iterator[_StandIn]:
        return iter(self._children())

    def __len__(self) -> int:
        return len(self._children())

    def __getitem__(self, place: int) -> _StandIn:
        return self._children()[place]


class _Symbols(TorchFunctionMode):
    """Mode that adds operations on symbols to a program, and raises for all other functions of torch."""

    def __init__(self, program: Compilation) -> None:
        super().__init__()
        self.program = program
        self.weights: dict[int, Tensor] = {}
        self._suspended = False

    @contextmanager
    def suspended(self) -> Generator[None]:
        """Let functions of torch run in a block."""
        before, self._suspended = self._suspended, True
        yield
        self._suspended = before

    def wrap(self, value: Any) -> Any:
        """Return symbols of signals."""
        if type(value) is tuple:
            return self.wrap(value[0]) if len(value) == 1 else tuple(map(self.wrap, value))
        symbol = _Symbol()
        symbol.signal = value
        return symbol

    def unwrap(self, value: Any) -> Any:
        """Return the signals of symbols."""
        if isinstance(value, _Symbol):
            return value.signal
        if isinstance(value, list | tuple):
            return type(value)(self.unwrap(part) for part in value)
        if isinstance(value, Tensor) and self.weights.get(id(value)) is not value:
            raise _NoForm("it computes with a tensor that it doesn't hold")
        return value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._suspended:
            return func(*args, **(kwargs or {}))
        operation = _OPERATIONS.get(func)
        if operation is None:
            raise _NoForm(f"{_name(func)} has no operation in C++")
        options = {name: self.unwrap(value) for name, value in (kwargs or {}).items()}
        return self.wrap(operation(self.program, *map(self.unwrap, args), **options))


def _name(func: Any) -> str:
    if getattr(func, "__name__", "") in ("__get__", "__set__"):  # a property of tensors
        func = func.__self__
    return getattr(func, "__name__", str(func))


# -- operations, with the arguments of torch


def _activation(kind: str, **bounds: float) -> Callable[..., Signal]:
    names, defaults = list(bounds), list(bounds.values())

    def activate(program: Compilation, input: Any, *given: Any, inplace: bool = False, **named: Any) -> Signal:  # noqa: A002
        values = {**bounds, **dict(zip(names, given, strict=False)), **named}
        values = {
            name: default if values[name] is None else values[name]
            for name, default in zip(names, defaults, strict=True)
        }
        if inplace or len(given) > len(names) or named.keys() - bounds.keys():
            raise _NoForm("in-place operations have no form in C++")
        return _activated(program, kind, input, *map(_number, values.values()))

    return activate


def _activated(program: Compilation, kind: str, x: Any, low: float = 0.0, high: float = math.inf) -> Signal:
    if low > high:
        raise _NoForm("the bounds are in the wrong order")
    out = program.inside(program.numbers(_signal(x)).value.columns)
    program.program.activate(kind, x.value, out.value, low, high)
    return out


def _signal(value: object) -> Signal:
    if not isinstance(value, Signal):
        raise _NoForm("it computes with something else than its inputs")
    return value


def _number(value: object) -> float:
    if not isinstance(value, int | float):
        raise _NoForm(f"{type(value).__name__} is not a number")
    return float(value)


def _dim(x: Signal, dim: int) -> int:
    """Return a dimension counted from the end, as the number of batch dimensions may differ between calls."""
    if not -len(x.shape) <= dim < 0:
        raise _NoForm(f"dim={dim} is not counted from the end, or is a batch dimension")
    return dim


def _last(x: Signal, dim: int) -> Signal:
    if _dim(x, dim) != -1 or len(x.shape) != 1:
        raise _NoForm(f"dim={dim} of {list(x.shape)} is not the only one")
    return x


def _cat(program: Compilation, tensors: Sequence[Signal], dim: int = 0) -> Signal:
    return program.joined([_last(_signal(part), dim) for part in tensors])


def _linear(program: Compilation, input: Any, weight: Any, bias: Any = None) -> Signal:  # noqa: A002
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise _NoForm("the weight is no matrix that it holds")
    out = program.inside(weight.shape[0])
    program.program.linear(program.numbers(_signal(input), weight.shape[1]).value, weight, bias, out.value)
    return out


def _dropout(program: Compilation, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Signal:  # noqa: A002
    if training:
        raise _NoForm("dropout draws random numbers")
    return _signal(input)


def _flatten(program: Compilation, input: Any, start_dim: int = 0, end_dim: int = -1) -> Signal:  # noqa: A002
    first, end = _dim(_signal(input), start_dim), _dim(input, end_dim) + 1
    if end or first != -len(input.shape):
        raise _NoForm("it flattens a part of the dimensions")
    return input._replace(shape=(input.value.columns,))


def _getitem(program: Compilation, x: Any, index: Any) -> Signal:
    if not (isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis and isinstance(index[1], slice)):
        raise _NoForm("only slices of the last dimension have a form in C++, x[..., a:b]")
    begin, end, step = index[1].indices(_last(_signal(x), -1).value.columns)
    if step != 1 or begin >= end:
        raise _NoForm("the slice is empty or has a step")
    return x.part(begin, end - begin)


def _chunk(program: Compilation, input: Any, chunks: int, dim: int = 0) -> tuple[Signal, ...]:  # noqa: A002
    return _split(program, input, -(-_last(_signal(input), dim).value.columns // chunks), dim)


def _split(program: Compilation, tensor: Any, split_size: Any, dim: int = 0) -> tuple[Signal, ...]:
    columns = _last(_signal(tensor), dim).value.columns
    if isinstance(split_size, int):
        split_size = [min(split_size, columns - begin) for begin in range(0, columns, split_size)]
    if sum(split_size) != columns or min(split_size) <= 0 or len(split_size) < 2:
        raise _NoForm("the parts don't add up, or one is empty")
    return tuple(tensor.part(sum(split_size[:i]), size) for i, size in enumerate(split_size))


_TABLE: list[tuple[Callable[..., Any], list[Any]]] = [
    (_activation("tanh"), [torch.tanh, Tensor.tanh, F.tanh]),
    (_activation("sigmoid"), [torch.sigmoid, Tensor.sigmoid, F.sigmoid]),
    (_activation("silu"), [F.silu]),
    (_activation("clamp"), [torch.relu, Tensor.relu, F.relu]),
    (_activation("elu", alpha=1.0), [F.elu]),
    (_activation("leaky", negative_slope=0.01), [F.leaky_relu]),
    (_activation("clamp", min_val=-1.0, max_val=1.0), [F.hardtanh]),
    (_activation("clamp", min=-math.inf, max=math.inf), [torch.clamp, Tensor.clamp, torch.clip, Tensor.clip]),
    (_cat, [torch.cat, torch.concat, torch.concatenate]),
    (_linear, [F.linear]),
    (_dropout, [F.dropout]),
    (_flatten, [torch.flatten, Tensor.flatten]),
    (_getitem, [Tensor.__getitem__]),
    (_chunk, [torch.chunk, Tensor.chunk]),
    (_split, [torch.split, Tensor.split]),
]
_OPERATIONS = {function: operation for operation, functions in _TABLE for function in functions}


register_translation(nn.Module, _translate, depends=())

"""State of Python objects as plain data: attribute values, restored into newly created objects.

Restoring a state never runs code from it. Functions, classes, and modules are those of the fresh objects at the same
place. An object is restored attribute by attribute, into the fresh object at its place or, for classes of the
environment's own package, into an empty instance of an already imported class. Constructors and other methods aren't
called.
"""

from __future__ import annotations

import collections
import enum
import functools
import json
import logging
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv

from recurl.core.errors import ArgumentError
from recurl.envs.gymnasium_compat import LAST_RESULTS
from recurl.envs.state_foreign import FOREIGN
from recurl.envs.state_plain import MAX_BYTES, PlainReader, PlainWriter, UnsavableError, unsavable

__all__ = ["GraphReader", "GraphWriter", "has_own_state"]

_HEAP_TYPE = 1 << 9
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_NEVER_SAVED = (EnvSpec, logging.Logger, torch.device, *_LOCKS)
_SAVED_BY_NAME = (type, types.ModuleType, types.BuiltinFunctionType, np.ufunc)
_ABSENT: Any = object()
_MAX_NODES = 10**6
_CONTAINERS: dict[str, type] = {
    "list": list,
    "dict": dict,
    "set": set,
    "deque": collections.deque,
    "OrderedDict": collections.OrderedDict,
    "Counter": collections.Counter,
}


def has_own_state(env: Any) -> bool:
    """Return whether an unwrapped environment implements ``get_state()`` and ``set_state(state)``."""
    wrapper = isinstance(env, gym.Wrapper | gym.vector.VectorWrapper)
    mine = isinstance(env, gym.Env | VectorEnv) and not wrapper
    return mine and hasattr(type(env), "get_state") and hasattr(type(env), "set_state")


class GraphWriter(PlainWriter):
    """Writer of an object and all objects that it refers to; see :class:`GraphReader`.

    Args:
        most: maximum number of bytes.

    Example:
        >>> class Place:
        ...     def __init__(self):
        ...         self.seen, self.steps = [1, 2], 3
        >>> used, fresh = Place(), Place()
        >>> used.seen.append(5)
        >>> GraphReader(GraphWriter().written(used)).restore(fresh)
        >>> fresh.seen
        [1, 2, 5]
    """

    def __init__(self, most: int = MAX_BYTES) -> None:
        super().__init__(most=most)
        self._numbers: dict[Any, int] = {}
        self._nodes: list[Any] = []
        self._queue: collections.deque[tuple[int, Any, str]] = collections.deque()
        self._alive: list[Any] = []  # keeps written objects alive, so that their ids aren't reused
        self._writers: dict[type, Callable[[Any, str], list[Any]]] = {
            **dict.fromkeys((list, set), lambda value, at: [type(value).__name__, self._items(value, at)]),
            **dict.fromkeys(
                (dict, collections.OrderedDict, collections.Counter),
                lambda value, at: [type(value).__name__, self._pairs(value, at)],
            ),
            collections.defaultdict: lambda value, at: [
                "defaultdict",
                self._pairs(value, at),
                self.value(value.default_factory, at),
            ],
            collections.deque: lambda value, at: ["deque", self._items(value, at), value.maxlen],
            bytearray: lambda value, _: ["bytearray", *self.put(value)],
            np.ndarray: self._ndarray,
            torch.Tensor: self._tensor,
            torch.nn.Parameter: self._tensor,
            torch.UntypedStorage: lambda value, _: ["storage", *self.put(bytes(value.tolist()))],
            types.FunctionType: self._function,
            functools.partial: lambda value, at: [
                "partial",
                self._items((value.func, value.args, value.keywords), at),
            ],
        }

    def written(self, root: object) -> dict[str, Any]:
        """Return the state of ``root``.

        Raises:
            UnsavableError: a value in it can't be saved.
        """
        begin = self.value(root, type(root).__name__)
        while self._queue:
            number, value, at = self._queue.popleft()
            self._nodes[number] = self._node(value, at)
        return self.state([begin, self._nodes])

    def other(self, value: Any, at: str) -> Any:
        """Return a reference to a mutable value, or the name of an immutable one."""
        if isinstance(value, enum.Enum):
            return ["enum", *_qualified_name(type(value)), value.name]
        if isinstance(value, _NEVER_SAVED):
            return ["kept", *_qualified_name(type(value))]
        if _is_named(value) and _is_unbound(value):
            return ["same", *_qualified_name(value)]
        if isinstance(value, tuple):
            kind = type(value)
            if not hasattr(kind, "_fields") or not _is_plain_class(kind, tuple):
                raise unsavable(value, at)
            return ["namedtuple", *_qualified_name(kind), self._items(value, at)]
        return ["ref", self._number(value, id(value), at)]

    def _number(self, value: Any, key: Any, at: str) -> int:
        if key not in self._numbers:
            if len(self._nodes) >= _MAX_NODES:
                raise UnsavableError(f"its state has more than {_MAX_NODES} objects")
            self._numbers[key] = len(self._nodes)
            self._nodes.append(None)
            self._alive.append(value)
            self._queue.append((self._numbers[key], value, at))
        return self._numbers[key]

    def _node(self, value: Any, at: str) -> list[Any]:
        kind = type(value)
        write = self._writers.get(kind)
        if write is not None:
            return write(value, at)
        name = ".".join(_qualified_name(kind))
        if name in FOREIGN:
            return ["foreign", name, self._plain(FOREIGN[name].save(value), at)]
        owner = getattr(value, "__self__", None)
        if callable(value) and owner is not None and hasattr(value, "__name__"):
            return ["method", value.__name__, self.value(owner, at)]
        if has_own_state(value):
            return [
                "own",
                *_qualified_name(kind),
                self._plain(cast(Any, value).get_state(), f"{kind.__name__}.get_state()"),
            ]
        return self._object(value, at)

    def _plain(self, value: Any, at: str) -> Any:
        return PlainWriter(self.data, self.most).value(value, at)

    def _ndarray(self, value: np.ndarray[Any, Any], at: str) -> list[Any]:
        base: Any = value
        while isinstance(base.base, np.ndarray):
            base = base.base
        if value.dtype == object and base is value:
            return ["objects", list(value.shape), self._items(value.ravel().tolist(), at)]
        if base is value or not base.flags.owndata:
            return [*self.array(value, at), value.flags.writeable]
        if type(base) is not np.ndarray or base.dtype == object or not base.flags.forc:
            raise UnsavableError(f"{at} is a view of an array that holds objects or isn't contiguous")
        offset = value.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        form = [self._dtype(value.dtype, at), list(value.shape), list(value.strides), offset, value.flags.writeable]
        return ["view", self.value(base, at), *form]

    def _tensor(self, value: torch.Tensor, at: str) -> list[Any]:
        if value.layout is not torch.strided or value.device.type != "cpu" or value.grad_fn is not None:
            raise UnsavableError(f"{at} is a tensor that is sparse, on {value.device}, or part of a graph")
        storage = value.untyped_storage()
        number = self._number(storage, ("storage", storage.data_ptr()) if storage.nbytes() else id(storage), at)
        form = [
            str(value.dtype).removeprefix("torch."),
            list(value.shape),
            list(value.stride()),
            value.storage_offset(),
        ]
        return ["tensor", number, *form, value.requires_grad, isinstance(value, torch.nn.Parameter)]

    def _function(self, value: types.FunctionType, at: str) -> list[Any]:
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        return ["function", *_qualified_name(value), [self.value(content, f"{at} of a closure") for content in cells]]

    def _object(self, value: object, at: str) -> list[Any]:
        kind = type(value)
        if not _is_plain_class(kind):
            raise unsavable(value, at)
        attributes = [
            [name, self.value(content, f"{kind.__name__}.{name}")]
            for name, content in _attributes(value).items()
            if not _is_skipped(value, name, content)
        ]
        return ["object", *_qualified_name(kind), attributes]


class GraphReader(PlainReader):
    """Reader that restores a saved state into a fresh object, created the same way as the saved one.

    Args:
        state: result of :meth:`GraphWriter.written`.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        super().__init__(memoryview(state["bytes"].cpu().contiguous().numpy()))
        self._text, self._nodes = state["objects"], list[Any]()
        self._made: dict[int, Any] = {}
        self._claimed: set[int] = set()
        self._alive: list[Any] = []
        self._queue: collections.deque[Callable[[], None]] = collections.deque()
        self._deferred: list[Callable[[], None]] = []
        self._packages: set[str] = set()

    def restore(self, root: object, simulators: Iterable[object] = ()) -> None:
        """Restore the state into ``root``.

        Args:
            root: the fresh object. If it is an environment of Gymnasium, objects may be created of the classes of its
                package, and of those of the environments inside it.
            simulators: further objects whose packages have such classes.

        Raises:
            ArgumentError: the state belongs to another kind of object.
        """
        engines = (*_nested_envs(root), *simulators)
        self._packages = {kind.__module__.partition(".")[0] for engine in engines for kind in type(engine).__mro__}
        self._packages -= {"builtins", "abc", "typing", "recurl"}
        try:
            begin, self._nodes = json.loads(self._text)
            if self.value(begin, root) is not root:
                raise ArgumentError(f"The state belongs to another kind of environment than {root}.")
            while self._queue:
                self._queue.popleft()()
            for restore in self._deferred:
                restore()
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError(
                f"The state can't be restored in {root} ({type(error).__name__}: {error}): it was saved from another "
                "environment, or modified."
            ) from error

    def other(self, tag: str, rest: list[Any], fresh: Any) -> Any:
        """Return the value that a reference or a name denotes."""
        if tag == "ref":
            return self._node(rest[0], fresh)
        if tag == "enum":
            return _member(self._class(rest[:2], type(fresh)), rest[2])
        if tag == "kept":
            return fresh if fresh is not None and _qualified_name(type(fresh)) == tuple(rest) else _ABSENT
        if tag == "namedtuple":
            kind = self._class(rest[:2], type(fresh))
            if not (issubclass(kind, tuple) and hasattr(kind, "_fields")):
                raise ArgumentError(f"{kind} is not a named tuple.")
            return tuple.__new__(kind, self._items(rest[2], fresh))
        if tag == "same" and _is_named(fresh) and _qualified_name(fresh) == tuple(rest):
            return fresh
        raise ArgumentError(f"The state has {'.'.join(map(str, rest))} where a fresh environment has {fresh!r}.")

    def _node(self, number: int, fresh: Any) -> Any:
        if number in self._made:
            return self._made[number]
        tag, *rest = self._nodes[number]
        read: Any = getattr(self, f"_read_{'container' if tag in _CONTAINERS else tag}")
        return read(number, fresh, tag, *rest)

    def _claim(self, number: int, value: Any, fill: Callable[[], None] | None = None) -> Any:
        """Register ``value`` as the object with this number, and schedule ``fill``."""
        self._made[number] = value
        self._claimed.add(id(value))
        self._alive.append(value)
        if fill is not None:
            self._queue.append(fill)
        return value

    def _is_reusable(self, fresh: Any, kind: type) -> bool:
        return type(fresh) is kind and id(fresh) not in self._claimed

    def _read_container(self, number: int, fresh: Any, tag: str, contents: list[Any], most: int | None = None) -> Any:
        kind: Any = _CONTAINERS[tag]
        free = self._is_reusable(fresh, kind) and (tag != "deque" or fresh.maxlen == most)
        made: Any = fresh if free else kind(maxlen=most) if tag == "deque" else kind()
        return self._claim(number, made, lambda: self._fill(made, contents, fresh))

    def _read_defaultdict(self, number: int, fresh: Any, _: str, contents: list[Any], factory: Any) -> Any:
        if not self._is_reusable(fresh, collections.defaultdict):
            raise ArgumentError("A fresh environment has no defaultdict where the state has one.")
        self.value(factory, fresh.default_factory)
        return self._claim(number, fresh, lambda: self._fill(fresh, contents, fresh))

    def _fill(self, made: Any, contents: list[Any], fresh: Any) -> None:
        if isinstance(made, dict):
            known: dict[Any, Any] = dict(cast("dict[Any, Any]", fresh)) if isinstance(fresh, dict) else {}
            pairs = [(_hashable(self.value(key)), item) for key, item in contents]
            found = [(key, self._required(self.value(item, known.get(key)))) for key, item in pairs]
            filled = cast("dict[Any, Any]", made)
            filled.clear()
            for key, item in found:
                filled[key] = item
            return
        before: Any = list(cast("list[Any]", fresh)) if isinstance(fresh, list | collections.deque) else None
        if isinstance(fresh, set):  # of classes, say, which are those of the fresh set
            named = {("same", *_qualified_name(item)): item for item in cast("set[Any]", fresh) if _is_named(item)}
            before = [named.get(tuple(each)) if _is_name(each) else None for each in contents]
        items = [self._required(item) for item in self._items(contents, before)]
        made.clear()
        if isinstance(made, set):
            made.update(_hashable(item) for item in items)
        else:
            made.extend(items)

    def _read_bytearray(self, number: int, fresh: Any, _: str, start: int, count: int) -> Any:
        made = fresh if self._is_reusable(fresh, bytearray) else bytearray()
        made[:] = self.get(start, count)
        return self._claim(number, made)

    def _read_array(self, number: int, fresh: Any, _: str, *form: Any) -> Any:
        made = self.array(*form[:-1])
        if self._is_reusable(fresh, np.ndarray) and fresh.dtype == made.dtype and fresh.shape == made.shape:
            if fresh.flags.writeable and form[-1]:
                fresh[...] = made
                return self._claim(number, fresh)
            if not fresh.flags.writeable and fresh.tobytes() == made.tobytes():
                return self._claim(number, fresh)
        made.flags.writeable = bool(form[-1])
        return self._claim(number, made)

    def _read_objects(self, number: int, fresh: Any, _: str, shape: list[int], items: list[Any]) -> Any:
        reusable = self._is_reusable(fresh, np.ndarray) and fresh.dtype == object and list(fresh.shape) == shape
        made = fresh if reusable else np.empty(shape, object)

        def fill() -> None:
            found = self._items(items, made.ravel().tolist())
            for index, item in zip(np.ndindex(*shape), found, strict=True):
                made[index] = self._required(item)

        return self._claim(number, made, fill)

    def _read_view(self, number: int, fresh: Any, _: str, base: Any, *form: Any) -> Any:
        dtype, shape, strides, offset, writeable = form
        owner = fresh
        while isinstance(owner, np.ndarray) and isinstance(owner.base, np.ndarray):
            owner = owner.base
        memory = self.value(base, owner)
        buffer = memory if memory.flags.c_contiguous else memory.T
        made = np.ndarray(shape, self._checked_dtype(dtype), buffer, offset, strides)
        if writeable != made.flags.writeable:
            made.flags.writeable = writeable
        return self._claim(number, made)

    @staticmethod
    def _checked_dtype(dtype: str) -> np.dtype[Any]:
        found = np.dtype(dtype)
        if found.hasobject:
            raise ArgumentError(f"A saved environment has no views of dtype {dtype!r}.")
        return found

    def _read_storage(self, number: int, fresh: Any, _: str, start: int, count: int) -> Any:
        del fresh
        data = self.get(start, count)
        made = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return self._claim(number, made.untyped_storage())

    def _read_tensor(self, number: int, fresh: Any, _: str, storage: int, *form: Any) -> Any:
        dtype, shape, strides, offset, requires_grad, is_parameter = form
        kind = getattr(torch, dtype)
        if not isinstance(kind, torch.dtype) or min([*shape, *strides, offset], default=0) < 0:
            raise ArgumentError("A saved tensor has an invalid dtype, shape, stride, or offset.")
        made = torch.empty(0, dtype=kind).set_(self._node(storage, None), offset, shape, strides)
        if is_parameter:
            if not self._is_reusable(fresh, torch.nn.Parameter):
                raise ArgumentError("A fresh environment has no parameter where the state has one.")
            fresh.data = made
            return self._claim(number, fresh)
        return self._claim(number, made.requires_grad_(requires_grad))

    def _read_function(self, number: int, fresh: Any, _: str, module: str, name: str, contents: list[Any]) -> Any:
        cells = [cell for cell in getattr(fresh, "__closure__", None) or () if _is_filled(cell)]
        if (
            type(fresh) is not types.FunctionType
            or _qualified_name(fresh) != (module, name)
            or len(cells) != len(contents)
        ):
            raise ArgumentError(f"The state has the function {module}.{name} where a fresh environment has {fresh!r}.")

        def fill() -> None:
            for cell, content in zip(cells, contents, strict=True):
                found = self.value(content, cell.cell_contents)
                if found is not _ABSENT:
                    cell.cell_contents = found

        return self._claim(number, fresh, fill)

    def _read_partial(self, number: int, fresh: Any, _: str, parts: list[Any]) -> Any:
        if type(fresh) is not functools.partial:
            raise ArgumentError(f"The state has a functools.partial where a fresh environment has {fresh!r}.")
        function, arguments, keywords = self._items(parts, [fresh.func, fresh.args, fresh.keywords])
        cast(Any, fresh).__setstate__((function, arguments, keywords, vars(fresh)))
        return self._claim(number, fresh)

    def _read_method(self, number: int, fresh: Any, _: str, name: str, owner: Any) -> Any:
        known = getattr(fresh, "__self__", None)
        if known is None or getattr(fresh, "__name__", None) != name:
            raise ArgumentError(f"The state has the method {name} where a fresh environment has {fresh!r}.")
        found = self.value(owner, known)
        if type(found) is not type(known):
            raise ArgumentError(f"The method {name} belongs to {type(known)}, got {type(found)}.")
        return self._claim(number, fresh if found is known else getattr(found, name))

    def _read_foreign(self, number: int, fresh: Any, _: str, name: str, written: Any) -> Any:
        known, state = FOREIGN[name], self._plain(written)
        reusable = (
            fresh is not None and ".".join(_qualified_name(type(fresh))) == name and id(fresh) not in self._claimed
        )
        if known.make is None and not reusable:
            raise ArgumentError(f"A fresh environment has no {name} where the state has one.")
        made = fresh if known.make is None else known.make(state)
        known.restore(made, state)
        return self._claim(number, made)

    def _plain(self, written: Any) -> Any:
        return PlainReader(self.data).value(written)

    def _read_own(self, number: int, fresh: Any, _: str, module: str, name: str, written: Any) -> Any:
        if _qualified_name(type(fresh)) != (module, name):
            raise ArgumentError(f"The state belongs to {module}.{name}, not to {fresh!r}.")
        self._deferred.append(lambda: fresh.set_state(self._plain(written)))
        return self._claim(number, fresh)

    def _read_object(self, number: int, fresh: Any, _: str, module: str, name: str, attributes: list[Any]) -> Any:
        reusable = _qualified_name(type(fresh)) == (module, name) and id(fresh) not in self._claimed
        made = fresh if reusable else self._new_instance(module, name)
        return self._claim(number, made, lambda: self._fill_object(made, attributes))

    def _fill_object(self, made: object, attributes: list[Any]) -> None:
        before = _attributes(made)
        for name, content in attributes:
            if not isinstance(name, str) or (name not in before and _shadows_class(type(made), name)):
                raise ArgumentError(f"The state has the attribute {name!r}, which the class {type(made)} defines.")
            value = self.value(content, before.get(name))
            if value is not _ABSENT:
                _set_attribute(made, name, value)
        saved = {name for name, _ in attributes}
        for name, content in before.items():
            if name not in saved and not _is_skipped(made, name, content):
                _delete_attribute(made, name)

    def _new_instance(self, module: str, name: str) -> object:
        kind = self._class((module, name), None)
        is_env = issubclass(kind, gym.Env | VectorEnv | gym.Space | enum.Enum)
        if is_env or not _is_plain_class(kind) or hasattr(kind, "__del__"):
            raise ArgumentError(f"The state has a {module}.{name} where a fresh environment has none or another.")
        return object.__new__(kind)

    def _class(self, name: Any, known: type | None) -> type:
        """Return the class of the fresh environment's object at this place, or an imported class of its package."""
        if known is not None and _qualified_name(known) == tuple(name):
            return known
        module, path = name
        found: Any = sys.modules.get(module) if module.partition(".")[0] in self._packages else None
        for part in path.split("."):
            found = None if found is None else vars(found).get(part)
        if not isinstance(found, type) or _qualified_name(found) != (module, path):
            raise ArgumentError(f"The state has an object of {module}.{path}, which the environment's package lacks.")
        return found

    @staticmethod
    def _required(value: Any) -> Any:
        if value is _ABSENT:
            raise ArgumentError("A fresh environment lacks an object that is never saved, such as its spec.")
        return value


def _qualified_name(value: Any) -> tuple[str, str]:
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or ""
    return str(getattr(value, "__module__", None) or ""), str(name)


def _is_named(value: Any) -> bool:
    """Return whether an object is saved by its name."""
    return isinstance(value, _SAVED_BY_NAME)


def _is_name(written: Any) -> bool:
    return isinstance(written, list) and cast("list[Any]", written)[0] == "same"


def _is_unbound(value: Any) -> bool:
    """Return whether a function, class, or module is not bound to an object."""
    return isinstance(getattr(value, "__self__", None), types.ModuleType | None)


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises if empty
    except ValueError:
        return False
    return True


def _member(kind: type, name: str) -> enum.Enum:
    if not issubclass(kind, enum.Enum) or name not in kind.__members__:
        raise ArgumentError(f"{kind} has no member {name!r}.")
    return kind.__members__[name]


def _hashable(value: Any) -> Any:
    """Return a dict key or set member; raise if its hash depends on attributes, which are restored later."""
    kind = type(value)
    if kind in (tuple, frozenset):
        for part in value:
            _hashable(part)
    elif (
        kind.__module__ not in ("builtins", "numpy")
        and not isinstance(value, enum.Enum)
        and kind.__hash__ not in (object.__hash__, tuple.__hash__)
    ):
        raise ArgumentError(f"The state has an object of {kind}, which defines its own hash, as a key.")
    return value


def _is_plain_class(kind: type, base: type = object) -> bool:
    """Return whether instances of a class hold all their state in attributes and none in native memory."""
    slots = 0
    for each in kind.__mro__:
        if each in (object, base):
            continue
        made = vars(each).get("__new__")
        if not each.__flags__ & _HEAP_TYPE or isinstance(made, types.BuiltinFunctionType):
            return False
        slots += sum(type(member) is types.MemberDescriptorType for member in vars(each).values())
    return kind.__basicsize__ <= base.__basicsize__ + 8 * (slots + 2)


def _slots(kind: type) -> Iterator[tuple[str, Any]]:
    for each in kind.__mro__:
        for member in vars(each).values():
            if type(member) is types.MemberDescriptorType:
                yield member.__name__, member


def _attributes(value: object) -> dict[str, Any]:
    """Return the instance attributes of an object."""
    found: dict[str, Any] = {}
    for name, member in _slots(type(value)):
        try:
            found[name] = member.__get__(value)
        except AttributeError:
            continue
    return {**found, **getattr(value, "__dict__", {})}


def _set_attribute(value: object, name: str, content: Any) -> None:
    member = dict(_slots(type(value))).get(name)
    if member is not None:
        member.__set__(value, content)
    else:
        vars(value)[name] = content


def _delete_attribute(value: object, name: str) -> None:
    member = dict(_slots(type(value))).get(name)
    if member is not None:
        member.__delete__(value)
    else:
        del vars(value)[name]


def _shadows_class(kind: type, name: str) -> bool:
    """Return whether an instance attribute would shadow a method or property of its class."""
    found = next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)
    is_slot = type(found) is types.MemberDescriptorType
    return name.startswith("__") or (not is_slot and (callable(found) or hasattr(found, "__get__")))


def _is_skipped(holder: object, name: str, content: Any) -> bool:
    """Return whether an attribute is neither saved nor restored: arrays of a space, last results of a vector env."""
    if isinstance(holder, gym.Space):
        return isinstance(content, np.ndarray)
    return isinstance(holder, VectorEnv) and name in ("env_fns", *LAST_RESULTS)


def _nested_envs(root: object) -> Iterator[object]:
    """Yield an environment and all environments inside it."""
    while isinstance(root, gym.Env | VectorEnv):
        yield root
        for env in (*getattr(root, "envs", ()), *getattr(root, "rows", ())):
            yield from _nested_envs(env)
        root = getattr(root, "env", None)

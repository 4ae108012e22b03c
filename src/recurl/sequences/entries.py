"""A dict of tensors that replaces a TensorDict where one would be created, filled and dropped at every step.

Setting an entry of a TensorDict costs microseconds, more than the arithmetic of a small policy. The parts of recurl
that run at every step need only a small part of its interface, listed by :class:`Step`: get, set, membership, the
batch size. A method that needs no more is marked with :func:`takes_entries`. An override loses the mark, and the
environment or module then runs on TensorDicts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Protocol, Self, TypeVar, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from recurl.core.keys import NestedKey
from recurl.core.spans import TRANSFERS, span

__all__ = ["Entries", "Step", "StepT", "leaves", "leaves_by_path", "like", "takes_entries", "unmarked"]

_F = TypeVar("_F", bound=Callable[..., Any])
_MARK = "_recurl_takes_entries"


class Step(Protocol):
    """The part of TensorDict's interface that a step needs; implemented by TensorDicts and by :class:`Entries`."""

    @property
    def batch_size(self) -> torch.Size:
        """Leading dimensions of every entry."""
        ...

    @property
    def device(self) -> torch.device | None:
        """Device of the entries; None if it is not specified."""
        ...

    @property
    def ndim(self) -> int:
        """Number of batch dimensions."""
        ...

    def get(self, key: Any, default: Any = ..., /) -> Any:
        """Return an entry, or ``default``."""
        ...

    def set(self, key: Any, value: Any, /) -> Any:
        """Set an entry."""
        ...

    def __contains__(self, key: Any, /) -> bool: ...

    def __getitem__(self, key: Any, /) -> Any: ...

    def items(self) -> Any:
        """Return pairs of name and value; nested entries are not flattened."""
        ...

    def keys(self) -> Any:
        """Return the names."""
        ...

    def pop(self, key: Any, /) -> Any:
        """Remove an entry and return it."""
        ...

    def update(self, entries: Any, /) -> Any:
        """Set several entries."""
        ...

    def exclude(self, *names: Any) -> Any:
        """Return a copy without the entries ``names``; tensors are shared."""
        ...

    def copy(self) -> Any:
        """Return a copy, also of nested entries; tensors are shared."""
        ...

    def clone(self) -> Any:
        """Return a copy, also of nested entries, with copied tensors."""
        ...


StepT = TypeVar("StepT", bound=Step)


class Entries(dict[Any, Any]):
    """Dict of tensors and nested ``Entries`` with the part of TensorDict's interface that a step needs.

    Nothing is checked or copied when an entry is set; a tuple is a nested key.

    Args:
        entries: names to tensors or ``Entries``.
        batch_size: leading dimensions of all entries.
        device: device of all entries; None if it is not specified.

    Attributes:
        unread: keys that a module need not write, since nothing reads them.

    Example:
        >>> step = Entries({"observation": torch.zeros(2, 3)}, torch.Size([2]))
        >>> step.set(("next", "reward"), torch.ones(2, 1)).get(("next", "reward")).shape
        torch.Size([2, 1])
        >>> ("next", "done") in step, step.get("missing", None)
        (False, None)
        >>> step.to_tensordict().batch_size
        torch.Size([2])
    """

    __slots__ = ("_recurl_index", "batch_size", "device", "unread")

    def __init__(self, entries: Mapping[Any, Any], batch_size: torch.Size, device: torch.device | None = None) -> None:
        super().__init__(entries)
        self.batch_size = batch_size
        self.device = device
        self.unread: Collection[NestedKey] = ()

    @classmethod
    def of(cls, tensordict: Step) -> Entries:
        """Return the entries of ``tensordict``, sharing its tensors; return ``Entries`` unchanged."""
        if isinstance(tensordict, Entries):
            return tensordict
        entries = {
            name: value if isinstance(value, Tensor) else cls.of(value)  # pyright: ignore[reportArgumentType] - nested
            for name, value in tensordict.items()
        }
        return cls(entries, tensordict.batch_size, tensordict.device)

    def to_tensordict(self) -> TensorDict:
        """Return a TensorDict of the same tensors."""
        entries = {name: value.to_tensordict() if isinstance(value, Entries) else value for name, value in self.items()}
        return TensorDict(entries, self.batch_size, device=self.device)

    @property
    def ndim(self) -> int:
        """Number of batch dimensions."""
        return len(self.batch_size)

    def get(self, key: NestedKey, default: Any = None) -> Any:
        """Return an entry, or ``default``."""
        if type(key) is not tuple:
            return dict.get(self, key, default)
        value: Any = self
        for name in key:
            value = dict.get(value, name)
            if value is None:
                return default
        return value

    def __getitem__(self, key: NestedKey) -> Any:
        if type(key) is not tuple:
            return dict.__getitem__(self, key)
        value: Any = self
        for name in key:
            value = dict.__getitem__(value, name)
        return value

    def __contains__(self, key: object) -> bool:
        return self.get(key) is not None if type(key) is tuple else dict.__contains__(self, key)

    def set(self, key: NestedKey, value: Any) -> Self:
        """Set an entry and return ``self``; a nested key creates missing levels."""
        if type(key) is not tuple:
            self[key] = value
            return self
        inner: Entries = self
        for name in key[:-1]:
            found = dict.get(inner, name)
            if found is None:
                inner[name] = found = Entries({}, self.batch_size, self.device)
            inner = found
        inner[key[-1]] = value
        return self

    def exclude(self, *names: str) -> Entries:
        """Return a copy without the entries ``names``; the tensors are shared."""
        return Entries({k: v for k, v in self.items() if k not in names}, self.batch_size, self.device)

    def copy(self) -> Entries:
        """Return a copy, also of nested entries; the tensors are shared."""
        entries = {name: value.copy() if isinstance(value, Entries) else value for name, value in self.items()}
        copy = Entries(entries, self.batch_size, self.device)
        copy.unread = self.unread
        return copy

    def clone(self) -> Entries:
        """Return a copy, also of nested entries, with copied tensors."""
        return Entries({name: value.clone() for name, value in self.items()}, self.batch_size, self.device)


def leaves(tensordict: Step) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Return the path and the tensor of every leaf, nested ones included."""
    return iter(leaves_by_path(tensordict).items())


def leaves_by_path(tensordict: Step) -> dict[tuple[str, ...], Tensor]:
    """Return the leaves of ``tensordict`` by their paths."""
    found: dict[tuple[str, ...], Tensor] = {}
    _collect_leaves(tensordict, (), found)
    return found


def _collect_leaves(tensordict: Step, prefix: tuple[str, ...], found: dict[tuple[str, ...], Tensor]) -> None:
    for name, value in tensordict.items():
        if isinstance(value, Tensor):
            found[(*prefix, name)] = value
        else:
            _collect_leaves(value, (*prefix, name), found)


def like(given: Step | None, entries: Mapping[Any, Tensor], batch_size: torch.Size, device: torch.device | None) -> Any:
    """Return ``entries`` on ``device`` in the type of ``given``: ``Entries``, or else a TensorDict."""
    if not isinstance(given, Entries):
        return TensorDict(dict(entries), batch_size, device=device)
    out = Entries({}, batch_size, device)
    on_host = device is not None and device.type == "cpu"
    for key, value in entries.items():
        there = value.is_cpu if on_host else device is None or value.device == device
        out.set(key, value if there else _moved(value, cast(torch.device, device)))
    return out


def _moved(value: Tensor, device: torch.device) -> Tensor:
    with span(TRANSFERS):
        return value.to(device)


def takes_entries(function: _F) -> _F:
    """Mark a method as accepting :class:`Entries` wherever it accepts a TensorDict, with the same result."""
    setattr(function, _MARK, True)
    return function


def unmarked(instance: object, *methods: str) -> str | None:
    """Return which of ``methods`` of ``instance`` needs a TensorDict, as text, or None if none does."""
    for name in methods:
        if name in vars(instance) or not getattr(getattr(type(instance), name), _MARK, False):
            return f"{type(instance).__name__}.{name} needs a TensorDict"
    return None

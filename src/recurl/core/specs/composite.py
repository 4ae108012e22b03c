"""Spec of a TensorDict."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingKeyError
from recurl.core.keys import NestedKey, normalize_key, path_of
from recurl.core.specs.base import Device, TensorSpec

if TYPE_CHECKING:
    from tensordict import TensorDict


class Composite(TensorSpec):
    """Spec of a TensorDict: a tree of specs.

    Args:
        specs: mapping from names (or nested keys) to specs, or to mappings of specs.
        shape: batch dimensions; the shape of every leaf starts with them.
        device: device to move every leaf to; None leaves each leaf on its device.
        **named: further entries.

    Raises:
        ArgumentError: a leaf's shape does not start with ``shape``, or a key is given twice or nested in another key.
        ArgumentTypeError: an entry is neither a spec nor a mapping.

    Example:
        >>> from recurl.core.specs import Categorical, Unbounded
        >>> spec = Composite({"observation": Unbounded(3), ("agent", "id"): Categorical(5)})
        >>> list(spec.keys(True, True))
        ['observation', ('agent', 'id')]
        >>> spec.expand(8).zero()["agent", "id"].shape
        torch.Size([8])
    """

    def __init__(
        self,
        specs: Mapping[Any, Any] | None = None,
        shape: int | Sequence[int] = (),
        device: Device = None,
        **named: Any,
    ) -> None:
        super().__init__(shape, None, device)
        self._specs: dict[str, TensorSpec] = {}
        if specs is not None and not isinstance(specs, Mapping | Composite):  # type: ignore[reportUnnecessaryIsInstance] # users
            raise ArgumentTypeError(f"A Composite maps keys to specs, as in {{'observation': spec}}, got {specs!r}.")
        for key, spec in (*(specs or {}).items(), *named.items()):
            if key in self:
                raise ArgumentError(f"Every entry of a Composite must be given once, but {key!r} is given twice.")
            self.set(key, spec)

    def set(self, key: NestedKey, spec: TensorSpec | Mapping[Any, Any]) -> None:
        """Set or replace the entry ``key``; a nested key creates missing Composites.

        Raises:
            ArgumentError: the spec's shape does not start with the shape of this Composite, or ``key`` is nested in the
                spec of a tensor.
            ArgumentTypeError: ``spec`` is neither a spec nor a mapping.
        """
        name, *rest = _path(key)
        if rest:
            child = self._specs.setdefault(name, Composite(shape=self.shape, device=self.device))
            if not isinstance(child, Composite):
                raise ArgumentError(
                    f"The entry {key!r} can't be nested in {name!r}, which is a tensor, {child!r}: rename one of them."
                )
            child.set(tuple(rest), spec)
            return
        if isinstance(spec, Mapping):
            spec = Composite(spec, shape=self.shape, device=self.device)
        if not isinstance(spec, TensorSpec):  # type: ignore[reportUnnecessaryIsInstance] # users
            raise ArgumentTypeError(f"The entry {key!r} of a Composite must be a spec, got {type(spec).__name__}.")
        if spec.shape[: len(self.shape)] != self.shape:
            raise ArgumentError(
                f"The entry {key!r} of a Composite of shape {list(self.shape)} must start with that shape, "
                f"got {list(spec.shape)}: expand it first."
            )
        self._specs[name] = spec if self.device is None else spec.to(self.device)

    def get(self, key: NestedKey, default: Any = None) -> Any:
        """Return the spec under ``key``, or ``default``."""
        spec: Any = self
        for name in _path(key):
            spec = spec._specs.get(name) if isinstance(spec, Composite) else None
            if spec is None:
                return default
        return spec

    def keys(self, include_nested: bool = False, leaves_only: bool = False) -> Iterator[NestedKey]:
        """Iterate over keys, like ``TensorDict.keys``."""
        for key, _ in self.items(include_nested, leaves_only):
            yield key

    def items(self, include_nested: bool = False, leaves_only: bool = False) -> Iterator[tuple[NestedKey, TensorSpec]]:
        """Iterate over pairs (key, spec), like ``TensorDict.items``."""
        for name, spec in self._specs.items():
            if not (leaves_only and isinstance(spec, Composite)):
                yield name, spec
            if include_nested and isinstance(spec, Composite):
                for key, leaf in spec.items(include_nested, leaves_only):
                    yield (name, *_path(key)), leaf

    def values(self, include_nested: bool = False, leaves_only: bool = False) -> Iterator[TensorSpec]:
        """Iterate over specs, like ``TensorDict.values``."""
        for _, spec in self.items(include_nested, leaves_only):
            yield spec

    def rand(self) -> TensorDict:
        """Return a TensorDict of random samples."""
        from tensordict import TensorDict  # noqa: PLC0415 - core is importable with torch alone

        return TensorDict({name: spec.rand() for name, spec in self._specs.items()}, self.shape, device=self.device)

    def zero(self) -> TensorDict:
        """Return a TensorDict of zeros."""
        from tensordict import TensorDict  # noqa: PLC0415 - core is importable with torch alone

        return TensorDict({name: spec.zero() for name, spec in self._specs.items()}, self.shape, device=self.device)

    def is_in(self, value: Any) -> bool:
        """Return whether the TensorDict ``value`` has every entry, each in its domain; other entries are ignored."""
        from tensordict import TensorDictBase  # noqa: PLC0415 - core is importable with torch alone

        if not isinstance(value, TensorDictBase):
            return False
        return all(name in value and spec.is_in(value.get(name)) for name, spec in self._specs.items())

    def expand(self, *shape: int | Sequence[int]) -> Composite:
        """Return this spec with the batch dimensions ``shape``, which must end with the current ones."""
        out = super().expand(*shape)
        kept = len(self.shape)
        out._specs = {name: spec.expand(*out.shape, *spec.shape[kept:]) for name, spec in self._specs.items()}
        return out

    def flatten(self, dims: int) -> Composite:
        """Return this spec with its first ``dims`` batch dimensions flattened into one."""
        out = super().flatten(dims)
        out._specs = {name: spec.flatten(dims) for name, spec in self._specs.items()}
        return out

    def to(self, device: Device) -> Composite:
        """Return this spec for TensorDicts on ``device``."""
        out = super().to(device)
        out._specs = {name: spec.to(device) for name, spec in self._specs.items()}
        return out

    def clone(self) -> Composite:
        """Return an independent copy."""
        out = copy.copy(self)
        out._specs = {name: spec.clone() for name, spec in self._specs.items()}
        return out

    def _domain(self) -> tuple[Any, ...]:
        return (self._specs,)

    def __getitem__(self, key: NestedKey) -> Any:
        spec = self.get(key)
        if spec is None:
            raise MissingKeyError(f"No entry {key!r} in this Composite, only {list(self.keys(True, True))}.")
        return spec

    def __setitem__(self, key: NestedKey, spec: TensorSpec | Mapping[Any, Any]) -> None:
        self.set(key, spec)

    def __contains__(self, key: NestedKey) -> bool:
        return self.get(key) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def __repr__(self) -> str:
        body = "".join(f"\n    {name}: {spec!r}".replace("\n", "\n    ") for name, spec in self._specs.items())
        return f"Composite(shape={list(self.shape)}, device={self.device}{body})"


def declare(target: Composite, key: NestedKey, spec: TensorSpec) -> None:
    """Declare the entry ``key`` in ``target``, and raise if it conflicts with an existing declaration.

    Raises:
        ArgumentError: ``target`` already has an entry ``key`` of another shape or dtype, entries nested under ``key``,
            or a tensor under a prefix of ``key``.
    """
    present = target.get(key)
    if isinstance(present, Composite):
        inside = [path_of(key) + path_of(inner) for inner in present.keys(True, True)]
        raise ArgumentError(
            f"The entry {key!r} can't be a tensor because {inside} are nested in it: rename one of them."
        )
    if present is not None and (present.shape, present.dtype) != (spec.shape, spec.dtype):
        raise ArgumentError(
            f"The entry {key!r} has shape {list(spec.shape)} and dtype {spec.dtype}, but the environment already "
            f"declares it with {list(present.shape)} and {present.dtype}: rename one of them."
        )
    target.set(key, spec)


def _path(key: NestedKey) -> tuple[str, ...]:
    return path_of(normalize_key(key))


def has_real_part(spec: TensorSpec) -> bool:
    """Return whether a spec, or a leaf of it, is of floating-point numbers.

    Example:
        >>> from recurl.core.specs.leaves import Categorical, Unbounded
        >>> has_real_part(Composite(move=Unbounded(2), grip=Categorical(2))), has_real_part(Categorical(2))
        (True, False)
    """
    leaves: list[Any] = list(spec.values(True, True)) if isinstance(spec, Composite) else [spec]
    return any(leaf.dtype is not None and leaf.dtype.is_floating_point for leaf in leaves)

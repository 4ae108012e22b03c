"""Spaces of Gymnasium as specs; observations, actions and action masks as tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, cast

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.core.keys import ACTION, OBSERVATION, NestedKey, dotted, is_within, normalize_key
from recurl.core.specs import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    OneHot,
    TensorSpec,
    Unbounded,
    choice_counts,
)

__all__ = [
    "ActionReader",
    "MaskReader",
    "ObservationReader",
    "box_spec",
    "brief",
    "candidate_paths",
    "find_in_info",
    "find_mask",
    "find_path",
    "missing_mask_error",
    "numpy_dtype",
    "value_at",
    "without",
]


def brief(value: object) -> str:
    """Return the ``repr`` of a value, on one line and at most 80 characters long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."


_MAX_CHARS = 80


def box_spec(space: spaces.Box) -> TensorSpec:
    """Return the spec of the tensors of a ``Box``, unbounded if no bound is finite."""
    kind = numpy_dtype(space)
    dtype = torch.from_numpy(np.empty(0, kind)).dtype
    if not np.isfinite(space.low).any() and not np.isfinite(space.high).any():
        return Unbounded(*space.shape, dtype=dtype) if space.shape else Unbounded((), dtype=dtype)
    low, high = (torch.from_numpy(_clipped(bound, kind)) for bound in (space.low, space.high))
    return Bounded(low, high, space.shape, dtype=dtype)


def _clipped(bound: np.ndarray[Any, Any], kind: np.dtype[Any]) -> np.ndarray[Any, Any]:
    if kind.kind == "i" and bound.dtype == np.uint64:
        bound = np.minimum(bound, np.iinfo(kind).max)
    return np.array(bound, dtype=kind)


def numpy_dtype(space: gym.Space[Any]) -> np.dtype[Any]:
    """Return the NumPy dtype of a space's values as tensors, one that torch supports in computations."""
    dtype = cast("np.dtype[Any]", space.dtype)
    if dtype.kind == "f" and dtype.itemsize > _MAX_FLOAT_BYTES:
        return np.dtype(np.float32)
    return np.dtype(f"i{min(2 * dtype.itemsize, 8)}") if dtype.kind == "u" and dtype.itemsize > 1 else dtype


_MAX_FLOAT_BYTES = 4

_SMALL_BATCH = 32

_INT64 = np.dtype(np.int64)


class ActionReader:
    """Converter from action tensors or arrays to Gymnasium actions, which raises for invalid ones.

    A ``Discrete`` action is read as an integer of shape ``[*B]`` or as a one-hot vector ``[*B, n]``, depending on its
    shape and not on the spec. A ``Dict`` of actions is a TensorDict with an entry for each name; a ``Tuple`` has the
    entries ``"0"``, ``"1"``, and so on. Integers thus stay integers next to real numbers, and each part can be read,
    replayed, and exported by name, as with TorchRL's composite specs. The log-probability is the joint one.

    Args:
        space: action space of one environment.
        batch_size: ``[]`` or ``[n]``.
        categorical: use the spec :class:`Categorical` for a ``Discrete`` space instead of :class:`OneHot`.
        key: key of the action, for error messages.

    Attributes:
        space: the space.
        spec: action spec of one environment.

    Raises:
        UnsupportedError: the space has no tensor equivalent (``Text``, ``Graph``, ``Sequence``), or is empty.
    """

    def __init__(
        self, space: gym.Space[Any], batch_size: Sequence[int], categorical: bool, key: NestedKey = ACTION
    ) -> None:
        self.space = space
        self._batch = tuple(batch_size)
        self._categorical = categorical
        self._key = key
        self.spec: TensorSpec
        self.read = self._box
        if isinstance(space, spaces.Dict | spaces.Tuple):
            self._set_parts(space, categorical)
            return
        if isinstance(space, spaces.Discrete):
            self._n, self._start = int(space.n), int(space.start)
            self.spec = Categorical(self._n) if categorical else OneHot(self._n)
            self.read = self._discrete
        elif isinstance(space, spaces.MultiDiscrete):
            self._limits = space.nvec
            self._starts = space.start
            self.spec = MultiCategorical(space.nvec.tolist())
            self.read = self._multi
        elif isinstance(space, spaces.MultiBinary):
            self._limits, self._starts = np.full(space.shape, 2), np.zeros(space.shape, np.int8)
            self.spec = Binary(space.shape, dtype=torch.int8)
            self.read = self._multi
        elif isinstance(space, spaces.Box):
            self.spec = box_spec(space)
        else:
            raise UnsupportedError(
                f"The action space must be Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of "
                f"these, got {space} for {key!r}: wrap the environment to provide one of these."
            )
        self._shape = (*self._batch, *self.spec.shape)
        self._dtype = space.dtype

    def rebatched(self, batch_size: Sequence[int]) -> ActionReader:
        """Return an equal reader for another batch size."""
        return ActionReader(self.space, batch_size, self._categorical, self._key)

    def to_json(self) -> dict[str, Any]:
        """Return plain values from which :meth:`from_json` builds an equal reader."""
        from recurl.envs.space_json import space_to_json  # noqa: PLC0415 - for exports only

        return {"space": space_to_json(self.space), "categorical": self._categorical}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], batch_size: Sequence[int]) -> ActionReader:
        """Build a reader from the result of :meth:`to_json`."""
        from recurl.envs.space_json import space_from_json  # noqa: PLC0415 - for exports only

        return cls(space_from_json(values["space"]), batch_size, values["categorical"])

    def _set_parts(self, space: spaces.Dict | spaces.Tuple, categorical: bool) -> None:
        named = isinstance(space, spaces.Dict)
        children = space.spaces if isinstance(space, spaces.Dict) else dict(enumerate(space.spaces))
        if not children:
            raise UnsupportedError(f"The action space of {self._key!r} must not be empty, got {space}.")
        prefix = (self._key,) if isinstance(self._key, str) else self._key
        readers = {
            str(name): ActionReader(child, self._batch, categorical, (*prefix, str(name)))
            for name, child in children.items()
        }
        self.spec = Composite({name: reader.spec for name, reader in readers.items()})

        def read(action: Any) -> Any:
            if isinstance(action, torch.Tensor) or any(name not in action for name in readers):
                got = "a tensor" if isinstance(action, torch.Tensor) else str(sorted(map(str, action.keys())))
                raise ArgumentError(f"The action {self._key!r} must have the entries {list(readers)}, got {got}.")
            parts = {name: reader.read(action[name]) for name, reader in readers.items()}
            return parts if named else tuple(parts.values())

        self.read = read

    def _discrete(self, action: Any) -> Any:
        values = action if type(action) is np.ndarray else self._numpy(action)
        if values.shape == self._batch and values.dtype.kind in "iu":
            index = values
            if values.size < _SMALL_BATCH:
                listed = sorted(values.tolist()) if self._batch else [values.item()]  # faster than NumPy
                valid = listed[0] >= 0 and listed[-1] < self._n
            else:
                valid = bool(values.min() >= 0 and values.max() < self._n)
        elif values.shape == (*self._batch, self._n):
            index = values.argmax(-1)
            valid = bool((values.sum(-1) == 1).all() and ((values == 0) | (values == 1)).all())
        else:
            valid, index = False, values
        if not valid:
            action = torch.as_tensor(action)
            raise ArgumentError(
                f"A discrete action must be an integer in [0, {self._n}) of shape {list(self._batch)}, or one-hot of "
                f"shape {[*self._batch, self._n]}, got {action.dtype} of shape {list(action.shape)}: {action}."
            )
        if not self._batch:
            return int(index) + self._start
        chosen = index.copy() if index.dtype is _INT64 else index.astype(np.int64)
        if self._start:
            chosen += self._start
        return chosen

    def _multi(self, action: Any) -> Any:
        values = self._numpy(action)
        fits = values.shape == self._shape and values.dtype.kind in "iub"
        if not fits or bool((values < 0).any() or (values >= self._limits).any()):
            action = torch.as_tensor(action)
            raise ArgumentError(
                f"The action must hold integers in [0, {self._limits.tolist()}) and have shape {list(self._shape)}, "
                f"got {action.dtype} of shape {list(action.shape)}: {action}."
            )
        return (values + self._starts).astype(self._dtype)

    def _box(self, action: Any) -> Any:
        values = self._numpy(action)
        if values.shape != self._shape or (
            values.dtype.kind != "f" and self.spec.dtype != torch.as_tensor(action).dtype
        ):
            action = torch.as_tensor(action)
            raise ArgumentError(
                f"The action must be {self.spec.dtype} of shape {list(self._shape)}, "
                f"got {action.dtype} of shape {list(action.shape)}."
            )
        return values.astype(self._dtype)

    def _numpy(self, action: Any) -> np.ndarray[Any, Any]:
        if type(action) is np.ndarray:
            return action
        if isinstance(action, torch.Tensor):
            return action.numpy(force=True)
        got = sorted(map(str, cast("Mapping[Any, Any]", action).keys())) if hasattr(action, "keys") else repr(action)
        raise ArgumentError(f"The action {self._key!r} must be a tensor that fits {self.spec}, got entries {got}.")


_MAX_ONE_HOT = 512  # largest Discrete space encoded as one-hot; larger ones are read as an index

_SUPPORTED = "Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of these"

_Path = tuple[str | int, ...]


class _Leaf(NamedTuple):
    key: NestedKey
    path: _Path
    shape: tuple[int, ...]  # shape of the resulting tensor, including batch dimensions
    read: Callable[[Any], torch.Tensor]


class ObservationReader:
    """Converter from Gymnasium observations to tensors, which share no memory with the environment.

    ``Box`` keeps its dtype, except that float64 becomes float32 and unsigned integers of more than 8 bits become signed
    integers of twice the size (at most int64). ``Discrete`` becomes a float32 one-hot vector, or an int64 index
    starting at 0 above 512 values. ``MultiDiscrete`` becomes int64 ``[k]``, each starting at 0; ``MultiBinary`` becomes
    int8. The entries of a ``Dict`` space keep their (nested) names, and those of a ``Tuple`` are named ``"0"``,
    ``"1"``, and so on; any other space is named ``"observation"``.

    Args:
        space: observation space of one environment.
        batch_size: ``[]`` or ``[n]``.
        owner: the environment, for error messages.
        drop: entries to drop: keys, with the parts of nested keys joined by dots. A name also drops all entries nested
            in it.

    Attributes:
        space: the space.
        spec: specs of the entries of one environment.

    Raises:
        UnsupportedError: an entry that is not dropped is a ``Text``, ``Graph``, ``Sequence``, or another space without
            a tensor equivalent.
        ArgumentError: an entry to drop doesn't exist, or no entry is left.
    """

    def __init__(
        self, space: gym.Space[Any], batch_size: Sequence[int], owner: object, drop: Sequence[NestedKey] = ()
    ) -> None:
        self.space = space
        self._owner, self._batch_size = owner, batch_size
        self._drop = list(map(dotted, drop))
        self._leaves: list[_Leaf] = []
        self._direct_copy: tuple[object, object] = None, None  # dtype and shape of arrays to copy directly
        self.spec = Composite()
        for path, leaf in kept_leaves(space, drop):
            key = normalize_key(tuple(map(str, path))) if path else OBSERVATION
            spec = _spec(leaf, key)
            self.spec.set(key, spec)
            shape = (*batch_size, *spec.shape)
            self._leaves.append(_Leaf(key, path, shape, _reader(leaf, len(batch_size))))
            if not path and isinstance(leaf, spaces.Box | spaces.MultiBinary):
                self._direct_copy = numpy_dtype(leaf), shape

    def rebatched(self, batch_size: Sequence[int]) -> ObservationReader:
        """Return an equal reader for another batch size."""
        return ObservationReader(self.space, batch_size, self._owner, self._drop)

    def without(self, names: Sequence[NestedKey]) -> ObservationReader:
        """Return a reader of some of the entries, also from observations that lack the others.

        Args:
            names: entries to leave out, as ``drop``; those that don't exist are ignored. Parts of a ``Tuple`` are
                dropped, but observations still need to have them.
        """
        space, drop = self.space, list(self._drop)
        for path, _ in _leaves(self.space):
            name = ".".join(map(str, path))
            if is_within(name, names) and not is_within(name, drop):
                if all(isinstance(part, str) for part in path):
                    space = without(space, cast("tuple[str, ...]", path))
                else:
                    drop.append(name)
        return ObservationReader(space, self._batch_size, self._owner, drop)

    def to_json(self) -> dict[str, Any]:
        """Return plain values from which :meth:`from_json` builds an equal reader."""
        from recurl.envs.space_json import space_to_json  # noqa: PLC0415 - for exports only

        return {"space": space_to_json(self.space), "drop": self._drop}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], batch_size: Sequence[int], owner: object) -> ObservationReader:
        """Build a reader from the result of :meth:`to_json`."""
        from recurl.envs.space_json import space_from_json  # noqa: PLC0415 - for exports only

        return cls(space_from_json(values["space"]), batch_size, owner, values["drop"])

    def read(self, observation: Any) -> dict[NestedKey, torch.Tensor]:
        """Return the entries of ``observation``, which comes from one environment or a batch along the first dimension.

        Raises:
            ArgumentError: ``observation`` is not in the space.
        """
        return {leaf.key: self._read(leaf, observation) for leaf in self._leaves}

    def read_into(self, memory: Sequence[np.ndarray[Any, Any]], step: int, observation: Any) -> None:
        """Write the entries of ``observation`` at ``step`` of arrays ``[T, *B, ...]``, in the order of :attr:`spec`.

        Raises:
            ArgumentError: ``observation`` is not in the space.
        """
        dtype, shape = self._direct_copy
        if type(observation) is np.ndarray and observation.dtype is dtype and observation.shape == shape:
            memory[0][step] = observation
            return
        for leaf, array in zip(self._leaves, memory, strict=True):
            array[step] = self._read(leaf, observation).numpy()

    def _read(self, leaf: _Leaf, observation: Any) -> torch.Tensor:
        key, path, shape, read = leaf
        value = observation
        try:
            for name in path:
                value = value[name]
            found = read(value)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise self._mismatch(key, shape, f"{brief(value)} ({type(error).__name__}: {error})") from error
        if found.shape != shape:
            raise self._mismatch(key, shape, f"{found.dtype} of shape {list(found.shape)}")
        return found

    def _mismatch(self, key: NestedKey, shape: tuple[int, ...], got: str) -> ArgumentError:
        spec = cast(TensorSpec, self.spec[key])
        return ArgumentError(
            f"An observation must fit the observation space: {key!r} must be {spec.dtype} of shape {list(shape)}, got "
            f"{got}. Fix the observation_space of {self._owner}, or the observations of its reset() and step()."
        )


def _leaves(space: gym.Space[Any], path: _Path = ()) -> Iterator[tuple[_Path, gym.Space[Any]]]:
    if isinstance(space, spaces.Dict):
        for name, child in space.spaces.items():
            yield from _leaves(child, (*path, name))
    elif isinstance(space, spaces.Tuple):
        for index, child in enumerate(space.spaces):
            yield from _leaves(child, (*path, index))
    else:
        yield path, space


def kept_leaves(space: gym.Space[Any], drop: Sequence[NestedKey]) -> list[tuple[_Path, gym.Space[Any]]]:
    """Return the leaves of ``space`` except those named by ``drop``."""
    leaves = list(_leaves(space))
    named = [".".join(map(str, path)) for path, _ in leaves]
    for name in map(dotted, drop):
        if not any(is_within(key, [name]) for key in named):
            near = get_close_matches(name, named, 1)
            has = f"which has {', '.join(named)}" if any(named) else f"which is {brief(space)}"
            raise ArgumentError(
                f"There is no observation {name!r} to drop (--drop-observations) in the observation space, {has}"
                f"{f': did you mean {near[0]}?' if near else '.'}"
            )
    kept = [leaf for name, leaf in zip(named, leaves, strict=True) if not is_within(name, drop)]
    if not kept:
        dropped = ", ".join(map(dotted, drop)) or "nothing"
        raise ArgumentError(f"At least one observation must be kept, but {dropped} of {space} was dropped.")
    return kept


def _spec(space: gym.Space[Any], key: NestedKey) -> TensorSpec:
    if isinstance(space, spaces.Discrete):
        n = int(space.n)
        return OneHot(n, dtype=torch.float32) if n <= _MAX_ONE_HOT else Categorical(n)
    if isinstance(space, spaces.MultiDiscrete):
        return MultiCategorical(space.nvec.ravel().tolist())
    if isinstance(space, spaces.MultiBinary):
        return Binary(space.shape, dtype=torch.int8)
    if isinstance(space, spaces.Box):
        return box_spec(space)
    name = dotted(key)
    advice = (
        "" if key == OBSERVATION else f"drop it with drop_observations=[{name!r}] (--drop-observations {name}), or "
    )
    raise UnsupportedError(
        f"The observation {name!r} is {brief(space)}, which has no tensor equivalent: {advice}wrap the environment "
        f"to return {_SUPPORTED}."
    )


def _reader(space: gym.Space[Any], batch_dims: int) -> Callable[[Any], torch.Tensor]:
    if isinstance(space, spaces.Discrete):
        return _discrete_reader(int(space.n), int(space.start))
    if isinstance(space, spaces.MultiDiscrete):
        return _multi_discrete_reader(space, batch_dims)
    dtype = numpy_dtype(space)
    allowed = _CONVERTIBLE_KINDS[dtype.kind]

    def read(value: Any) -> torch.Tensor:
        found = np.asarray(value)
        if found.dtype is dtype:
            return torch.from_numpy(np.array(found, order="C"))
        if found.dtype.kind not in allowed:
            raise TypeError(f"{found.dtype} can't become {dtype}")
        out = np.array(found, dtype=dtype, order="C")
        if dtype.kind != "f" and (out != found).any():
            raise ValueError(f"out of the range of {dtype}")
        return torch.from_numpy(out)

    return read


_CONVERTIBLE_KINDS = {"f": "fiub", "i": "iub", "u": "iub", "b": "b"}

"""NumPy dtype kinds (the values) that may be converted to another kind (the key)."""


def _integers(value: Any) -> np.ndarray[Any, Any]:
    found = np.asarray(value)
    if found.dtype.kind not in "iu":
        raise TypeError("not an integer")
    return found


def _discrete_reader(n: int, start: int) -> Callable[[Any], torch.Tensor]:
    if n > _MAX_ONE_HOT:
        return lambda value: torch.from_numpy(_zero_based(_integers(value), np.int64(start), np.int64(n)))
    rows = np.eye(n, dtype=np.float32)

    def read_index(value: Any) -> torch.Tensor:
        # Cast to unsigned, indices below the start become too large, like those above the end.
        return torch.from_numpy(np.array(rows[(_integers(value) - start).astype(np.uintp)]))

    return read_index


def _multi_discrete_reader(space: spaces.MultiDiscrete, batch_dims: int) -> Callable[[Any], torch.Tensor]:
    shape, start, limits = space.shape, space.start.astype(np.int64), space.nvec.astype(np.int64)

    def read_indices(value: Any) -> torch.Tensor:
        found = _integers(value)
        if found.shape[batch_dims:] != shape:
            return torch.from_numpy(found.astype(np.int64))  # rejected later because of its shape
        return torch.from_numpy(_zero_based(found, start, limits).reshape(*found.shape[:batch_dims], -1))

    return read_indices


def _zero_based(found: np.ndarray[Any, Any], start: Any, limits: Any) -> np.ndarray[Any, Any]:
    """Return integers of a space shifted to start at 0; raise if any is outside the space."""
    out = np.asarray(found.astype(np.int64) - start)
    if (out < 0).any() or (out >= limits).any():
        raise ValueError(f"outside [{start}, {start + limits})")
    return out


class MaskReader:
    """Converter from an environment's action masks to bool tensors ``[*B, n]``.

    A mask holds zeros and ones (or bools), one per choice. It is either the concatenation over all integers of the
    action, or a tuple with a mask for each integer. For a ``Dict`` or ``Tuple`` of actions, it may also be a dict or
    tuple with a mask for each discrete part.

    Args:
        path: path of the mask in the observation or in ``info``.
        source: ``"observation"`` or ``"info"``, for error messages.
        action: action spec of one environment.
        batch_size: ``[]`` or ``[n]``.
        owner: the environment, for error messages.
    """

    def __init__(
        self, path: tuple[str, ...], source: str, action: TensorSpec, batch_size: Sequence[int], owner: object
    ) -> None:
        self.path = path
        self.source = source
        self._action = action
        self._counts = choice_counts(action)
        self._shape = (*batch_size, sum(self._counts))
        self._owner = owner
        self.spec = Binary((sum(self._counts),), dtype=torch.bool)

    def read(self, source: Any, needed: np.ndarray[Any, Any] | None = None) -> torch.Tensor:
        """Return the masks in an observation or an ``info`` as a new tensor.

        Args:
            source: the observation or ``info``, of one environment or of a vector environment.
            needed: bool ``[*B]``, the rows that must have a mask; all rows when None. In other rows, a missing mask
                allows no choice.

        Raises:
            ArgumentError: a mask is missing or has an invalid format.
        """
        rows = np.ones(self._shape[:-1], np.bool_) if needed is None else needed
        value, present = value_at(source, self.path), self._rows_with_mask(source)
        lacking = np.flatnonzero(rows & ~present) if value is not None else np.flatnonzero(rows)
        if lacking.size:
            which = f" of environment {lacking.tolist()}" if rows.ndim else ""
            raise ArgumentError(
                f"{'.'.join(self.path)!r} must be in every {self.source}, except after the last step of an episode "
                f"that terminated, but it is missing in the {self.source}{which}, which has {_names(source)}. "
                f"Fix {self._owner}, or turn masks off with action_mask=None (--action-mask none)."
            )
        if value is None:
            return torch.zeros(self._shape, dtype=torch.bool)
        return self.convert(value)

    def convert(self, mask: Any) -> torch.Tensor:
        """Return masks as a new tensor.

        Raises:
            ArgumentError: the masks have an invalid format.
        """
        return torch.from_numpy(self._flat(mask))

    def _rows_with_mask(self, source: Any) -> np.ndarray[Any, Any]:
        """Return which rows have a mask: in Gymnasium's ``info``, an array named with a leading ``_`` marks them."""
        flags = None
        if self.source == "info":
            flags = value_at(source, (*self.path[:-1], f"_{self.path[-1]}"))
        if flags is None:
            return np.ones(self._shape[:-1], np.bool_)
        return np.asarray(flags, np.bool_).reshape(self._shape[:-1])

    def _flat(self, value: Any) -> np.ndarray[Any, Any]:
        try:
            return self._checked(self._joined(value, self._action, len(self._shape) - 1)).reshape(self._shape)
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"The mask {'.'.join(self.path)!r} in the {self.source} must hold {self._shape[-1]} zeros and ones for "
                f"the action {self._action}, in an array or in a tuple of {len(self._counts)}; got {brief(value)} "
                f"({type(error).__name__}: {error}). Fix {self._owner}, name another entry with action_mask= "
                "(--action-mask), or turn masks off with None (none)."
            ) from error

    def _joined(self, value: Any, action: TensorSpec, batch_dims: int) -> np.ndarray[Any, Any]:
        """Return a mask, given as one array or in parts, as one array ``[*B, n]``."""
        if batch_dims and isinstance(value, np.ndarray) and value.dtype == object:  # one object per environment
            none = np.zeros(sum(choice_counts(action)), np.bool_)
            return np.stack([none if row is None else self._joined(row, action, 0) for row in value])
        if isinstance(action, Composite) and isinstance(value, Mapping | tuple):
            named = cast("Mapping[str, Any]", value if isinstance(value, Mapping) else dict(_numbered(value)))
            children = [(str(name), child) for name, child in action.items() if choice_counts(child)]
            parts = [self._joined(named[name], child, batch_dims) for name, child in children]
        elif isinstance(value, tuple | list) and not isinstance(action, Composite):
            parts = [np.asarray(part) for part in cast("Sequence[Any]", value)]
            if batch_dims == 0 and all(part.ndim == 0 for part in parts):
                return np.asarray(value)
        else:
            array = np.asarray(value)
            return array.reshape((*array.shape[:batch_dims], -1))
        return np.concatenate([part.reshape((*part.shape[:batch_dims], -1)) for part in parts], -1)

    def _checked(self, found: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if found.dtype.kind not in "biuf" or not np.isin(found, (0, 1)).all():
            raise ValueError(f"values other than 0 and 1 in {found.dtype}")
        return np.array(found, dtype=np.bool_)


def _names(source: Any) -> str:
    return str(sorted(map(str, source))) if isinstance(source, Mapping) else brief(source)


def _numbered(values: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(str(index), value) for index, value in enumerate(values)]


def find_path(space: gym.Space[Any], key: NestedKey) -> tuple[str, ...] | None:
    """Return the path of an entry of a ``Dict`` space, or None; the parts of a nested key may be joined by dots.

    Example:
        >>> find_path(spaces.Dict({"game": spaces.Dict({"legal": spaces.MultiBinary(2)})}), "game.legal")
        ('game', 'legal')
    """
    return next((path for path in candidate_paths(key) if _space_at(space, path) is not None), None)


def candidate_paths(key: NestedKey) -> list[tuple[str, ...]]:
    """Return the paths that ``key`` may refer to."""
    key = normalize_key(key)
    return [(key,), tuple(key.split("."))] if isinstance(key, str) else [key]


def find_mask(space: gym.Space[Any], key: NestedKey, action: TensorSpec, owner: object) -> tuple[str, ...] | None:
    """Return the path of a mask of ``action`` in observations of ``space``, or None if it isn't there.

    Raises:
        ArgumentError: it is there, but no part of the action is discrete.
    """
    path = find_path(space, key)
    if path is not None and not choice_counts(action):
        raise ArgumentError(
            f"Masks are for Discrete and MultiDiscrete actions, but the observation of {owner} has {key!r} and its "
            f"action is {action}: turn masks off with action_mask=None (--action-mask none) to use the entry as an "
            "ordinary observation."
        )
    return path


def find_in_info(info: Any, key: NestedKey) -> tuple[str, ...] | None:
    """Return the path of a mask in an ``info``, or None; the parts of a nested key may be joined by dots."""
    return next((path for path in candidate_paths(key) if value_at(info, path) is not None), None)


def missing_mask_error(
    key: NestedKey, space: gym.Space[Any], info: Any, action: TensorSpec, owner: object
) -> ArgumentError:
    """Return the error for a mask that is neither in the observation nor in ``info``."""
    names = [*(space.spaces if isinstance(space, spaces.Dict) else ()), *map(str, info)]
    close = get_close_matches(str(key), [name for name in names if not name.startswith("_")], 1)
    return ArgumentError(
        f"The mask {key!r} must be in the observation or in the info of {owner}, whose actions must be discrete. The "
        f"action is {action}, the observation space is {space}, and info has {sorted(map(str, info))}"
        f"{f': did you mean {close[0]!r}?' if close else ': name another entry, or none.'}"
    )


def _space_at(space: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        space = space.spaces.get(name) if isinstance(space, spaces.Dict) else None
    return space


def without(space: gym.Space[Any], path: tuple[str, ...]) -> gym.Space[Any]:
    """Return a ``Dict`` space without one entry."""
    children = dict(cast(spaces.Dict, space).spaces)
    child = children.pop(path[0])
    if len(path) > 1:
        rest = cast(spaces.Dict, without(child, path[1:]))
        children = {
            name: rest if name == path[0] else kept
            for name, kept in cast(spaces.Dict, space).spaces.items()
            if name != path[0] or rest.spaces
        }
    return spaces.Dict(children)


def value_at(source: Any, path: tuple[str, ...]) -> Any:
    """Return the value under ``path`` in nested dicts, or None."""
    for name in path:
        source = cast("Mapping[str, Any]", source).get(name) if isinstance(source, Mapping) else None
    return source

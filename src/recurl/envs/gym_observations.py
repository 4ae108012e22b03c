"""Conversion of Gymnasium observations to tensors, for every space that has a tensor equivalent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, cast

import gymnasium as gym
import numpy as np
import torch

from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.core.keys import OBSERVATION, NestedKey, dotted, is_within, normalize_key
from recurl.core.specs import Binary, Categorical, Composite, MultiCategorical, OneHot, TensorSpec
from recurl.envs.gym_spaces import box_spec, brief, numpy_dtype
from recurl.envs.space_json import space_from_json, space_to_json

__all__ = ["ObservationReader"]

spaces = gym.spaces
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
        self._owner = owner
        self._drop = list(map(dotted, drop))
        self._leaves: list[_Leaf] = []
        self._direct_copy: tuple[object, object] = None, None  # dtype and shape of arrays to copy directly
        self.spec = Composite()
        for path, leaf in _kept_leaves(space, drop):
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

    def to_json(self) -> dict[str, Any]:
        """Return plain values from which :meth:`from_json` builds an equal reader."""
        return {"space": space_to_json(self.space), "drop": self._drop}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], batch_size: Sequence[int], owner: object) -> ObservationReader:
        """Build a reader from the result of :meth:`to_json`."""
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


def _kept_leaves(space: gym.Space[Any], drop: Sequence[NestedKey]) -> list[tuple[_Path, gym.Space[Any]]]:
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

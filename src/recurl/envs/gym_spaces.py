"""Conversion of Gymnasium spaces to specs, of observations to tensors, and of action tensors to Gymnasium actions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import gymnasium as gym
import numpy as np
import torch

from recurl.envs.space_json import space_from_json, space_to_json
from recurl.errors import ArgumentError, UnsupportedError
from recurl.keys import OBSERVATION, NestedKey, normalize_key
from recurl.specs import Binary, Bounded, Categorical, Composite, MultiCategorical, OneHot, TensorSpec, Unbounded

__all__ = ["ActionReader", "ObservationReader", "brief"]

spaces = gym.spaces


class ObservationReader:
    """Converts Gymnasium observations to tensors that share no memory with the environment.

    ``Box`` keeps its dtype, except that float64 becomes float32; ``Discrete`` becomes a float32 one-hot vector;
    ``MultiDiscrete`` becomes int64; ``MultiBinary`` becomes int8. The entries of a ``Dict`` space keep their (nested)
    names; any other space is named ``"observation"``.

    Args:
        space: observation space of one environment.
        batch_size: ``[]`` or ``[n]``.
        owner: the environment, for error messages.

    Attributes:
        space: the space.
        spec: specs of the entries of one environment.

    Raises:
        UnsupportedError: the space is a ``Tuple``, ``Text``, ``Graph`` or another space without a tensor equivalent.
    """

    def __init__(self, space: gym.Space[Any], batch_size: Sequence[int], owner: object) -> None:
        self.space = space
        self._owner = owner
        self._leaves: list[tuple[NestedKey, tuple[str, ...], tuple[int, ...], Callable[[Any], torch.Tensor]]] = []
        self.spec = Composite()
        for path, leaf in _leaves(space):
            key = normalize_key(path) if path else OBSERVATION
            spec = _observation_spec(leaf)
            self.spec.set(key, spec)
            self._leaves.append((key, path, (*batch_size, *spec.shape), _observation_read(leaf)))

    def rebatched(self, batch_size: Sequence[int]) -> ObservationReader:
        """Return the same reader for another batch size."""
        return ObservationReader(self.space, batch_size, self._owner)

    def to_json(self) -> dict[str, Any]:
        """Return what :meth:`from_json` builds an equal reader of, as plain values."""
        return {"space": space_to_json(self.space)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], batch_size: Sequence[int], owner: object) -> ObservationReader:
        """Build a reader of what :meth:`to_json` returned."""
        return cls(space_from_json(values["space"]), batch_size, owner)

    def read(self, observation: Any) -> dict[NestedKey, torch.Tensor]:
        """Return the entries of ``observation``, from one environment or batched along the first dimension.

        Raises:
            ArgumentError: ``observation`` is not in the space.
        """
        entries: dict[NestedKey, torch.Tensor] = {}
        for key, path, shape, read in self._leaves:
            value = observation
            try:
                for name in path:
                    value = value[name]
                entries[key] = found = read(value)
            except (ArithmeticError, LookupError, TypeError, ValueError) as error:
                raise self._misfit(key, shape, f"{brief(value)} ({type(error).__name__}: {error})") from error
            if found.shape != shape:
                raise self._misfit(key, shape, f"{found.dtype} of shape {list(found.shape)}")
        return entries

    def _misfit(self, key: NestedKey, shape: tuple[int, ...], got: str) -> ArgumentError:
        spec = cast(TensorSpec, self.spec[key])
        return ArgumentError(
            f"An observation must fit the observation space: {key!r} must be {spec.dtype} of shape {list(shape)}, got "
            f"{got}. Correct the observation_space of {self._owner}, or what its reset() and step() return."
        )


class ActionReader:
    """Converts action tensors to Gymnasium actions, and refuses invalid ones.

    A ``Discrete`` action is read as an integer of shape ``[*B]`` or as a one-hot vector ``[*B, n]``; the shape decides,
    independently of the spec.

    Args:
        space: action space of one environment.
        batch_size: ``[]`` or ``[n]``.
        categorical: use the spec :class:`Categorical` for a ``Discrete`` space instead of :class:`OneHot`.

    Attributes:
        space: the space.
        spec: spec of the action of one environment.

    Raises:
        UnsupportedError: the space is a ``Dict``, a ``Tuple`` or another unsupported space.
    """

    def __init__(self, space: gym.Space[Any], batch_size: Sequence[int], categorical: bool) -> None:
        self.space = space
        self._batch = tuple(batch_size)
        self._categorical = categorical
        self.read = self._box
        if isinstance(space, spaces.Discrete):
            self._n, self._start = int(space.n), int(space.start)
            self.spec: TensorSpec = Categorical(self._n) if categorical else OneHot(self._n)
            self.read = self._discrete
        elif isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
            self._limits = space.nvec
            self._starts = space.start
            self.spec = MultiCategorical(space.nvec.tolist())
            self.read = self._multi
        elif isinstance(space, spaces.MultiBinary):
            self._limits, self._starts = np.full(space.shape, 2), np.zeros(space.shape, np.int8)
            self.spec = Binary(space.shape, dtype=torch.int8)
            self.read = self._multi
        elif isinstance(space, spaces.Box):
            self.spec = _box_spec(space)
        else:
            raise UnsupportedError(
                f"The action space must be Box, Discrete, MultiDiscrete (one axis) or MultiBinary, got {space}: "
                "wrap the environment to give it one of these."
            )
        self._shape = (*self._batch, *self.spec.shape)
        self._dtype = space.dtype

    def rebatched(self, batch_size: Sequence[int]) -> ActionReader:
        """Return the same reader for another batch size."""
        return ActionReader(self.space, batch_size, self._categorical)

    def to_json(self) -> dict[str, Any]:
        """Return what :meth:`from_json` builds an equal reader of, as plain values."""
        return {"space": space_to_json(self.space), "categorical": self._categorical}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], batch_size: Sequence[int]) -> ActionReader:
        """Build a reader of what :meth:`to_json` returned."""
        return cls(space_from_json(values["space"]), batch_size, values["categorical"])

    def _discrete(self, action: torch.Tensor) -> Any:
        values = _numpy(action)
        if values.shape == self._batch and values.dtype.kind in "iu":
            index = values
            listed = values.ravel().tolist()  # faster than numpy for the few rows of a batch
            valid = min(listed) >= 0 and max(listed) < self._n
        elif values.shape == (*self._batch, self._n):
            index = values.argmax(-1)
            valid = bool((values.sum(-1) == 1).all() and ((values == 0) | (values == 1)).all())
        else:
            valid, index = False, values
        if not valid:
            raise ArgumentError(
                f"A discrete action must be an integer in [0, {self._n}) of shape {list(self._batch)}, or one-hot of "
                f"shape {[*self._batch, self._n]}, got {action.dtype} of shape {list(action.shape)}: {action}."
            )
        return index.astype(np.int64) + self._start if self._batch else int(index) + self._start

    def _multi(self, action: torch.Tensor) -> Any:
        values = _numpy(action)
        fits = values.shape == self._shape and values.dtype.kind in "iub"
        if not fits or bool((values < 0).any() or (values >= self._limits).any()):
            raise ArgumentError(
                f"The action must hold integers in [0, {self._limits.tolist()}) and have shape {list(self._shape)}, "
                f"got {action.dtype} of shape {list(action.shape)}: {action}."
            )
        return (values + self._starts).astype(self._dtype)

    def _box(self, action: torch.Tensor) -> Any:
        values = _numpy(action)
        if values.shape != self._shape or (values.dtype.kind != "f" and self.spec.dtype != action.dtype):
            raise ArgumentError(
                f"The action must be {self.spec.dtype} of shape {list(self._shape)}, "
                f"got {action.dtype} of shape {list(action.shape)}."
            )
        return values.astype(self._dtype)


def _numpy(action: torch.Tensor) -> np.ndarray[Any, Any]:
    return action.numpy(force=True)


def _leaves(space: gym.Space[Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], gym.Space[Any]]]:
    if isinstance(space, spaces.Dict):
        for name, child in space.spaces.items():
            yield from _leaves(child, (*path, name))
    else:
        yield path, space


def _observation_spec(space: gym.Space[Any]) -> TensorSpec:
    if isinstance(space, spaces.Discrete):
        return OneHot(int(space.n), dtype=torch.float32)
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1 and not space.start.any():
        return MultiCategorical(space.nvec.tolist())
    if isinstance(space, spaces.MultiBinary):
        return Binary(space.shape, dtype=torch.int8)
    if isinstance(space, spaces.Box):
        return _box_spec(space)
    raise UnsupportedError(
        f"An observation space must be Box, Discrete, MultiDiscrete (one axis, from 0), MultiBinary, or a Dict of "
        f"these, got {space}: wrap the environment to give it one of these."
    )


def _observation_read(space: gym.Space[Any]) -> Callable[[Any], torch.Tensor]:
    if isinstance(space, spaces.Discrete):
        rows, start = np.eye(int(space.n), dtype=np.float32), int(space.start)

        def read_index(value: Any) -> torch.Tensor:
            index = np.asarray(value)
            if index.dtype.kind not in "iu":
                raise TypeError("not a whole number")
            # As unsigned numbers, indices below the start are too large, like those above the end.
            return torch.from_numpy(np.array(rows[(index - start).astype(np.uintp)]))

        return read_index
    dtype = np.dtype(np.int64) if isinstance(space, spaces.MultiDiscrete) else _numpy_dtype(space)
    allowed = _FROM[dtype.kind]

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


_FROM = {"f": "fiub", "i": "iub", "u": "iub", "b": "b"}
"""Kinds of numpy dtypes that may be converted to a kind (the key)."""


def brief(value: object) -> str:
    """Return the ``repr`` of a value, on one line and at most 80 characters long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


_SHOWN = 80


def _box_spec(space: spaces.Box) -> TensorSpec:
    dtype = torch.from_numpy(np.empty(0, _numpy_dtype(space))).dtype
    if not np.isfinite(space.low).any() and not np.isfinite(space.high).any():
        return Unbounded(*space.shape, dtype=dtype) if space.shape else Unbounded((), dtype=dtype)
    low, high = (torch.from_numpy(np.array(bound)) for bound in (space.low, space.high))
    return Bounded(low, high, space.shape, dtype=dtype)


def _numpy_dtype(space: gym.Space[Any]) -> np.dtype[Any]:
    dtype = cast("np.dtype[Any]", space.dtype)
    return np.dtype(np.float32) if dtype == np.float64 else dtype

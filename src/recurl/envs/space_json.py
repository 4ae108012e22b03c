"""Conversion of Gymnasium spaces to and from JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import gymnasium as gym
import numpy as np

from recurl.core.errors import ArgumentError, UnsupportedError

__all__ = ["space_from_json", "space_to_json"]

spaces = gym.spaces


def space_to_json(space: gym.Space[Any]) -> dict[str, Any]:
    """Return plain values from which :func:`space_from_json` builds an equal space.

    Raises:
        UnsupportedError: it isn't a Box, Discrete, MultiDiscrete, MultiBinary, Text, or a Dict or Tuple of these.

    Example:
        >>> space_to_json(spaces.Discrete(3))
        {'kind': 'Discrete', 'n': 3, 'start': 0}
    """
    kind = type(space).__name__
    if kind not in _WRITERS:
        raise UnsupportedError(f"A space must be one of {', '.join(_WRITERS)} to be written as JSON, got {space}.")
    return {"kind": kind, **_WRITERS[kind](space)}


def space_from_json(values: Mapping[str, Any]) -> gym.Space[Any]:
    """Return the space described by the result of :func:`space_to_json`.

    Raises:
        ArgumentError: ``values`` don't describe a space.

    Example:
        >>> space_from_json({"kind": "Discrete", "n": 3, "start": 0})
        Discrete(3)
    """
    try:
        return _READERS[values["kind"]](values)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"A space must be written as space_to_json does, got {values} ({type(error).__name__}: {error})."
        ) from error


def _bound(values: np.ndarray[Any, Any]) -> Any:
    """Return the bounds of a Box, as one number if all are equal; infinities are strings, because JSON has none."""
    values = np.asarray(values)
    first = values.flat[0] if values.size else values.dtype.type(0)
    found = first.item() if (values == first).all() else values.tolist()
    return _encode_infinities(found)


def _encode_infinities(value: Any) -> Any:
    if isinstance(value, list):
        return [_encode_infinities(part) for part in cast("list[Any]", value)]
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value


def _decode_infinities(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode_infinities(part) for part in cast("list[Any]", value)]
    return float(value) if isinstance(value, str) else value


def _box(space: Any) -> dict[str, Any]:
    shape, dtype = list(space.shape), str(space.dtype)
    return {"low": _bound(space.low), "high": _bound(space.high), "shape": shape, "dtype": dtype}


def _read_box(values: Mapping[str, Any]) -> gym.Space[Any]:
    dtype, shape = np.dtype(values["dtype"]), tuple(values["shape"])
    low, high = (
        np.broadcast_to(np.array(_decode_infinities(values[name]), dtype=dtype), shape).copy()
        for name in ("low", "high")
    )
    return spaces.Box(low, high, shape, cast(Any, dtype))


def _dtype(space: Any) -> dict[str, Any]:
    return {} if space.dtype == np.int64 else {"dtype": str(space.dtype)}


def _read_dtype(values: Mapping[str, Any]) -> dict[str, Any]:
    return {"dtype": np.dtype(values["dtype"]).type} if "dtype" in values else {}


_WRITERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "Box": _box,
    "Discrete": lambda space: {"n": int(space.n), "start": int(space.start), **_dtype(space)},
    "MultiDiscrete": lambda space: {"nvec": space.nvec.tolist(), "start": space.start.tolist(), **_dtype(space)},
    "MultiBinary": lambda space: {"n": space.n if isinstance(space.n, int) else list(space.n)},
    "Text": lambda space: {
        "max_length": space.max_length,
        "min_length": space.min_length,
        "charset": "".join(sorted(space.character_set)),
    },
    "Dict": lambda space: {"spaces": {name: space_to_json(part) for name, part in space.spaces.items()}},
    "Tuple": lambda space: {"spaces": [space_to_json(part) for part in space.spaces]},
}
_READERS: dict[str, Callable[[Mapping[str, Any]], gym.Space[Any]]] = {
    "Box": _read_box,
    "Discrete": lambda values: spaces.Discrete(values["n"], start=values["start"], **_read_dtype(values)),
    "MultiDiscrete": lambda values: spaces.MultiDiscrete(values["nvec"], start=values["start"], **_read_dtype(values)),
    "MultiBinary": lambda values: spaces.MultiBinary(values["n"]),
    "Text": lambda values: spaces.Text(
        values["max_length"], min_length=values["min_length"], charset=values["charset"]
    ),
    "Dict": lambda values: spaces.Dict({name: space_from_json(part) for name, part in values["spaces"].items()}),
    "Tuple": lambda values: spaces.Tuple([space_from_json(part) for part in values["spaces"]]),
}

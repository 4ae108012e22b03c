"""Action masks of Gymnasium environments, from the observation or from ``info``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, cast

import gymnasium as gym
import numpy as np
import torch

from recurl.core.errors import ArgumentError
from recurl.core.keys import NestedKey, normalize_key
from recurl.core.specs import Binary, Composite, TensorSpec, choice_counts
from recurl.envs.gym_spaces import brief

__all__ = ["MaskReader", "candidate_paths", "find_path", "missing_mask_error", "value_at", "without"]

spaces = gym.spaces


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

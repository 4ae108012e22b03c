"""Actions read on their device: shapes and dtypes are checked, values are not, as that would wait for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from recurl.core.errors import ArgumentError

__all__ = ["read_on_device"]


def read_on_device(space: gym.Space[Any], batch_size: Sequence[int], action: Any) -> Any:
    """Return actions for a simulator on the same device: integers as int64, without the start of the space.

    Args:
        space: action space of one environment.
        batch_size: ``[n]``.
        action: the actions ``[n, ...]``; for a ``Discrete`` space, integers ``[n]`` or one-hot vectors ``[n, k]``; for
            a ``Dict`` or ``Tuple``, a TensorDict with an entry for each part.

    Returns:
        A tensor, or a dict or tuple of tensors.

    Raises:
        ArgumentError: the actions have the wrong shape, dtype, or entries.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        named = space.spaces if isinstance(space, spaces.Dict) else dict(enumerate(space.spaces))
        if isinstance(action, Tensor) or any(str(name) not in action for name in named):
            raise ArgumentError(f"The actions must have the entries {list(map(str, named))}, got {type(action)}.")
        parts = {name: read_on_device(child, batch_size, action[str(name)]) for name, child in named.items()}
        return parts if isinstance(space, spaces.Dict) else tuple(parts.values())
    shape, rows = tuple(action.shape), tuple(batch_size)
    is_integer = not action.is_floating_point() and action.dtype != torch.bool
    if isinstance(space, spaces.Discrete):
        if shape == (*rows, int(space.n)):
            return action.to(torch.int64).argmax(-1)
        fits = shape == rows and is_integer
        wanted = f"integers of shape {list(rows)}, or one-hot of shape {[*rows, int(space.n)]}"
    else:
        rows = (*rows, *(space.shape or ()))
        real = np.issubdtype(space.dtype, np.floating)
        fits = shape == rows and (action.is_floating_point() if real else is_integer)
        wanted = f"{'floating-point numbers' if real else 'integers'} of shape {list(rows)}"
    if not fits:
        raise ArgumentError(f"The actions must be {wanted}, got {action.dtype} of shape {list(shape)}.")
    return action if action.is_floating_point() else action.to(torch.int64)

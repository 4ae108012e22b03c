"""Inputs of recurrent modules: flags, shapes and names of entries."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor

from recurl.core.errors import ArgumentError, MissingKeyError, UsageError
from recurl.core.keys import IS_INIT

__all__ = ["entry_names", "flags_in", "flat", "signature"]


def signature(value: Tensor | None) -> tuple[Any, ...] | None:
    """Return the properties of an entry that its checks depend on; None if it is absent."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device
    return None if value is None else (object(),)  # a sparse state is checked every time


def flat(value: Tensor, batch: torch.Size) -> Tensor:
    """Reshape ``[*B, ...]`` to ``[prod(B), ...]``."""
    return value if len(batch) == 1 else value.reshape(math.prod(batch), *value.shape[len(batch) :])


def flags_in(tensordict: TensorDictBase, batch: torch.Size) -> Tensor:
    """Return ``"is_init"`` as bool, ``[*B]`` or ``[*B, 1]``, or raise if it is missing or invalid."""
    is_init = tensordict.get(IS_INIT, None)
    if is_init is None:
        raise MissingKeyError(
            "The entry 'is_init' is missing: a recurrent module must know where episodes begin. Append "
            f"recurl.envs.InitTracker() to the environment. The TensorDict holds {entry_names(tensordict)}."
        )
    if is_init.dtype not in (torch.bool, torch.uint8):
        raise UsageError(f"is_init must be boolean, got {is_init.dtype}. Convert it: is_init.bool().")
    if is_init.shape != batch and is_init.shape != torch.Size([*batch, 1]):  # Dynamo can't compare by "in"
        raise ArgumentError(
            f"is_init must have the batch size {list(batch)}, with or without a trailing 1; got {list(is_init.shape)}."
        )
    return is_init if is_init.dtype == torch.bool else is_init.bool()


def entry_names(tensordict: TensorDictBase) -> str:
    """Return the names of the entries, for error messages."""
    return ", ".join(sorted(str(key) for key in cast(Iterable[object], tensordict.keys()))) or "nothing"

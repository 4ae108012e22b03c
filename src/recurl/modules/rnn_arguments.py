"""Validation of the arguments of recurrent modules: keys, sizes, a wrapped torch.nn module, options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingArgumentError
from recurl.core.keys import IS_INIT, NestedKey, normalize_key
from recurl.core.precision import check_precision
from recurl.nn.recurrent_net import RecurrentNet
from recurl.recurrence import BACKENDS, Cell

_RECOMPUTE = ("none", "full")
_COMPUTE_DTYPES = (torch.float32, torch.bfloat16)
_READS_COMPUTE_DTYPE = ("triton", "fastest")
_KEEPS_TORCH_BUFFERS = ("pad", "auto")


@dataclass(frozen=True)
class RecurrentSettings:
    """Options of sequence execution: backend, compute dtype, recomputation, and matmul precision."""

    backend: str
    compute_dtype: torch.dtype
    recompute: str
    matmul_precision: str

    def __post_init__(self) -> None:
        BACKENDS.check_name(self.backend)
        if self.recompute not in _RECOMPUTE:
            raise ArgumentError(f"recurrent_recompute must be 'none' or 'full', got {self.recompute!r}.")
        if self.recompute == "full" and self.backend in _KEEPS_TORCH_BUFFERS:
            raise ArgumentError(
                f"recurrent_recompute='full' can't be used with recurrent_backend={self.backend!r}, since torch.nn's "
                "kernels keep their own buffers: use 'fastest', 'loop', 'cpu', 'scan' or 'triton'."
            )
        check_precision(self.matmul_precision, "recurrent_matmul_precision")
        if self.compute_dtype not in _COMPUTE_DTYPES:
            raise ArgumentError(
                f"recurrent_compute_dtype must be torch.float32 or torch.bfloat16, got {self.compute_dtype!r}."
            )
        if self.compute_dtype != torch.float32 and self.backend not in _READS_COMPUTE_DTYPE:
            raise ArgumentError(
                f"recurrent_compute_dtype={self.compute_dtype} is for recurrent_backend='triton' (or 'fastest'): "
                f"{self.backend!r} computes in the dtype of the weights."
            )


_DEFAULTS = {
    "num_layers": 1,
    "bias": True,
    "batch_first": True,
    "dropout": 0.0,
    "proj_size": 0,
    "bidirectional": False,
    "python_based": False,
    "device": None,
    "dtype": None,
}


def build_net(
    net_class: type[RecurrentNet],
    torch_class: type[nn.RNNBase],
    input_size: int | None,
    hidden_size: int | None,
    options: Mapping[str, object],
    wrapped: nn.RNNBase | RecurrentNet | None,
) -> RecurrentNet:
    """Build a network of the given sizes, or one that adopts the Parameters of ``wrapped``."""
    name = torch_class.__name__
    if wrapped is None:
        for size, value in (("input_size", input_size), ("hidden_size", hidden_size)):
            if value is None:
                raise MissingArgumentError(f"{size} is missing: give the sizes or a torch.nn.{name} to wrap.")
        check_batch_first(options["batch_first"], f"{name}Module")
        return net_class(input_size, hidden_size, **options)  # pyright: ignore[reportArgumentType] - checked there
    given = {key for key, value in options.items() if value != _DEFAULTS[key]}
    given |= {key for key, value in (("input_size", input_size), ("hidden_size", hidden_size)) if value is not None}
    if given:
        raise ArgumentError(
            f"A wrapped torch.nn.{name} has its own sizes and options: remove {', '.join(sorted(given))}."
        )
    ours = isinstance(wrapped, RecurrentNet) and wrapped.cell is net_class.cell
    if not ours and not isinstance(wrapped, torch_class):  # pyright: ignore[reportUnnecessaryIsInstance] - users
        raise ArgumentTypeError(f"The wrapped module must be a torch.nn.{name}, got {type(wrapped).__name__}.")
    if not wrapped.batch_first:
        raise ArgumentError(f"The wrapped torch.nn.{name} must have batch_first=True.")
    if isinstance(wrapped, RecurrentNet):
        return wrapped
    copied = ("num_layers", "bias", "batch_first", "dropout", "bidirectional")
    sizes = {key: getattr(wrapped, key) for key in copied}
    net = net_class(wrapped.input_size, wrapped.hidden_size, **sizes, proj_size=wrapped.proj_size, device="meta")
    net.adopt(wrapped)
    return net


def check_batch_first(value: object, module: str) -> None:
    """Raise ArgumentError if ``batch_first`` is False."""
    if not value:
        raise ArgumentError(f"batch_first must be True: {module} keeps time after the batch dimensions.")


def default_state_keys(cell: Cell) -> list[str]:
    """Return the default keys of the states."""
    names = cell.state_names
    return ["recurrent_state"] if len(names) == 1 else [f"recurrent_state_{name}" for name in names]


def read_keys(cell: Cell, key: NestedKey | None, keys: Sequence[NestedKey] | None) -> list[NestedKey]:
    """Return in_keys: input, states, ``is_init``."""
    states = default_state_keys(cell)
    parsed = _parse_keys("in", states, key, keys)
    count = 1 + len(states)
    if len(parsed) == count:
        return [*parsed, IS_INIT]
    if len(parsed) == count + 1 and parsed[-1] == IS_INIT:
        return parsed
    of_agents = any(isinstance(key, tuple) and key[-1] == IS_INIT for key in parsed)
    advice = " For a flag for each agent, make every agent a row: MultiAgentEnv, agents_as_rows." if of_agents else ""
    raise ArgumentError(
        f"in_keys must be {count} keys (value, {', '.join(states)}), optionally followed by 'is_init'; "
        f"got {parsed}. The key 'is_init' can't be renamed or nested.{advice}"
    )


def written_keys(cell: Cell, key: NestedKey | None, keys: Sequence[NestedKey] | None) -> list[NestedKey]:
    """Return out_keys: features, states."""
    states = default_state_keys(cell)
    parsed = _parse_keys("out", [("next", state) for state in states], key, keys)
    if len(parsed) != 1 + len(states):
        raise ArgumentError(f"out_keys must be {1 + len(states)} keys (features, {', '.join(states)}), got {parsed}.")
    return parsed


def _parse_keys(
    side: str, states: Sequence[NestedKey], key: NestedKey | None, keys: Sequence[NestedKey] | None
) -> list[NestedKey]:
    if (key is None) == (keys is None):
        given = "neither" if key is None else "both"
        raise ArgumentError(f"Give exactly one of {side}_key and {side}_keys ({side}_keys names all), got {given}.")
    if keys is None:
        return [normalize_key(key), *states]
    if isinstance(keys, str):
        raise ArgumentTypeError(
            f"{side}_keys: incompatible function arguments: it must be a list of keys, got the string {keys!r}; "
            f"use {side}_key for one."
        )
    return [normalize_key(item) for item in keys]

"""Recurrent states of a policy: declared ones, and entries that it writes under ``"next"`` in a trial run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from tensordict import TensorDictBase
from torch import nn

from recurl.core.keys import IS_INIT, NEXT, NestedKey, next_key, normalize_key
from recurl.diagnostics.parts import keys_of
from recurl.diagnostics.result import PROBLEMS
from recurl.diagnostics.runs import run


@dataclass(frozen=True)
class State:
    """One recurrent state of a policy.

    Attributes:
        read: key that the state is read from.
        written: key that the new state is written to.
        owner: name of the submodule that reads and writes the state; ``""`` for the policy itself.
    """

    read: NestedKey
    written: NestedKey
    owner: str


def recurrent_submodules(policy: object) -> list[tuple[str, Any]]:
    """Return the name and module of each submodule with recurrent states (one that can make a primer)."""
    if not isinstance(policy, nn.Module):
        return []
    return [(name, module) for name, module in policy.named_modules() if hasattr(module, "make_tensordict_primer")]


def are_alternatives(policy: object, first: str, second: str) -> bool:
    """Return whether each row runs only one of two submodules, given by name, as those of different agents."""
    for name, module in policy.named_modules() if isinstance(policy, nn.Module) else ():
        prefix = f"{name}.alternatives." if name else "alternatives."
        if hasattr(module, "alternatives") and first.startswith(prefix) and second.startswith(prefix):
            return first.removeprefix(prefix).split(".")[0] != second.removeprefix(prefix).split(".")[0]
    return False


def states_of(policy: Any, root: TensorDictBase | None = None) -> list[State]:
    """Return the states of ``policy``.

    Args:
        policy: any policy.
        root: root for a trial run, in which new entries under ``"next"`` count as states; None for no trial run.
    """
    states = [
        State(read, written, name)
        for name, module in recurrent_submodules(policy)
        for read, written in zip(_inputs(module)[1:], keys_of(module, "out_keys")[1:], strict=False)
    ]
    outputs = keys_of(policy, "out_keys")
    others = [key for key in keys_of(policy, "in_keys") if next_key(key) in outputs]
    others += [] if root is None else _writes_next(policy, root)
    known = {state.read for state in states} | {state.written for state in states}
    new = [key for key in dict.fromkeys(others) if key not in known and next_key(key) not in known]
    return states + [State(key, next_key(key), "") for key in new]


def states_in(policy: Any, batch: TensorDictBase) -> list[State]:
    """Return the states of ``policy``, with a trial run on the first step of ``batch``, ``[*B, T]``."""
    return states_of(policy, first_root(batch))


def first_root(batch: TensorDictBase) -> TensorDictBase:
    """Return the root of the first step of ``batch``, ``[*B]``."""
    return batch[..., 0].exclude(NEXT)


def _writes_next(policy: Any, root: TensorDictBase) -> list[NestedKey]:
    try:
        after = run(policy, root, False).get(NEXT, None)
    except PROBLEMS:
        return []  # reported by a check
    return [] if after is None else [normalize_key(key) for key in cast(Iterable[object], after.keys(True, True))]


def _inputs(module: Any) -> list[NestedKey]:
    return [key for key in keys_of(module, "in_keys") if key != IS_INIT]

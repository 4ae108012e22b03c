"""Layers on padded trajectories whose outputs are joined again, as in rsl_rl, without the padding.

The recurrent memories of rsl_rl run their layer on trajectories that are padded to the longest one::

    out, _ = self.rnn(input, hidden_state)
    out = unpad_trajectories(out, masks)

Two such statements are found in the source of a method, as the loops of :mod:`recurl.nn.loops` are, and replaced by one
call that runs the steps of the trajectories alone.
"""

from __future__ import annotations

import ast
from typing import Any

import torch
from torch import Tensor

from recurl.core.torch_compat import assert_async, is_compiling
from recurl.nn.source import Form, Place, is_observed, is_read, pair_of_names
from recurl.nn.torch_call import call_padded

__all__ = ["PADDED", "run_padded"]

_CALL, _UNPAD = "_recurl_run_padded", "unpad_trajectories"


def run_padded(layer: Any, x: Any, state: Any, masks: Any, unpad: Any) -> Any:
    """Run S padded trajectories ``[T, S, I]`` and return the outputs of their steps as ``unpad`` does, ``[T, B, H]``.

    Args:
        layer: what is called: without padding if it is a swapped layer, and nothing observes the call.
        x: the trajectories.
        state: the states before their first steps, each ``[L, S, H]``.
        masks: bool ``[T, S]``, true at the steps of the trajectories.
        unpad: rsl_rl's function, which takes the outputs and the masks.
    """
    if not _is_one_call(layer, x, state, masks):
        return unpad(layer(x, state)[0], masks)
    features = call_padded(layer, x, state if isinstance(state, tuple) else (state,), masks)
    return features.view(-1, x.shape[0], features.shape[-1]).transpose(0, 1)


def _is_one_call(layer: Any, x: Any, state: Any, masks: Any) -> bool:
    if is_observed(layer) or layer.batch_first or is_compiling() or not isinstance(x, Tensor) or x.ndim != 3:
        return False
    if not isinstance(masks, Tensor) or masks.dtype != torch.bool or masks.shape != x.shape[:2] or not masks.numel():
        return False
    shape = (layer.num_layers, x.shape[1])
    states = state if isinstance(state, tuple) else (state,)
    if not all(isinstance(one, Tensor) and one.shape[:2] == shape for one in states):
        return False
    whole = masks[0].all() & (masks[1:] <= masks[:-1]).all()
    if masks.is_cuda:
        assert_async(whole, "masks must be true at the first steps of each trajectory, as those of rsl_rl are")
        return True
    return bool(whole)


def _unpads(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Assign) else None
    return isinstance(value, ast.Call) and ast.unparse(value.func) == _UNPAD


def _replaced(place: Place) -> tuple[str, int] | None:
    """Return the call in the place of ``out, _ = layer(input, state)`` and ``out = unpad_trajectories(out, masks)``."""
    step, unpad = place.before[-1] if place.before else None, place.statement
    if not isinstance(step, ast.Assign) or not isinstance(unpad, ast.Assign) or len(step.targets) != 1:
        return None
    results, call = pair_of_names(step.targets[0]), step.value
    if results is None or not isinstance(call, ast.Call) or len(call.args) != 2 or call.keywords:
        return None
    layer, (output, last) = ast.unparse(call.func), results
    masks = ast.unparse(unpad.value).removeprefix(f"{_UNPAD}({output}, ").removesuffix(")")
    if ast.unparse(unpad) != f"{output} = {_UNPAD}({output}, {masks})" or not masks.isidentifier():
        return None
    if not all(isinstance(one, ast.Name) for one in call.args) or not all(map(str.isidentifier, layer.split("."))):
        return None
    theirs = getattr(place.scope.get(_UNPAD), "__module__", "").partition(".")[0] == "rsl_rl"
    if not theirs or _UNPAD in place.local or masks in results or is_read([last], place.after):
        return None
    x, state = map(ast.unparse, call.args)
    return f"{output} = {_CALL}({layer}, {x}, {state}, {masks}, {_UNPAD})", 1


PADDED = Form(
    hint=_UNPAD,
    does="runs a layer on padded trajectories",
    found=_unpads,
    replaced=_replaced,
    call=_CALL,
    run=run_padded,
    now="padded trajectories, now one call without padding",
)

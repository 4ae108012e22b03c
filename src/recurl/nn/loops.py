"""Loops over time that reset an LSTM or GRU by masks, as one call with resets.

CleanRL, SB3-Contrib and many scripts run an LSTM step by step, since torch.nn has no resets::

    ys = []
    for x, done in zip(xs, dones):
        keep = (1.0 - done).view(1, -1, 1)
        y, state = lstm(x.unsqueeze(0), (keep * state[0], keep * state[1]))
        ys += [y]
    features = torch.cat(ys)

Such a loop, in any of its usual spellings, is found in the source of a method and replaced by one call. It must do
nothing else, and nothing else may read its variables but ``torch.cat``.
"""

from __future__ import annotations

import ast
from typing import Any

import torch
from torch import Tensor

from recurl.core.torch_compat import assert_async
from recurl.nn.source import Form, Loop, Place, collected, is_observed, names_in, pair_of_names, takes_place_of

__all__ = ["MASKED", "run_masked"]

_CALL = "_recurl_run_masked"


def run_masked(layer: Any, xs: Any, state: Any, dones: Any, pair: bool) -> tuple[Any, Any]:
    """Run the loop over ``xs``, ``[T, B, I]``, from zeros again where ``dones``, ``[T, B]``, is 1; it may be 0 or 1.

    Args:
        layer: what is called at each step: one call if it is a swapped layer, and nothing observes its steps.
        xs: what ``zip`` takes, likewise ``dones``.
        state: the states before the first step.
        dones: the flags.
        pair: whether the states are a pair, as an LSTM's, instead of one tensor.

    Returns:
        The outputs, joined along time, and the states after the last step.
    """
    if _is_one_call(layer, xs, state, dones, pair):
        return layer(xs, state, resets=dones.reshape(xs.shape[:2]) != 0)
    outputs: list[Tensor] = []
    for x, done in zip(xs, dones):  # noqa: B905 - as the loop did
        keep = (1.0 - done).view(1, -1, 1)
        output, state = layer(x.unsqueeze(0), (keep * state[0], keep * state[1]) if pair else keep * state)
        outputs.append(output)
    return torch.cat(outputs), state


def _is_one_call(layer: Any, xs: Any, state: Any, dones: Any, pair: bool) -> bool:
    if is_observed(layer) or layer.batch_first:
        return False
    states = state if pair else (state,)
    if not isinstance(xs, Tensor) or not isinstance(dones, Tensor) or xs.ndim != 3 or not xs.shape[0]:
        return False
    if not isinstance(states, tuple) or not all(isinstance(one, Tensor) and one.ndim == 3 for one in states):
        return False
    fits = dones.shape[0] == xs.shape[0] and dones.numel() == xs.shape[0] * xs.shape[1]
    if not fits or any(one.shape[1] != xs.shape[1] for one in states) or dones.requires_grad:
        return False
    if dones.dtype == torch.bool:
        return True
    flags = ((dones == 0) | (dones == 1)).all()
    if dones.is_cuda:
        assert_async(flags, "dones must be 0 or 1 where recurl.accelerate has replaced a loop with masks")
        return True
    return bool(flags)


def _steps_a_layer(loop: ast.stmt) -> bool:
    """Return whether a call in a loop looks like that of a layer: two results, one of them also an argument."""
    if not isinstance(loop, ast.For):
        return False
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and len(node.value.args) >= 2:
            target = node.targets[0]
            if isinstance(target, ast.Tuple) and len(target.elts) == 2 and isinstance(target.elts[1], ast.Name):
                token = ast.unparse(node.value.args[0])
                is_token = ".unsqueeze(" in token or token.endswith("[None]")
                if is_token and target.elts[1].id in names_in(node.value):
                    return True
    return False


def _replaced(place: Place) -> tuple[str, int] | None:
    assert isinstance(place.statement, ast.For)
    call = takes_place_of(_parts_of(place.statement), place, ("", "0"), ("zip",))
    return None if call is None else (call, 0)


def _parts_of(loop: ast.For) -> Loop | None:
    """Return the parts of a loop in one of the usual spellings, or None."""
    zipped, names, body = loop.iter, pair_of_names(loop.target), list(loop.body)
    if loop.orelse or names is None or not isinstance(zipped, ast.Call) or len(zipped.args) != 2:
        return None
    if ast.unparse(zipped.func) != "zip" or any(one.arg != "strict" for one in zipped.keywords):
        return None
    (x, done), masks = names, set[str]()
    if len(body) == 3:
        mask = body.pop(0)
        if not isinstance(mask, ast.Assign) or len(mask.targets) != 1 or not isinstance(mask.targets[0], ast.Name):
            return None
        if not _is_mask(mask.value, done) or mask.targets[0].id in (x, done):
            return None
        masks.add(mask.targets[0].id)
    if len(body) != 2 or not isinstance(body[0], ast.Assign) or len(body[0].targets) != 1:
        return None
    results, step = pair_of_names(body[0].targets[0]), body[0].value
    if results is None or not isinstance(step, ast.Call) or len(step.args) != 2 or step.keywords:
        return None
    (output, state), (token, masked) = results, step.args
    is_token = ast.unparse(token) in (f"{x}.unsqueeze(0)", f"{x}.unsqueeze(dim=0)", f"{x}[None]")
    pair = isinstance(masked, ast.Tuple)
    products = masked.elts if isinstance(masked, ast.Tuple) else [masked]
    wanted = [f"{state}[0]", f"{state}[1]"] if pair else [state]
    kept = len(products) == len(wanted) and all(map(_keeps, products, wanted, [done] * 2, [masks] * 2))
    outputs = collected(body[1], output)
    layer = ast.unparse(step.func)
    if not is_token or not kept or outputs is None or not all(part.isidentifier() for part in layer.split(".")):
        return None
    temporary = frozenset({x, done, output, *masks})
    if {state, outputs} & temporary or state == outputs or temporary & names_in(step.func) - {"self"}:
        return None
    xs, dones = map(ast.unparse, zipped.args)
    call = f"{_CALL}({layer}, {xs}, {state}, {dones}, {pair})"
    return Loop(outputs, f"{outputs}, {state} = {call}\n{outputs} = [{outputs}]", temporary)


def _is_mask(node: ast.expr, done: str) -> bool:
    """Return whether an expression is ``(1.0 - done).view(1, ..., 1)``."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.keywords:
        return False
    sizes = [ast.unparse(size) for size in node.args]
    shaped = len(sizes) == 3 and sizes[0] == sizes[2] == "1" and node.func.attr in ("view", "reshape")
    return shaped and ast.unparse(node.func.value) in (f"1.0 - {done}", f"1 - {done}")


def _keeps(product: ast.expr, state: str, done: str, masks: set[str]) -> bool:
    """Return whether an expression is the product of a mask and a state, in either order."""
    if not isinstance(product, ast.BinOp) or not isinstance(product.op, ast.Mult):
        return False
    for mask, other in ((product.left, product.right), (product.right, product.left)):
        if ast.unparse(other) == state and (ast.unparse(mask) in masks or _is_mask(mask, done)):
            return True
    return False


MASKED = Form(
    hint="zip",
    does="steps a layer in a loop",
    found=_steps_a_layer,
    replaced=_replaced,
    call=_CALL,
    run=run_masked,
    now="a loop with masks, now one call with resets",
)

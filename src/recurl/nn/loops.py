"""Loops over time that reset an LSTM or GRU by masks, as one call with resets.

CleanRL, SB3-Contrib and many scripts run an LSTM step by step, since torch.nn has no resets::

    for x, done in zip(xs, dones):
        keep = (1.0 - done).view(1, -1, 1)
        y, state = lstm(x.unsqueeze(0), (keep * state[0], keep * state[1]))
        ys += [y]

Such a loop, in any of its usual spellings, is found in the source of a method and replaced by one call.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recurl.nn.swapped import SwappedGRU, SwappedLSTM

__all__ = ["run_masked", "without_loop"]

_CALL = "_recurl_run_masked"


def without_loop(function: Callable[..., Any]) -> tuple[Callable[..., Any] | None, str | None]:
    """Return a function without its loop over an LSTM or GRU, or None; and why one that has a loop keeps it, or None.

    Example:
        >>> without_loop(len)
        (None, None)
    """
    code = getattr(function, "__code__", None)
    if code is None or "zip" not in code.co_names or hasattr(function, "__wrapped__"):
        return None, None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None, None
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        return None, None
    loops = [node for node in ast.walk(definition) if isinstance(node, ast.For) and _steps_a_layer(node)]
    if not loops:
        return None, None
    why = _not_alone(definition, function)
    if why is not None:
        return None, f"it steps a layer in a loop, but {why}"
    found = _read(loops[0]) if len(loops) == 1 else None
    if found is None or not _replace(definition, loops[0], found):
        return None, "it steps a layer in a loop of another form: call the layer on whole sequences, with resets="
    _strip(definition)
    names: dict[str, Any] = {}
    scope = function.__globals__
    scope.setdefault(_CALL, run_masked)
    exec(compile(ast.fix_missing_locations(tree), inspect.getfile(function), "exec"), scope, names)
    made: Callable[..., Any] = names[function.__name__]
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return functools.update_wrapper(made, function), None


def _not_alone(definition: ast.FunctionDef, function: Callable[..., Any]) -> str | None:
    """Return why a definition means something else outside of its class, or None."""
    if function.__closure__:
        return "uses super() or variables of an enclosing function"
    if not {ast.unparse(one) for one in definition.decorator_list} <= {"staticmethod", "classmethod"}:
        return "has a decorator"
    names = {node.attr for node in ast.walk(definition) if isinstance(node, ast.Attribute)}
    names |= {node.id for node in ast.walk(definition) if isinstance(node, ast.Name)}
    if any(name.startswith("__") and not name.endswith("__") for name in names):
        return "uses private names of its class"
    return None


def _strip(definition: ast.FunctionDef) -> None:
    """Remove decorators and annotations, and the values of defaults, which the function has already."""
    definition.decorator_list, definition.returns = [], None
    arguments = definition.args
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
    for one in every:
        if one is not None:
            one.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [None if one is None else ast.Constant(None) for one in arguments.kw_defaults]


def run_masked(layer: Any, xs: Tensor, state: Any, dones: Tensor) -> tuple[Tensor, Any]:
    """Run ``layer`` over ``xs``, ``[T, B, I]``, from zeros again where ``dones``, ``[T, B]``, isn't zero."""
    if isinstance(layer, SwappedLSTM | SwappedGRU) and not layer.batch_first:
        return layer(xs, state, dones.reshape(xs.shape[:2]) != 0)
    outputs: list[Tensor] = []
    for x, done in zip(xs, dones, strict=True):
        keep = (1.0 - done.to(x.dtype)).view(1, -1, 1)
        state = tuple(keep * one for one in state) if isinstance(state, tuple) else keep * state
        output, state = layer(x.unsqueeze(0), state)
        outputs.append(output)
    return torch.cat(outputs), state


class _Loop(NamedTuple):
    """Source code of the parts of a loop."""

    xs: str
    dones: str
    layer: str
    output: str
    state: str
    outputs: str


def _steps_a_layer(loop: ast.For) -> bool:
    """Return whether a call in the loop looks like that of a layer: two results, one of them also an argument."""
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and len(node.value.args) >= 2:
            target = node.targets[0]
            if isinstance(target, ast.Tuple) and len(target.elts) == 2 and isinstance(target.elts[1], ast.Name):
                arguments = {one.id for one in ast.walk(node.value) if isinstance(one, ast.Name)}
                token = ast.unparse(node.value.args[0])
                if target.elts[1].id in arguments and (".unsqueeze(" in token or token.endswith("[None]")):
                    return True
    return False


def _read(loop: ast.For) -> _Loop | None:
    """Return the parts of a loop in one of the usual spellings."""
    body = list(loop.body)
    keeps: dict[str, ast.expr] = {}
    while len(body) > 2 and isinstance(body[0], ast.Assign) and isinstance(body[0].targets[0], ast.Name):
        assignment = body.pop(0)
        assert isinstance(assignment, ast.Assign)
        keeps[ast.unparse(assignment.targets[0])] = assignment.value
    zipped, names = loop.iter, loop.target
    if len(body) != 2 or loop.orelse or not isinstance(zipped, ast.Call) or ast.unparse(zipped.func) != "zip":
        return None
    step, collect = body
    if not isinstance(step, ast.Assign) or not isinstance(step.value, ast.Call) or len(step.value.args) != 2:
        return None
    if step.value.keywords or len(zipped.args) != 2 or not isinstance(names, ast.Tuple) or len(names.elts) != 2:
        return None
    (x, done), (output, state) = map(ast.unparse, names.elts), map(ast.unparse, step.targets[0].elts)  # pyright: ignore[reportAttributeAccessIssue] - a tuple, by _steps_a_layer
    token, masked = step.value.args
    if ast.unparse(token) not in (f"{x}.unsqueeze(0)", f"{x}.unsqueeze(dim=0)", f"{x}[None]"):
        return None
    if isinstance(masked, ast.Tuple):
        fits = [_keeps(one, f"{state}[{k}]", done, keeps) for k, one in enumerate(masked.elts)]
        fits.append(len(masked.elts) == 2)
    else:
        fits = [_keeps(masked, state, done, keeps)]
    outputs = _collected(collect, output)
    if not all(fits) or outputs is None:
        return None
    xs, dones = map(ast.unparse, zipped.args)
    return _Loop(xs, dones, ast.unparse(step.value.func), output, state, outputs)


def _keeps(product: ast.expr, state: str, done: str, keeps: dict[str, ast.expr]) -> bool:
    """Return whether a product is ``(1.0 - done).view(1, ..., 1) * state``, in either order."""
    if not isinstance(product, ast.BinOp) or not isinstance(product.op, ast.Mult):
        return False
    for keep, other in ((product.left, product.right), (product.right, product.left)):
        shaped = keeps.get(ast.unparse(keep), keep)
        if ast.unparse(other) == state and isinstance(shaped, ast.Call) and isinstance(shaped.func, ast.Attribute):
            sizes = [ast.unparse(size) for size in shaped.args]
            whole = len(sizes) == 3 and sizes[0] == sizes[2] == "1" and shaped.func.attr in ("view", "reshape")
            return whole and ast.unparse(shaped.func.value) in (f"1.0 - {done}", f"1 - {done}")
    return False


def _collected(statement: ast.stmt, output: str) -> str | None:
    """Return the list that a statement adds the output to."""
    if isinstance(statement, ast.AugAssign) and ast.unparse(statement.value) == f"[{output}]":
        return ast.unparse(statement.target)
    if isinstance(statement, ast.Expr):
        name, _, argument = ast.unparse(statement.value).partition(".append(")
        return name if argument == f"{output})" else None
    return None


def _replace(definition: ast.FunctionDef, loop: ast.For, found: _Loop) -> bool:
    """Replace the loop where nothing but ``cat`` of the outputs, along time, reads what it leaves behind."""
    for name in (_stored(loop) | {found.outputs}) - {found.state}:
        for node in _read_after(definition, loop, name):
            if name != found.outputs or not _is_cat(definition, node):
                return False
    text = f"{found.output}, {found.state} = {_CALL}({found.layer}, {found.xs}, {found.state}, {found.dones})\n"
    statements = ast.parse(f"{text}{found.outputs} += [{found.output}]").body
    for node in ast.walk(definition):
        for _, block in ast.iter_fields(node):
            if isinstance(block, list) and loop in block:
                at = block.index(loop)
                block[at : at + 1] = statements
                return True
    return False


def _stored(loop: ast.For) -> set[str]:
    return {node.id for node in ast.walk(loop) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _read_after(definition: ast.FunctionDef, loop: ast.For, name: str) -> Iterator[ast.Name]:
    """Yield where a name is read after the loop, until it is assigned again."""
    end = loop.end_lineno or 0
    statements = [node for node in ast.walk(definition) if isinstance(node, ast.Assign) and node.lineno > end]
    again = [one.end_lineno or 0 for one in statements if name in map(ast.unparse, one.targets)]
    for node in ast.walk(definition):
        if not isinstance(node, ast.Name) or node.id != name or not isinstance(node.ctx, ast.Load):
            continue
        if end < node.lineno <= min(again, default=node.lineno):
            yield node


def _is_cat(definition: ast.FunctionDef, name: ast.Name) -> bool:
    """Return whether a name is read as ``cat(name)``, along the first dimension."""
    for node in ast.walk(definition):
        if isinstance(node, ast.Call) and node.args and node.args[0] is name:
            others = [ast.unparse(one) for one in (*node.args[1:], *(keyword.value for keyword in node.keywords))]
            return ast.unparse(node.func).endswith("cat") and others in ([], ["0"])
    return False


def bound(function: Callable[..., Any], module: object, kind: object) -> Callable[..., Any]:
    """Bind a function to a module as its class binds ``kind``, the attribute in the class's namespace."""
    if isinstance(kind, staticmethod):
        return function
    return types.MethodType(function, type(module) if isinstance(kind, classmethod) else module)

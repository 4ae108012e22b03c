"""Loops over time that reset an LSTM or GRU by masks, as one call with resets.

CleanRL, SB3-Contrib and many scripts run an LSTM step by step, since torch.nn has no resets::

    ys = []
    for x, done in zip(xs, dones):
        keep = (1.0 - done).view(1, -1, 1)
        y, state = lstm(x.unsqueeze(0), (keep * state[0], keep * state[1]))
        ys += [y]
    features = torch.cat(ys)

Such a loop, in any of its usual spellings, is found in the source of a method and replaced by one call. It must be a
statement of the method itself that does nothing else, and whose variables nothing else reads but ``torch.cat``.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recurl.core.torch_compat import assert_async, has_global_hooks, has_hooks
from recurl.nn.swapped import SwappedGRU, SwappedLSTM, is_traced

__all__ = ["is_without_loop", "run_masked", "without_loop"]

_CALL, _MADE = "_recurl_run_masked", "_recurl_without_loop"
_OTHER = "it steps a layer in a loop of another form: call the layer on whole sequences, with resets="


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
    found = _parts_of(loops[0]) if len(loops) == 1 else None
    if found is None or not _is_all(definition, loops[0], found, function.__globals__):
        return None, _OTHER
    line = code.co_firstlineno
    _replace(definition, loops[0], found)
    _strip(definition)
    scope, names = function.__globals__, dict[str, Any]()
    scope.setdefault(_CALL, run_masked)
    tree = ast.increment_lineno(ast.fix_missing_locations(tree), line - 1)
    exec(compile(tree, code.co_filename, "exec"), scope, names)
    made: Any = names[function.__name__]
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    functools.update_wrapper(made, function)
    setattr(made, _MADE, True)
    return made, None


def is_without_loop(function: Callable[..., Any]) -> bool:
    """Return whether :func:`without_loop` made this function."""
    return getattr(function, _MADE, False)


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
    if not isinstance(layer, SwappedLSTM | SwappedGRU) or layer.batch_first or layer.bidirectional:
        return False
    states = state if pair else (state,)
    if not isinstance(xs, Tensor) or not isinstance(dones, Tensor) or xs.ndim != 3 or not xs.shape[0]:
        return False
    if not isinstance(states, tuple) or not all(isinstance(one, Tensor) and one.ndim == 3 for one in states):
        return False
    fits = dones.shape[0] == xs.shape[0] and dones.numel() == xs.shape[0] * xs.shape[1]
    if not fits or any(one.shape[1] != xs.shape[1] for one in states) or dones.requires_grad:
        return False
    if has_hooks(layer) or has_global_hooks() or is_traced():
        return False
    if dones.dtype == torch.bool:
        return True
    flags = ((dones == 0) | (dones == 1)).all()
    if dones.is_cuda:
        assert_async(flags, "dones must be 0 or 1 where recurl.accelerate has replaced a loop with masks")
        return True
    return bool(flags)


class _Loop(NamedTuple):
    """Source code of the parts of a loop, and all names that it assigns."""

    xs: str
    dones: str
    layer: str
    state: str
    outputs: str
    pair: bool
    temporary: frozenset[str]


def _steps_a_layer(loop: ast.For) -> bool:
    """Return whether a call in the loop looks like that of a layer: two results, one of them also an argument."""
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and len(node.value.args) >= 2:
            target = node.targets[0]
            if isinstance(target, ast.Tuple) and len(target.elts) == 2 and isinstance(target.elts[1], ast.Name):
                token = ast.unparse(node.value.args[0])
                is_token = ".unsqueeze(" in token or token.endswith("[None]")
                if is_token and target.elts[1].id in _names(node.value):
                    return True
    return False


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _not_alone(definition: ast.FunctionDef, function: Any) -> str | None:
    """Return why a definition means something else outside of its class, or None."""
    if function.__closure__:
        return "uses super() or variables of an enclosing function"
    if not {ast.unparse(one) for one in definition.decorator_list} <= {"staticmethod", "classmethod"}:
        return "has a decorator"
    names = _names(definition) | {node.attr for node in ast.walk(definition) if isinstance(node, ast.Attribute)}
    if any(name.startswith("__") and not name.endswith("__") for name in names):
        return "uses private names of its class"
    if any(isinstance(node, ast.Lambda | ast.FunctionDef) and node is not definition for node in ast.walk(definition)):
        return "has functions of its own"
    compiled = compile(ast.Module([_without_decorators(definition)], []), "", "exec").co_consts
    code = next(one for one in compiled if isinstance(one, CodeType))
    if _identity(code) != _identity(function.__code__):
        return "its source isn't what runs: has the file changed?"
    return None


def _without_decorators(definition: ast.FunctionDef) -> ast.FunctionDef:
    """Return a definition that needs no names to be compiled."""
    copied = ast.parse(ast.unparse(definition)).body[0]
    assert isinstance(copied, ast.FunctionDef)
    _strip(copied)
    return ast.fix_missing_locations(copied)


def _identity(code: CodeType) -> tuple[Any, ...]:
    """Return what code compiled from the same source has in common, wherever that stands."""
    return code.co_names, code.co_varnames, [one for one in code.co_consts if not isinstance(one, str)]


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


def _parts_of(loop: ast.For) -> _Loop | None:
    """Return the parts of a loop in one of the usual spellings, or None."""
    zipped, pair_of_names, body = loop.iter, _pair(loop.target), list(loop.body)
    if loop.orelse or pair_of_names is None or not isinstance(zipped, ast.Call) or len(zipped.args) != 2:
        return None
    if ast.unparse(zipped.func) != "zip" or any(one.arg != "strict" for one in zipped.keywords):
        return None
    (x, done), masks = pair_of_names, set[str]()
    if len(body) == 3:
        mask = body.pop(0)
        if not isinstance(mask, ast.Assign) or len(mask.targets) != 1 or not isinstance(mask.targets[0], ast.Name):
            return None
        if not _is_mask(mask.value, done) or mask.targets[0].id in (x, done):
            return None
        masks.add(mask.targets[0].id)
    if len(body) != 2 or not isinstance(body[0], ast.Assign) or len(body[0].targets) != 1:
        return None
    results, step = _pair(body[0].targets[0]), body[0].value
    if results is None or not isinstance(step, ast.Call) or len(step.args) != 2 or step.keywords:
        return None
    (output, state), (token, masked) = results, step.args
    is_token = ast.unparse(token) in (f"{x}.unsqueeze(0)", f"{x}.unsqueeze(dim=0)", f"{x}[None]")
    pair = isinstance(masked, ast.Tuple)
    products = masked.elts if isinstance(masked, ast.Tuple) else [masked]
    wanted = [f"{state}[0]", f"{state}[1]"] if pair else [state]
    kept = len(products) == len(wanted) and all(map(_keeps, products, wanted, [done] * 2, [masks] * 2))
    outputs = _collected(body[1], output)
    layer = ast.unparse(step.func)
    if not is_token or not kept or outputs is None or not all(part.isidentifier() for part in layer.split(".")):
        return None
    temporary = frozenset({x, done, output, *masks})
    if {state, outputs} & temporary or state == outputs or temporary & _names(step.func) - {"self"}:
        return None
    xs, dones = map(ast.unparse, zipped.args)
    return _Loop(xs, dones, layer, state, outputs, pair, temporary)


def _pair(target: ast.expr) -> tuple[str, str] | None:
    """Return the names of ``a, b``."""
    if isinstance(target, ast.Tuple) and len(target.elts) == 2:
        one, other = target.elts
        if isinstance(one, ast.Name) and isinstance(other, ast.Name) and one.id != other.id:
            return one.id, other.id
    return None


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


def _collected(statement: ast.stmt, output: str) -> str | None:
    """Return the name of the list that a statement adds the output to."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        is_sum = isinstance(statement.op, ast.Add) and ast.unparse(statement.value) == f"[{output}]"
        return statement.target.id if is_sum else None
    if isinstance(statement, ast.Expr):
        name, _, argument = ast.unparse(statement.value).partition(".append(")
        return name if argument == f"{output})" and name.isidentifier() else None
    return None


def _is_all(definition: ast.FunctionDef, loop: ast.For, found: _Loop, scope: dict[str, Any]) -> bool:
    """Return whether nothing but ``torch.cat`` of a list that was empty before sees what the loop leaves behind."""
    body = definition.body
    local = {one.arg for one in ast.walk(definition.args) if isinstance(one, ast.arg)} | _stored(definition)
    if loop not in body or "zip" in local or scope.get("zip", builtins.zip) is not builtins.zip:
        return False
    at = body.index(loop)
    begins = [k for k, one in enumerate(body[:at]) if _assigned(one) == found.outputs]
    if not begins or ast.unparse(body[begins[-1]]).partition("=")[2].strip() != "[]":
        return False
    if any(found.outputs in _names(one) for one in body[begins[-1] + 1 : at]):
        return False
    after = body[at + 1 :]
    if any(found.temporary & _loaded(one) for one in after):
        return False
    mentions = [one for one in after if found.outputs in _names(one)]
    if not mentions or not _is_joined(mentions[0], found.outputs, scope, local):
        return False
    return len(mentions) == 1 or _assigned(mentions[0]) == found.outputs


def _stored(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}


def _loaded(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}


def _assigned(statement: ast.stmt) -> str | None:
    """Return the single name that a statement assigns."""
    targets: Iterable[ast.expr] = ()
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = (statement.target,)
    names = [one.id for one in targets if isinstance(one, ast.Name)]
    return names[0] if len(names) == 1 else None


def _is_joined(statement: ast.stmt, outputs: str, scope: dict[str, Any], local: set[str]) -> bool:
    """Return whether a simple statement reads the outputs once, as ``torch.cat(outputs)`` along the first dimension."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.Return | ast.Expr):
        return False
    reads = [one for one in ast.walk(statement) if isinstance(one, ast.Name) and one.id == outputs]
    reads = [one for one in reads if isinstance(one.ctx, ast.Load)]
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and node.args and node.args[0] in reads and len(reads) == 1:
            others = [ast.unparse(one) for one in (*node.args[1:], *(keyword.value for keyword in node.keywords))]
            return _is_cat(node.func, scope, local) and others in ([], ["0"])
    return False


def _is_cat(node: ast.expr, scope: dict[str, Any], local: set[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id not in local and scope.get(node.id) is torch.cat
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name) or node.attr != "cat":
        return False
    return node.value.id not in local and scope.get(node.value.id) is torch


def _replace(definition: ast.FunctionDef, loop: ast.For, found: _Loop) -> None:
    call = f"{_CALL}({found.layer}, {found.xs}, {found.state}, {found.dones}, {found.pair})"
    made = ast.parse(f"{found.outputs}, {found.state} = {call}\n{found.outputs} = [{found.outputs}]").body
    for one in made:
        for node in ast.walk(one):
            ast.copy_location(node, loop)
    at = definition.body.index(loop)
    definition.body[at : at + 1] = made

"""Statements of a function's source, and what may read the variables that they leave behind."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from recurl.core.torch_compat import has_global_hooks, has_hooks
from recurl.nn.swapped import is_swapped, is_traced

__all__ = [
    "Form",
    "Loop",
    "Place",
    "assigned",
    "collected",
    "is_observed",
    "is_read",
    "names_in",
    "pair_of_names",
    "place_of",
    "takes_place_of",
]


class Place(NamedTuple):
    """A statement in the source of a function.

    Attributes:
        statement: the statement.
        block: the statements that it is one of: those of the function, or of an ``if`` statement.
        before: those before it.
        after: what may run after it, in order: the rest of its block and of the blocks around that.
        local: the names that are local to the function.
        scope: the global names of the function.
    """

    statement: ast.stmt
    block: list[ast.stmt]
    before: list[ast.stmt]
    after: list[ast.stmt]
    local: set[str]
    scope: dict[str, Any]


class Form(NamedTuple):
    """A way to write a pass over sequences, and the call that replaces it.

    Attributes:
        hint: a name that functions with it use.
        does: what such a function does.
        found: whether a statement looks like it.
        replaced: the source of the call, and how many statements before that one it also replaces; None if it can't be.
        call: the name of the function that the call runs.
        run: this function.
        now: what such a pass is then.
    """

    hint: str
    does: str
    found: Callable[[ast.stmt], bool]
    replaced: Callable[[Place], tuple[str, int] | None]
    call: str
    run: Callable[..., Any]
    now: str


class Loop(NamedTuple):
    """What a loop is in terms of names.

    Attributes:
        outputs: the list that it appends to.
        call: source that does the same; the list then holds the joined outputs.
        temporary: the names that the loop assigns and the call doesn't.
    """

    outputs: str
    call: str
    temporary: frozenset[str]


def place_of(definition: ast.FunctionDef, statement: ast.stmt, scope: dict[str, Any]) -> Place | None:
    """Return where a statement is, or None if it isn't one of the function itself or of its ``if`` statements."""
    local = {one.arg for one in ast.walk(definition.args) if isinstance(one, ast.arg)} | _stored(definition)
    block, later = definition.body, list[ast.stmt]()
    while statement not in block:
        inside = next((one for one in block if isinstance(one, ast.If) and _has(one, statement)), None)
        if inside is None:
            return None
        later = [*block[block.index(inside) + 1 :], *later]
        block = inside.body if any(_has(one, statement) for one in inside.body) else inside.orelse
    at = block.index(statement)
    return Place(statement, block, block[:at], [*block[at + 1 :], *later], local, scope)


def _has(node: ast.AST, part: ast.AST) -> bool:
    return any(one is part for one in ast.walk(node))


def is_read(names: Iterable[str], after: Sequence[ast.stmt]) -> bool:
    """Return whether any of the statements may read one of the names before it is assigned again."""
    left = set(names)
    for one in after:
        if left & _loaded(one):
            return True
        if isinstance(one, ast.Assign) or (isinstance(one, ast.AnnAssign) and one.value is not None):
            left -= _stored(one)
    return False


def _means_builtin(name: str, place: Place) -> bool:
    """Return whether a name is that of the built-in function."""
    known: Any = getattr(builtins, name)
    return name not in place.local and place.scope.get(name, known) is known


def takes_place_of(found: Loop | None, place: Place, dimensions: Sequence[str], builtin: Sequence[str]) -> str | None:
    """Return the source of a call that may take the place of a loop, as nothing reads what only the loop leaves behind.

    The list must be empty and unseen before the loop, and all that reads it later must be one ``torch.cat``.

    Args:
        found: the loop.
        place: its place.
        dimensions: the further arguments that ``torch.cat`` may have, as source.
        builtin: the built-in functions that the loop uses.
    """
    if found is None or not all(_means_builtin(one, place) for one in builtin) or is_read(found.temporary, place.after):
        return None
    outputs = found.outputs
    begins = [k for k, one in enumerate(place.before) if assigned(one) == outputs]
    if not begins or ast.unparse(place.before[begins[-1]]).partition("=")[2].strip() != "[]":
        return None
    if any(outputs in names_in(one) for one in place.before[begins[-1] + 1 :]):
        return None
    mentions = [one for one in place.after if outputs in names_in(one)]
    if not mentions or not _is_joined(mentions[0], outputs, dimensions, place):
        return None
    return found.call if len(mentions) == 1 or assigned(mentions[0]) == outputs else None


def names_in(node: ast.AST) -> set[str]:
    """Return all names of variables."""
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def assigned(statement: ast.stmt) -> str | None:
    """Return the single name that a statement assigns."""
    targets: Iterable[ast.expr] = ()
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = (statement.target,)
    names = [one.id for one in targets if isinstance(one, ast.Name)]
    return names[0] if len(names) == 1 else None


def pair_of_names(target: ast.expr) -> tuple[str, str] | None:
    """Return the names of ``a, b``."""
    if isinstance(target, ast.Tuple) and len(target.elts) == 2:
        one, other = target.elts
        if isinstance(one, ast.Name) and isinstance(other, ast.Name) and one.id != other.id:
            return one.id, other.id
    return None


def collected(statement: ast.stmt, output: str) -> str | None:
    """Return the name of the list that a statement adds the output to."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        is_sum = isinstance(statement.op, ast.Add) and ast.unparse(statement.value) == f"[{output}]"
        return statement.target.id if is_sum else None
    if isinstance(statement, ast.Expr):
        name, _, argument = ast.unparse(statement.value).partition(".append(")
        return name if argument == f"{output})" and name.isidentifier() else None
    return None


def is_observed(layer: Any) -> bool:
    """Return whether a layer must be called as it is written: it isn't swapped, has hooks, or is traced."""
    swapped = is_swapped(layer) and "forward" not in vars(layer)  # a wrapper of one object
    return not swapped or layer.bidirectional or has_hooks(layer) or has_global_hooks() or is_traced()


def _stored(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}


def _loaded(node: ast.AST) -> set[str]:
    read = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Store)}
    changed = (one.target for one in ast.walk(node) if isinstance(one, ast.AugAssign))
    return read | {one.id for one in changed if isinstance(one, ast.Name)}


def _is_joined(statement: ast.stmt, outputs: str, dimensions: Sequence[str], place: Place) -> bool:
    """Return whether a simple statement reads the outputs once, as ``torch.cat(outputs)`` along a dimension."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.Return | ast.Expr):
        return False
    reads = [one for one in ast.walk(statement) if isinstance(one, ast.Name) and one.id == outputs]
    reads = [one for one in reads if isinstance(one.ctx, ast.Load)]
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and node.args and node.args[0] in reads and len(reads) == 1:
            named = [keyword.value for keyword in node.keywords if keyword.arg in ("dim", "axis")]
            if len(named) != len(node.keywords):
                return False
            others = [ast.unparse(one) for one in (*node.args[1:], *named)]
            return _is_cat(node.func, place) and " ".join(others) in dimensions
    return False


def _is_cat(node: ast.expr, place: Place) -> bool:
    if isinstance(node, ast.Name):
        return node.id not in place.local and place.scope.get(node.id) is torch.cat
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name) or node.attr != "cat":
        return False
    return node.value.id not in place.local and place.scope.get(node.value.id) is torch

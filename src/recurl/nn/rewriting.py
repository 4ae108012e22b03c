"""Functions whose pass over sequences, in one of several known forms, is replaced by one call of a layer."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Collection
from types import CodeType
from typing import Any, NamedTuple

from recurl.nn.loops import MASKED
from recurl.nn.padded import PADDED
from recurl.nn.parts import IN_PARTS
from recurl.nn.source import Form, names_in, place_of

__all__ = ["Rewritten", "is_rewritten", "rewritten"]

_FORMS = (MASKED, IN_PARTS, PADDED)
_MADE = "_recurl_rewritten"
_OTHER = "in another form: call the layer on whole sequences, with resets="


class Rewritten(NamedTuple):
    """What became of a function.

    Attributes:
        function: the function with a call in the place of its pass over sequences, or None.
        what: what was replaced, or why it wasn't; None if the function has no such pass.
    """

    function: Callable[..., Any] | None = None
    what: str | None = None


def rewritten(function: Callable[..., Any], layers: Collection[str] = ()) -> Rewritten:
    """Replace the pass over sequences in a function by one call, if it has one in a known form and does nothing else.

    Args:
        function: the function.
        layers: swapped layers, such as ``"self.lstm"``, whose loops are also reported if they are in no known form.

    Example:
        >>> rewritten(len)
        Rewritten(function=None, what=None)
    """
    code = getattr(function, "__code__", None)
    forms = () if code is None else [form for form in _FORMS if form.hint in code.co_names]
    layers = [one for one in layers if code is not None and one.split(".")[1] in code.co_names]
    if not (forms or layers) or hasattr(function, "__wrapped__"):
        return Rewritten()
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return Rewritten()
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        return Rewritten()
    statements = [node for node in ast.walk(definition) if isinstance(node, ast.stmt)]
    found = [(form, one) for form in forms for one in statements if form.found(one)]
    if not found:
        other = any(_loops_over(one, layers) for one in statements)
        return Rewritten(None, f"it {MASKED.does} {_OTHER}" if other else None)
    form, statement = found[0]
    why = _not_alone(definition, function)
    if why is not None:
        return Rewritten(None, f"it {form.does}, but {why}")
    if len(found) > 1 or not _replace(definition, statement, form, function.__globals__):
        return Rewritten(None, f"it {form.does} {_OTHER}")
    return Rewritten(_compiled(tree, definition, function, form), form.now)


def is_rewritten(function: Callable[..., Any]) -> bool:
    """Return whether :func:`rewritten` made this function."""
    return getattr(function, _MADE, False)


def _loops_over(statement: ast.stmt, layers: Collection[str]) -> bool:
    """Return whether a loop calls a layer with states."""
    if not isinstance(statement, ast.For | ast.While):
        return False
    for node in ast.walk(statement):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            layer = re.sub(r"\['?(\w+)'?\]", r".\1", ast.unparse(node.value.func))  # of containers, too
            if layer in layers and len(node.value.args) + len(node.value.keywords) > 1:
                return True
    return False


def _replace(definition: ast.FunctionDef, statement: ast.stmt, form: Form, scope: dict[str, Any]) -> bool:
    place = place_of(definition, statement, scope)
    new = None if place is None else form.replaced(place)
    if place is None or new is None:
        return False
    source, taken = new
    made = ast.parse(source).body
    for one in made:
        for node in ast.walk(one):
            ast.copy_location(node, statement)
    end = len(place.before) + 1
    place.block[end - 1 - taken : end] = made
    return True


def _compiled(tree: ast.Module, definition: ast.FunctionDef, function: Any, form: Form) -> Callable[..., Any]:
    """Return the function of a changed definition, in the module of the original one and with its defaults."""
    _strip(definition)
    scope, names = function.__globals__, dict[str, Any]()
    scope.setdefault(form.call, form.run)
    code = function.__code__
    tree = ast.increment_lineno(ast.fix_missing_locations(tree), code.co_firstlineno - 1)
    exec(compile(tree, code.co_filename, "exec"), scope, names)
    made: Any = names[function.__name__]
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    functools.update_wrapper(made, function)
    setattr(made, _MADE, True)
    return made


def _not_alone(definition: ast.FunctionDef, function: Any) -> str | None:
    """Return why a definition means something else outside of its class, or None."""
    if function.__closure__:
        return "uses super() or variables of an enclosing function"
    if not {ast.unparse(one) for one in definition.decorator_list} <= {"staticmethod", "classmethod"}:
        return "has a decorator"
    names = names_in(definition) | {node.attr for node in ast.walk(definition) if isinstance(node, ast.Attribute)}
    if any(name.startswith("__") and not name.endswith("__") for name in names):
        return "uses private names of its class"
    if any(isinstance(node, ast.Global) for node in ast.walk(definition)):
        return "assigns global variables"
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

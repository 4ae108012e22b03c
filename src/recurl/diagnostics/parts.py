"""Discovery of the modules inside a policy, which may be any callable."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from recurl.core.keys import NestedKey, normalize_key

_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_DEPTH = 3  # maximum nesting of wrapped functions and objects


def submodules(policy: object) -> dict[str, nn.Module]:
    """Return the unique modules inside ``policy``, including itself, by name.

    Also finds modules referenced by functions, arguments of partials, and attributes of other objects.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 1))
        >>> list(submodules(net)), list(submodules(lambda tensordict: net.forward(tensordict)))
        (['', '0'], ['net', 'net.0'])
    """
    found: dict[nn.Module, str] = {}
    for name, module in _inside("", policy, _DEPTH):
        found.setdefault(module, name)
    return {name: module for module, name in found.items()}


def _inside(name: str, holder: object, depth: int) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(holder, nn.Module):
        for inner, module in holder.named_modules(prefix=name):
            yield inner, module
            for key, value in list(vars(module).items()):
                if isinstance(value, _FUNCTIONS):
                    yield from _inside(f"{inner}.{key}".lstrip("."), value, depth)
    elif depth and callable(holder) and not isinstance(holder, type):
        for inner, value in _references(holder).items():
            yield from _inside(f"{name}.{inner}".lstrip("."), value, depth - 1)


def _references(holder: Any) -> dict[str, Any]:
    if isinstance(holder, functools.partial):
        arguments = {f"argument {position}": value for position, value in enumerate(holder.args)}
        return {"function": holder.func, **arguments, **holder.keywords}
    if isinstance(holder, types.MethodType):
        return {holder.__name__: holder.__self__}
    if isinstance(holder, types.FunctionType):
        try:
            variables = inspect.getclosurevars(holder)
        except ValueError:  # a closure variable without a value
            return {}
        defaults = {f"default {position}": value for position, value in enumerate(holder.__defaults__ or ())}
        return {**variables.globals, **variables.nonlocals, **defaults, **(holder.__kwdefaults__ or {})}
    return dict(getattr(holder, "__dict__", {}))


def leaf_modules(policy: object) -> dict[str, nn.Module]:
    """Return the TensorDict modules inside ``policy`` that don't contain other TensorDict modules, by name."""
    modules = {name: module for name, module in submodules(policy).items() if _has_keys(module)}
    return {
        name: module
        for name, module in modules.items()
        if not any(part is not module and _has_keys(part) for part in module.modules())
    }


def _has_keys(module: object) -> bool:
    return hasattr(module, "in_keys") and hasattr(module, "out_keys")


def keys_of(module: object, name: str) -> list[NestedKey]:
    """Return ``module.in_keys`` or ``module.out_keys``, or an empty list if there is no such attribute."""
    return [normalize_key(key) for key in getattr(module, name, ())]

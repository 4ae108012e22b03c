"""Alias and mutation analysis of the tensors of a traced graph."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from recurl.core.torch_compat import OPERATIONS, schema_of

__all__ = ["argument_of", "base_of", "touched"]

aten: Any = torch.ops.aten
_Node = Any  # torch.fx does not type the arguments of its nodes
_SHARING = (
    operator.getitem,
    OPERATIONS.unsafe_view,
)  # views, which their schemas don't say


def argument_of(node: _Node, name: str) -> Any:
    """Return an argument of an operation, or its default."""
    for position, argument in enumerate(schema_of(node.target).arguments):
        if argument.name == name:
            given = node.args[position] if position < len(node.args) else argument.default_value
            return node.kwargs.get(name, given)
    raise KeyError(name)


def touched(node: _Node) -> list[_Node]:
    """Return the tensors that a node changes in place, or whose storage it reads directly (``as_strided``)."""
    schema = schema_of(node.target)
    if schema is None:
        return []
    found = [value for value in schema.arguments if value.alias_info is not None and value.alias_info.is_write]
    if node.target is aten.as_strided.default:
        found = schema.arguments[:1]
    found_nodes: list[_Node] = []
    for value in found:
        fx.map_arg(argument_of(node, value.name), found_nodes.append)
    return found_nodes


def base_of(node: _Node) -> _Node:
    """Return the node that owns the memory of a node's tensor: the base of a chain of views."""
    while node.op == "call_function":
        schema = schema_of(node.target)
        if node.target in _SHARING:
            node = node.args[0]
        elif schema is not None and any(value.alias_info for value in schema.returns):
            node = argument_of(node, next(value.name for value in schema.arguments if value.alias_info))
        else:
            break
    return node

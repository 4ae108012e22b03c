"""Rules for operations on tensors split into columns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from recurl.core.torch_compat import OPERATIONS
from recurl.execution.columns.memory import argument_of

__all__ = ["RULES", "Columns", "largest"]

aten: Any = torch.ops.aten
_Node = Any  # torch.fx does not type the arguments of its nodes


class Columns(NamedTuple):
    """A tensor represented by its columns.

    Attributes:
        axis: the dimension that is not split.
        parts: the node of a vector for every index of the other dimensions, in the tensor's shape with 1 at ``axis``.
    """

    axis: int
    parts: np.ndarray[Any, Any]


class Rewriter(Protocol):
    """Interface of the graph under construction that rules use."""

    rows: int

    def of(self, node: Any) -> Columns | None:
        """Return the columns of a node visited before, or None."""
        ...

    def call(self, target: Any, *arguments: Any, **named: Any) -> Any:
        """Return the node of a call, reused if the same call was made before."""
        ...

    def whole(self, node: Any) -> Any:
        """Return a node as one tensor."""
        ...

    def each(self, columns: Columns, function: Callable[[Any], Any]) -> Columns:
        """Apply a function to each column."""
        ...

    def fold(self, operation: Any, parts: list[Any]) -> Any:
        """Combine the parts by a binary operation, from first to last."""
        ...

    def reduced(self, node: Any, dims: Any, keep: bool, function: Callable[[list[Any]], Any]) -> Columns | None:
        """Reduce the columns along ``dims`` by ``function``, which maps a list of columns to one."""
        ...


def _same(graph: Rewriter, node: _Node) -> Columns | None:
    return graph.of(node.args[0])


def _view(graph: Rewriter, node: _Node) -> Columns | None:
    columns, shape = graph.of(node.args[0]), list(node.meta["val"].shape)
    if columns is None:
        return None
    axis = shape.index(graph.rows)
    before = columns.parts.shape[: columns.axis]
    if prod(shape[:axis]) != prod(before):
        return None
    return Columns(axis, columns.parts.reshape([*shape[:axis], 1, *shape[axis + 1 :]]))


def _permuted(graph: Rewriter, node: _Node) -> Columns | None:
    columns = graph.of(node.args[0])
    if columns is None:
        return None
    ndim = columns.parts.ndim
    if node.target is aten.permute.default:
        order = [at % ndim for at in node.args[1]]
    else:
        order = [*range(ndim)]
        first, second = (0, -1) if node.target is aten.t.default else node.args[1:3]
        order[first], order[second] = order[second], order[first]
    return Columns(order.index(columns.axis), columns.parts.transpose(order))


def _unsqueezed(graph: Rewriter, node: _Node) -> Columns | None:
    columns = graph.of(node.args[0])
    if columns is None:
        return None
    at = node.args[1] % (columns.parts.ndim + 1)
    return Columns(columns.axis + (at <= columns.axis), np.expand_dims(columns.parts, at))


def _squeezed(graph: Rewriter, node: _Node) -> Columns | None:
    columns = graph.of(node.args[0])
    at = node.args[1] % columns.parts.ndim if columns is not None and isinstance(node.args[1], int) else None
    if columns is None or at is None or at == columns.axis:
        return None
    if columns.parts.shape[at] != 1:
        return columns
    return Columns(columns.axis - (at < columns.axis), columns.parts.squeeze(at))


def _expanded(graph: Rewriter, node: _Node) -> Columns | None:
    columns, shape = graph.of(node.args[0]), list(node.meta["val"].shape)
    if columns is None:
        return None
    axis = columns.axis + len(shape) - columns.parts.ndim
    if shape[axis] != graph.rows:
        return None
    return Columns(axis, np.broadcast_to(columns.parts, [*shape[:axis], 1, *shape[axis + 1 :]]))


def _sliced(graph: Rewriter, node: _Node) -> Columns | None:
    columns = graph.of(node.args[0])
    if columns is None:
        return None
    at = argument_of(node, "dim") % columns.parts.ndim
    if at == columns.axis:
        return columns if node.meta["val"].shape == node.args[0].meta["val"].shape else None
    which = slice(*(argument_of(node, name) for name in ("start", "end", "step")))
    return Columns(columns.axis, columns.parts[(slice(None),) * at + (which,)])


def _selected(graph: Rewriter, node: _Node) -> Columns | None:
    columns = graph.of(node.args[0])
    if columns is None:
        return None
    at = node.args[1] % columns.parts.ndim
    if at == columns.axis:
        return None
    return Columns(columns.axis - (at < columns.axis), columns.parts.take(node.args[2], at))


def _stacked(graph: Rewriter, node: _Node) -> Columns | None:
    value, several = node.meta["val"], []
    for argument in node.args[0]:
        columns = graph.of(argument)
        if columns is None:
            return None
        if argument.meta["val"].dtype != value.dtype:
            columns = graph.each(columns, lambda part: graph.call(OPERATIONS.to_copy, part, dtype=value.dtype))
        several.append(columns)
    axis = several[0].axis
    if any(columns.axis != axis for columns in several):
        return None
    at = argument_of(node, "dim") % value.ndim
    if node.target is aten.stack.default:
        return Columns(axis + (at <= axis), np.stack([columns.parts for columns in several], at))
    return None if at == axis else Columns(axis, np.concatenate([columns.parts for columns in several], at))


def _converted(graph: Rewriter, node: _Node) -> Columns | None:
    columns = graph.of(node.args[0])
    named = {name: value for name, value in node.kwargs.items() if name == "dtype"}
    if columns is None or node.meta["val"].device != node.args[0].meta["val"].device:
        return None
    return graph.each(columns, lambda part: graph.call(node.target, part, **named))


def _summed(graph: Rewriter, node: _Node) -> Columns | None:
    dtype = node.meta["val"].dtype

    def add(parts: list[Any]) -> Any:
        if node.args[0].meta["val"].dtype != dtype:
            parts = [graph.call(OPERATIONS.to_copy, part, dtype=dtype) for part in parts]
        return graph.fold(aten.add.Tensor, parts)

    return graph.reduced(node, argument_of(node, "dim"), bool(argument_of(node, "keepdim")), add)


def _all(graph: Rewriter, node: _Node) -> Columns | None:
    if node.args[0].meta["val"].dtype != torch.bool:
        return None
    both = aten.bitwise_and.Tensor if node.target is aten.all.dim else aten.bitwise_or.Tensor

    return graph.reduced(node, node.args[1], bool(argument_of(node, "keepdim")), partial(graph.fold, both))


def _softmax(graph: Rewriter, node: _Node) -> Columns | None:
    columns = graph.of(node.args[0])
    if columns is None or node.meta["val"].dtype != node.args[0].meta["val"].dtype:
        return None
    at = node.args[1] % columns.parts.ndim
    if at == columns.axis:
        return None
    result = np.empty(columns.parts.shape, dtype=object)
    for index in np.ndindex(*[1 if dim == at else size for dim, size in enumerate(result.shape)]):
        line = (*index[:at], slice(None), *index[at + 1 :])
        parts = [*columns.parts[line]]
        most = graph.fold(aten.maximum.default, parts)
        less = [graph.call(aten.sub.Tensor, part, most) for part in parts]
        powers = [graph.call(aten.exp.default, part) for part in less]
        total = graph.fold(aten.add.Tensor, powers)
        if node.target is OPERATIONS.softmax:
            result[line] = [graph.call(aten.div.Tensor, part, total) for part in powers]
        else:
            log = graph.call(aten.log.default, total)
            result[line] = [graph.call(aten.sub.Tensor, part, log) for part in less]
    return Columns(columns.axis, result)


def _gathered(graph: Rewriter, node: _Node) -> Columns | None:
    columns, index = graph.of(node.args[0]), graph.of(node.args[2])
    at = node.args[1] % columns.parts.ndim if columns is not None else 0
    if columns is None or index is None or not columns.axis == index.axis != at:
        return None
    result = np.empty(index.parts.shape, dtype=object)
    for where in np.ndindex(*result.shape):
        parts = [*columns.parts[(*where[:at], slice(None), *where[at + 1 :])]]
        chosen = parts[0]
        for number, part in enumerate(parts[1:], 1):
            here = graph.call(aten.eq.Scalar, index.parts[where], number)
            chosen = graph.call(aten.where.self, here, part, chosen)
        result[where] = chosen
    return Columns(columns.axis, result)


def _looked_up(graph: Rewriter, node: _Node) -> Columns | None:
    table, indices = node.args[:2]
    if table.meta["val"].ndim != 1 or len(indices) != 1 or table.meta["val"].shape[0] == graph.rows:
        return None
    index = graph.of(indices[0])
    if index is None or indices[0].meta["val"].dtype == torch.bool:
        return None
    whole = graph.whole(table)
    return graph.each(index, lambda part: graph.call(aten.index.Tensor, whole, [part]))


def largest(graph: Rewriter, node: _Node) -> list[Columns] | None:
    """Split ``max`` along a dimension into values and indices; the first of equal values, or of NaN, is taken."""
    source = graph.of(node.args[0])
    if source is None:
        return None
    floating = node.args[0].meta["val"].dtype.is_floating_point
    first: dict[Any, Any] = {}

    def greatest(parts: list[Any]) -> Any:
        best, where = parts[0], graph.call(aten.zeros_like.default, parts[0], dtype=torch.int64)
        for number, part in enumerate(parts[1:], 1):
            better = graph.call(aten.gt.Tensor, part, best)
            if floating:
                nan = graph.call(aten.bitwise_not.default, graph.call(aten.eq.Tensor, part, part))
                better = graph.call(
                    aten.bitwise_and.Tensor,
                    graph.call(aten.bitwise_or.Tensor, better, nan),
                    graph.call(aten.eq.Tensor, best, best),
                )
            here = graph.call(aten.full_like.default, where, number)
            best = graph.call(aten.where.self, better, part, best)
            where = graph.call(aten.where.self, better, here, where)
        first[best] = where
        return best

    numbers = graph.reduced(node, node.args[1], bool(argument_of(node, "keepdim")), greatest)
    return None if numbers is None else [numbers, graph.each(numbers, first.__getitem__)]


_Rule = Callable[[Rewriter, _Node], Columns | None]


def _rules() -> dict[Any, _Rule]:
    kinds: list[tuple[_Rule, tuple[Any, ...]]] = [
        (_same, (aten.clone.default, aten.detach.default, aten.alias.default)),
        (_view, (aten.view.default, OPERATIONS.unsafe_view, aten.reshape.default)),
        (_permuted, (aten.permute.default, aten.t.default, aten.transpose.int)),
        (_unsqueezed, (aten.unsqueeze.default,)),
        (_squeezed, (aten.squeeze.dim,)),
        (_expanded, (aten.expand.default,)),
        (_sliced, (aten.slice.Tensor,)),
        (_selected, (aten.select.int,)),
        (_stacked, (aten.stack.default, aten.cat.default)),
        (_converted, (OPERATIONS.to_copy,)),
        (_summed, (aten.sum.dim_IntList,)),
        (_all, (aten.all.dim, aten.any.dim)),
        (_softmax, (OPERATIONS.softmax, OPERATIONS.log_softmax)),
        (_gathered, (aten.gather.default,)),
        (_looked_up, (aten.index.Tensor,)),
    ]
    return {operation: rule for rule, operations in kinds for operation in operations}


RULES = _rules()

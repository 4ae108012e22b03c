"""Graphs whose narrow tensors are computed column by column, so that a compiler joins them in one kernel."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial, reduce
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, fx

from recurl._torch import schema_of

__all__ = ["by_columns"]

WIDEST = 8
"""Columns of the widest tensor that is taken apart."""

aten: Any = torch.ops.aten
_Node = Any  # of torch.fx, whose arguments have no types
_PARTS = (aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default)
_SHARING = (operator.getitem, aten._unsafe_view.default)  # memory of their first argument, which no schema says


class Columns(NamedTuple):
    """A tensor as its columns.

    Attributes:
        axis: the dimension whose entries stay together.
        parts: for every other index a node of a vector; the shape of the tensor with 1 at ``axis``.
    """

    axis: int
    parts: np.ndarray[Any, Any]


def by_columns(graph: Any, rows: int) -> fx.GraphModule:
    """Return a graph that computes the same with vectors of ``rows`` numbers in place of narrow tensors.

    Environments and what acts in them compute with tensors ``[B, 4]``, ``[4, B]``, ``[B, 1]``, ``[B]``: for a compiler
    they have different sizes, each is a kernel of its own, and every kernel costs a launch. Columns all have one size.

    What a tensor means isn't asked: where one dimension has ``rows`` entries and the others at most 8 together,
    elementwise operations, views, sums, softmax and gathers of the others are done column by column. Everything else,
    and all that is changed in place, is computed as before. Sums of columns are added from first to last.

    Args:
        graph: of ATen's operations on tensors, traced, with the ``"val"`` of each in ``node.meta``.
        rows: size of the dimension that stays together.

    Returns:
        A new graph of the same arguments, and results of the same shapes and dtypes. What was a view of an argument may
        be a tensor of its own; what wasn't is none. Results without gaps in memory have the same strides.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> graph = make_fx(lambda x: (x * 2).sum(1), tracing_mode="fake")(torch.ones(100, 2))
        >>> [node.name for node in by_columns(graph, 100).graph.nodes if node.op == "call_function"]
        ['select_int', 'select_int_1', 'mul_tensor', 'mul_tensor_1', 'add_tensor']
        >>> by_columns(graph, 100)(torch.ones(100, 2)).shape
        torch.Size([100])
    """
    return _Rewriting(graph, rows).run()


class _Rewriting:
    def __init__(self, graph: Any, rows: int) -> None:
        self._old, self._rows = graph, rows
        self._new = fx.Graph()
        self._plain: dict[_Node, Any] = {}
        self._split: dict[_Node, Columns] = {}
        self._several: dict[_Node, list[Columns]] = {}
        self._made: dict[Any, _Node] = {}
        self._changed = {_source(found) for node in graph.graph.nodes for found in _touched(node)}

    def run(self) -> fx.GraphModule:
        for node in self._old.graph.nodes:
            if node.op == "call_function" and _source(node) not in self._changed:
                found = self._columns(node)
                if found is not None:
                    self._split[node] = found
                    continue
                if node in self._several:
                    continue
            if node.op == "output":
                self._new.output(fx.map_arg(node.args[0], self._whole))
            else:
                self._plain[node] = self._new.node_copy(node, self._whole)
                if _touched(node):
                    self._made.clear()  # what was computed before isn't what is computed after
        return fx.GraphModule(self._old, self._new)

    def _columns(self, node: _Node) -> Columns | None:
        """Return the columns of a node, computed from columns; None where that isn't known to be the same."""
        target = node.target
        if target in _PARTS:
            self._take_apart(node)
        elif target is aten.max.dim:
            self._largest(node)
        elif target is operator.getitem and node.args[0] in self._several:
            return self._several[node.args[0]][node.args[1]]
        elif self._axis(node.meta.get("val")) is not None:
            rule = _RULES.get(target)
            if rule is not None:
                return rule(self, node)
            tags = () if schema_of(target) is None else target.tags
            if torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags:
                return self._elementwise(node)
        return None

    def _axis(self, value: Any) -> int | None:
        """Return the dimension that stays together, of a tensor that may be taken apart."""
        if not isinstance(value, Tensor) or list(value.shape).count(self._rows) != 1:
            return None
        return list(value.shape).index(self._rows) if 0 < value.numel() <= WIDEST * self._rows else None

    def of(self, node: Any) -> Columns | None:
        """Return the columns of a node that was seen before."""
        if not isinstance(node, fx.Node):
            return None
        if node in self._split:
            return self._split[node]
        axis = self._axis(node.meta.get("val"))
        if axis is None or node not in self._plain:
            return None
        columns = Columns(axis, self._pieces(self._plain[node], node.meta["val"], axis))
        if _source(node) in self._changed:  # what is made of them may be read after the change
            return self._each(columns, lambda part: self.call(aten.clone.default, part))
        self._split[node] = columns
        return columns

    def _pieces(self, whole: _Node, value: Tensor, axis: int) -> np.ndarray[Any, Any]:
        shape = [1 if at == axis else size for at, size in enumerate(value.shape)]
        parts = np.empty(shape, dtype=object)
        for index in np.ndindex(*shape):
            part = whole
            for at in reversed(range(value.ndim)):
                if at != axis:
                    part = self.call(aten.select.int, part, at, index[at])
            parts[index] = part
        return parts

    def call(self, target: Any, *arguments: Any, **named: Any) -> _Node:
        """Return the node of a call; the same one for the same call."""
        key = (target, repr(arguments), repr(sorted(named.items())))
        if key not in self._made:
            self._made[key] = self._new.call_function(target, arguments, named)
        return self._made[key]

    def _whole(self, node: _Node) -> Any:
        """Return a node as one tensor."""
        if node not in self._plain:
            self._plain[node] = self._joined(node)
        return self._plain[node]

    def _joined(self, node: _Node) -> _Node:
        """Return a node's columns as a tensor, in memory as the traced tensor was."""
        value, (axis, parts) = node.meta["val"], self._split[node]
        order = sorted(range(value.ndim), key=lambda at: -value.stride(at))
        shape = [value.shape[at] for at in order]
        physical = list(parts.transpose(order).reshape(-1))
        before = prod(shape[: order.index(axis)])
        if len(physical) == 1:
            joined = physical[0]
            source = _source(joined)
            shares = source is not joined or source.op != "call_function"
            if shares and source is not self._plain.get(_source(node)):
                joined = self.call(aten.clone.default, joined)
        elif before == 1:
            joined = self.call(aten.stack.default, physical, 1)
        else:
            joined = self.call(aten.stack.default, physical)
            if before < len(physical):
                joined = self.call(aten.view.default, joined, [before, len(physical) // before, self._rows])
                joined = self.call(aten.permute.default, joined, [0, 2, 1])
                joined = self.call(aten.clone.default, joined, memory_format=torch.contiguous_format)
        if shape != [self._rows]:
            joined = self.call(aten.view.default, joined, shape)
        back = [order.index(at) for at in range(value.ndim)]
        return joined if back == sorted(back) else self.call(aten.permute.default, joined, back)

    # Rules: each returns the columns of a node, or None.

    def _elementwise(self, node: _Node) -> Columns | None:
        value = node.meta["val"]
        axis = value.shape.index(self._rows)
        shape = [1 if at == axis else size for at, size in enumerate(value.shape)]
        entering: dict[_Node, np.ndarray[Any, Any]] = {}
        for argument in node.all_input_nodes:
            parts = self._aligned(argument, value.ndim, axis)
            if parts is None:
                return None
            entering[argument] = np.broadcast_to(parts, shape)
        if not entering:
            return None
        result = np.empty(shape, dtype=object)
        for index in np.ndindex(*shape):
            arguments, named = fx.map_arg(
                (node.args, node.kwargs), lambda argument, at=index: cast(Any, entering[argument][at])
            )
            result[index] = self.call(node.target, *arguments, **named)
        return Columns(axis, result)

    def _aligned(self, node: _Node, ndim: int, axis: int) -> np.ndarray[Any, Any] | None:
        """Return what enters an elementwise operation for each column of its result, with as many dimensions."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return None
        at = axis - (ndim - value.ndim)
        if value.ndim == 0:
            parts = np.empty([], dtype=object)
            parts[()] = self._whole(node)
        elif at >= 0 and value.shape[at] == self._rows:
            columns = self.of(node)
            if columns is None or columns.axis != at:
                return None
            parts = columns.parts
        elif 0 < value.numel() <= WIDEST and _source(node) not in self._changed:
            parts = np.empty(value.shape, dtype=object)
            for index in np.ndindex(*value.shape):  # vectors of one number: the others follow their dtype
                part = self._whole(node)
                for dim in reversed(range(1, value.ndim)):
                    part = self.call(aten.select.int, part, dim, index[dim])
                parts[index] = self.call(aten.slice.Tensor, part, 0, index[0], index[0] + 1)
        else:
            return None
        return parts.reshape([1] * (ndim - value.ndim) + list(parts.shape))

    def _take_apart(self, node: _Node) -> None:
        columns = self.of(node.args[0])
        if columns is None or any(self._axis(value) is None for value in node.meta["val"]):
            return
        ndim = columns.parts.ndim
        which = _argument(node, "dim") % ndim
        if which == columns.axis:
            return
        if node.target is aten.unbind.int:
            axis = columns.axis - (which < columns.axis)
            taken = [columns.parts.take(at, which) for at in range(columns.parts.shape[which])]
        else:
            axis = columns.axis
            sizes = [value.shape[which] for value in node.meta["val"]]
            taken = np.split(columns.parts, np.cumsum(sizes)[:-1], which)
        self._several[node] = [Columns(axis, part) for part in taken]

    def same(self, node: _Node) -> Columns | None:
        return self.of(node.args[0])

    def view(self, node: _Node) -> Columns | None:
        columns, shape = self.of(node.args[0]), list(node.meta["val"].shape)
        if columns is None:
            return None
        axis = shape.index(self._rows)
        before = columns.parts.shape[: columns.axis]
        if prod(shape[:axis]) != prod(before):
            return None
        return Columns(axis, columns.parts.reshape([*shape[:axis], 1, *shape[axis + 1 :]]))

    def permuted(self, node: _Node) -> Columns | None:
        columns = self.of(node.args[0])
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

    def unsqueezed(self, node: _Node) -> Columns | None:
        columns = self.of(node.args[0])
        if columns is None:
            return None
        at = node.args[1] % (columns.parts.ndim + 1)
        return Columns(columns.axis + (at <= columns.axis), np.expand_dims(columns.parts, at))

    def squeezed(self, node: _Node) -> Columns | None:
        columns = self.of(node.args[0])
        at = node.args[1] % columns.parts.ndim if columns is not None and isinstance(node.args[1], int) else None
        if columns is None or at is None or at == columns.axis:
            return None
        if columns.parts.shape[at] != 1:
            return columns
        return Columns(columns.axis - (at < columns.axis), columns.parts.squeeze(at))

    def expanded(self, node: _Node) -> Columns | None:
        columns, shape = self.of(node.args[0]), list(node.meta["val"].shape)
        if columns is None:
            return None
        axis = columns.axis + len(shape) - columns.parts.ndim
        if shape[axis] != self._rows:
            return None
        return Columns(axis, np.broadcast_to(columns.parts, [*shape[:axis], 1, *shape[axis + 1 :]]))

    def sliced(self, node: _Node) -> Columns | None:
        columns = self.of(node.args[0])
        if columns is None:
            return None
        at = _argument(node, "dim") % columns.parts.ndim
        if at == columns.axis:
            return columns if node.meta["val"].shape == node.args[0].meta["val"].shape else None
        which = slice(*(_argument(node, name) for name in ("start", "end", "step")))
        return Columns(columns.axis, columns.parts[(slice(None),) * at + (which,)])

    def selected(self, node: _Node) -> Columns | None:
        columns = self.of(node.args[0])
        if columns is None:
            return None
        at = node.args[1] % columns.parts.ndim
        if at == columns.axis:
            return None
        return Columns(columns.axis - (at < columns.axis), columns.parts.take(node.args[2], at))

    def stacked(self, node: _Node) -> Columns | None:
        value, several = node.meta["val"], []
        for argument in node.args[0]:
            columns = self.of(argument)
            if columns is None:
                return None
            if argument.meta["val"].dtype != value.dtype:
                columns = self._each(columns, lambda part: self.call(aten._to_copy.default, part, dtype=value.dtype))
            several.append(columns)
        axis = several[0].axis
        if any(columns.axis != axis for columns in several):
            return None
        at = _argument(node, "dim") % value.ndim
        if node.target is aten.stack.default:
            return Columns(axis + (at <= axis), np.stack([columns.parts for columns in several], at))
        return None if at == axis else Columns(axis, np.concatenate([columns.parts for columns in several], at))

    def converted(self, node: _Node) -> Columns | None:
        columns = self.of(node.args[0])
        named = {name: value for name, value in node.kwargs.items() if name == "dtype"}
        if columns is None or node.meta["val"].device != node.args[0].meta["val"].device:
            return None
        return self._each(columns, lambda part: self.call(node.target, part, **named))

    def _each(self, columns: Columns, function: Callable[[Any], Any]) -> Columns:
        result = np.empty(columns.parts.shape, dtype=object)
        for index in np.ndindex(*result.shape):
            result[index] = function(columns.parts[index])
        return Columns(columns.axis, result)

    def _fold(self, operation: Any, parts: list[Any]) -> Any:
        return reduce(partial(self.call, operation), parts)

    def _reduced(self, node: _Node, dims: Any, keep: bool, function: Callable[[list[Any]], Any]) -> Columns | None:
        """Return the columns of what ``function`` makes of the columns along ``dims``."""
        columns = self.of(node.args[0])
        if columns is None or dims is None:
            return None
        ndim = columns.parts.ndim
        along = sorted({at % ndim for at in ([dims] if isinstance(dims, int) else dims)})
        if not along or columns.axis in along:
            return None
        others = [at for at in range(ndim) if at not in along]
        moved = columns.parts.transpose([*others, *along]).reshape([columns.parts.shape[at] for at in others] + [-1])
        result = np.empty(moved.shape[:-1], dtype=object)
        for index in np.ndindex(*result.shape):
            result[index] = function([*moved[index]])
        if keep:
            return Columns(columns.axis, np.expand_dims(result, along))
        return Columns(others.index(columns.axis), result)

    def summed(self, node: _Node) -> Columns | None:
        dtype = node.meta["val"].dtype

        def add(parts: list[Any]) -> Any:
            if node.args[0].meta["val"].dtype != dtype:
                parts = [self.call(aten._to_copy.default, part, dtype=dtype) for part in parts]
            return self._fold(aten.add.Tensor, parts)

        return self._reduced(node, _argument(node, "dim"), bool(_argument(node, "keepdim")), add)

    def all(self, node: _Node) -> Columns | None:
        if node.args[0].meta["val"].dtype != torch.bool:
            return None
        both = aten.bitwise_and.Tensor if node.target is aten.all.dim else aten.bitwise_or.Tensor

        return self._reduced(node, node.args[1], bool(_argument(node, "keepdim")), partial(self._fold, both))

    def softmax(self, node: _Node) -> Columns | None:
        columns = self.of(node.args[0])
        if columns is None or node.meta["val"].dtype != node.args[0].meta["val"].dtype:
            return None
        at = node.args[1] % columns.parts.ndim
        if at == columns.axis:
            return None
        result = np.empty(columns.parts.shape, dtype=object)
        for index in np.ndindex(*[1 if dim == at else size for dim, size in enumerate(result.shape)]):
            line = (*index[:at], slice(None), *index[at + 1 :])
            parts = [*columns.parts[line]]
            most = self._fold(aten.maximum.default, parts)
            less = [self.call(aten.sub.Tensor, part, most) for part in parts]
            powers = [self.call(aten.exp.default, part) for part in less]
            total = self._fold(aten.add.Tensor, powers)
            if node.target is aten._softmax.default:
                result[line] = [self.call(aten.div.Tensor, part, total) for part in powers]
            else:
                log = self.call(aten.log.default, total)
                result[line] = [self.call(aten.sub.Tensor, part, log) for part in less]
        return Columns(columns.axis, result)

    def gathered(self, node: _Node) -> Columns | None:
        columns, index = self.of(node.args[0]), self.of(node.args[2])
        at = node.args[1] % columns.parts.ndim if columns is not None else 0
        if columns is None or index is None or not columns.axis == index.axis != at:
            return None
        result = np.empty(index.parts.shape, dtype=object)
        for where in np.ndindex(*result.shape):
            parts = [*columns.parts[(*where[:at], slice(None), *where[at + 1 :])]]
            chosen = parts[0]
            for number, part in enumerate(parts[1:], 1):
                here = self.call(aten.eq.Scalar, index.parts[where], number)
                chosen = self.call(aten.where.self, here, part, chosen)
            result[where] = chosen
        return Columns(columns.axis, result)

    def looked_up(self, node: _Node) -> Columns | None:
        table, indices = node.args[:2]
        if table.meta["val"].ndim != 1 or len(indices) != 1 or table.meta["val"].shape[0] == self._rows:
            return None
        index = self.of(indices[0])
        if index is None or indices[0].meta["val"].dtype == torch.bool:
            return None
        whole = self._whole(table)
        return self._each(index, lambda part: self.call(aten.index.Tensor, whole, [part]))

    def _largest(self, node: _Node) -> None:
        """Take ``max`` along a dimension apart, into numbers and indices; the first of equals, and of NaN, counts."""
        source = self.of(node.args[0])
        if source is None:
            return
        floating = node.args[0].meta["val"].dtype.is_floating_point
        first: dict[Any, Any] = {}

        def largest(parts: list[Any]) -> Any:
            best, where = parts[0], self.call(aten.zeros_like.default, parts[0], dtype=torch.int64)
            for number, part in enumerate(parts[1:], 1):
                better = self.call(aten.gt.Tensor, part, best)
                if floating:
                    nan = self.call(aten.bitwise_not.default, self.call(aten.eq.Tensor, part, part))
                    better = self.call(
                        aten.bitwise_and.Tensor,
                        self.call(aten.bitwise_or.Tensor, better, nan),
                        self.call(aten.eq.Tensor, best, best),
                    )
                here = self.call(aten.full_like.default, where, number)
                best = self.call(aten.where.self, better, part, best)
                where = self.call(aten.where.self, better, here, where)
            first[best] = where
            return best

        numbers = self._reduced(node, node.args[1], bool(_argument(node, "keepdim")), largest)
        if numbers is not None:
            self._several[node] = [numbers, self._each(numbers, first.__getitem__)]


def _argument(node: _Node, name: str) -> Any:
    """Return an argument of an operation, or its default."""
    for position, argument in enumerate(schema_of(node.target).arguments):
        if argument.name == name:
            given = node.args[position] if position < len(node.args) else argument.default_value
            return node.kwargs.get(name, given)
    raise KeyError(name)


def _touched(node: _Node) -> list[_Node]:
    """Return the tensors that a node changes in place, or whose memory it reads as it lies there."""
    schema = schema_of(node.target)
    if schema is None:
        return []
    found = [value for value in schema.arguments if value.alias_info is not None and value.alias_info.is_write]
    if node.target is aten.as_strided.default:
        found = schema.arguments[:1]
    touched: list[_Node] = []
    for value in found:
        fx.map_arg(_argument(node, value.name), touched.append)
    return touched


def _source(node: _Node) -> _Node:
    """Return the node whose memory a node's tensor is part of."""
    while node.op == "call_function":
        schema = schema_of(node.target)
        if node.target in _SHARING:
            node = node.args[0]
        elif schema is not None and any(value.alias_info for value in schema.returns):
            node = _argument(node, next(value.name for value in schema.arguments if value.alias_info))
        else:
            break
    return node


_Rule = Callable[[_Rewriting, _Node], Columns | None]


def _rules() -> dict[Any, _Rule]:
    kinds: list[tuple[_Rule, tuple[Any, ...]]] = [
        (_Rewriting.same, (aten.clone.default, aten.detach.default, aten.alias.default)),
        (_Rewriting.view, (aten.view.default, aten._unsafe_view.default, aten.reshape.default)),
        (_Rewriting.permuted, (aten.permute.default, aten.t.default, aten.transpose.int)),
        (_Rewriting.unsqueezed, (aten.unsqueeze.default,)),
        (_Rewriting.squeezed, (aten.squeeze.dim,)),
        (_Rewriting.expanded, (aten.expand.default,)),
        (_Rewriting.sliced, (aten.slice.Tensor,)),
        (_Rewriting.selected, (aten.select.int,)),
        (_Rewriting.stacked, (aten.stack.default, aten.cat.default)),
        (_Rewriting.converted, (aten._to_copy.default,)),
        (_Rewriting.summed, (aten.sum.dim_IntList,)),
        (_Rewriting.all, (aten.all.dim, aten.any.dim)),
        (_Rewriting.softmax, (aten._softmax.default, aten._log_softmax.default)),
        (_Rewriting.gathered, (aten.gather.default,)),
        (_Rewriting.looked_up, (aten.index.Tensor,)),
    ]
    return {operation: rule for rule, operations in kinds for operation in operations}


_RULES = _rules()

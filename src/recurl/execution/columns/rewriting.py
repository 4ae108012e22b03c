"""Rewriting of graphs to compute narrow tensors column by column, so that a compiler fuses the operations."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce
from math import prod
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, fx

from recurl.core.torch_compat import schema_of
from recurl.execution.columns.memory import argument_of, base_of, touched
from recurl.execution.columns.narrow import ColumnLayout
from recurl.execution.columns.rules import RULES, Columns, largest

__all__ = ["scalarize_columns", "scalarize_loop"]

MAX_COLUMNS = 8
"""Columns of the widest tensor that is split."""

aten: Any = torch.ops.aten
_Node = Any  # torch.fx does not type the arguments of its nodes
_PARTS = (aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default)


def scalarize_columns(graph: Any, rows: int) -> fx.GraphModule:
    """Return an equivalent graph that computes with vectors of ``rows`` numbers instead of narrow tensors.

    Environments and policies compute with tensors ``[B, 4]``, ``[4, B]``, ``[B, 1]`` and ``[B]``. These have different
    sizes for a compiler, which makes a separate kernel for each, and every kernel costs a launch. Columns all have the
    same size.

    The rewriting looks at shapes only. Where one dimension has ``rows`` entries and the others at most 8 together,
    elementwise operations, views, and sums, softmax and gathers over the other dimensions are computed column by
    column. Everything else, and every tensor that is changed in place, is computed as before. Sums of columns are added
    from first to last.

    Args:
        graph: traced graph of ATen operations on tensors, with their values as ``"val"`` in ``node.meta``.
        rows: size of the dimension that is not split.

    Returns:
        A new graph with the same arguments and with results of the same shapes and dtypes. A result that was a view of
        an argument may be a separate tensor; no other result becomes a view. Results that are contiguous in memory keep
        their strides.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> graph = make_fx(lambda x: (x * 2).sum(1), tracing_mode="fake")(torch.ones(100, 2))
        >>> [node.name for node in scalarize_columns(graph, 100).graph.nodes if node.op == "call_function"]
        ['select_int', 'select_int_1', 'mul_tensor', 'mul_tensor_1', 'add_tensor']
        >>> scalarize_columns(graph, 100)(torch.ones(100, 2)).shape
        torch.Size([100])
    """
    return _Rewriter(graph, rows).run()


def scalarize_loop(
    graph: Any, rows: int, count: int
) -> tuple[fx.GraphModule, list[ColumnLayout | None], list[ColumnLayout | None]]:
    """Rewrite the graph of a repeated step by columns, where narrow tensors remain split between the steps.

    Args:
        graph: a graph as for :func:`scalarize_columns`. Its last ``count`` results are the first arguments of the next
            step.
        rows: size of the dimension that is not split.
        count: number of carried arguments.

    Returns:
        The graph, which takes and returns the vectors of each split tensor instead of the tensor; the
        :class:`ColumnLayout` of each carried argument, and of each result. It is None where a tensor stays whole.
    """
    given = [node for node in graph.graph.nodes if node.op == "placeholder"][:count]
    whole: set[_Node] = set()
    while True:
        rewriting = _Rewriter(graph, rows, [node for node in given if node not in whole], count)
        made = rewriting.run()
        if rewriting.needed <= whole:
            return made, [rewriting.entering.get(node) for node in given], rewriting.leaving
        whole |= rewriting.needed


class _Rewriter:
    """Builder of the rewritten graph.

    Args:
        graph: the graph to rewrite.
        rows: size of the dimension that is not split.
        split_arguments: arguments that are passed as vectors if they are narrow; narrow results are then returned as
            vectors too.
        count: number of results that are carried to such arguments and have the same layout; None if none is carried.

    Attributes:
        entering: layouts of the arguments that are passed as vectors.
        leaving: layouts of the results, None for those that are whole.
        needed: arguments that should be passed whole.
    """

    def __init__(self, graph: Any, rows: int, split_arguments: Sequence[_Node] = (), count: int | None = None) -> None:
        self._old, self.rows = graph, rows
        self._new = fx.Graph()
        self._split_arguments, self._count = split_arguments, count
        self.entering: dict[_Node, ColumnLayout] = {}
        self.leaving: list[ColumnLayout | None] = []
        self.needed: set[_Node] = set()
        self._plain: dict[_Node, Any] = {}
        self._split: dict[_Node, Columns] = {}
        self._several: dict[_Node, list[Columns]] = {}
        self._made: dict[Any, _Node] = {}
        self._changed = {base_of(found) for node in graph.graph.nodes for found in touched(node)}

    def run(self) -> fx.GraphModule:
        given = [node for node in self._old.graph.nodes if node.op == "placeholder"]
        for node in given:
            self._enter(node)
        for node, narrow in self.entering.items():
            if narrow.width == 1:  # a view makes it whole
                vector = self._split[node].parts.item()
                self._plain[node] = self.call(aten.view.default, vector, list(node.meta["val"].shape))
        for node in [*self._old.graph.nodes][len(given) :]:
            if node.op == "call_function" and base_of(node) not in self._changed:
                found = self._columns(node)
                if found is not None:
                    self._split[node] = found
                    continue
                if node in self._several:
                    continue
            if node.op == "output":
                self._new.output(
                    fx.map_arg(node.args[0], self.whole) if self._count is None else self._split_results(node)
                )
            else:
                self._plain[node] = self._new.node_copy(node, self.whole)
                if touched(node):
                    self._made.clear()  # the same call may now give another value
        return fx.GraphModule(self._old, self._new)

    def _enter(self, node: _Node) -> None:
        """Add the placeholder of an argument, or those of its vectors."""
        value = node.meta["val"]
        axis = self._axis(value) if node in self._split_arguments and node not in self._changed else None
        if axis is None:
            self._plain[node] = self._new.node_copy(node)
            return
        parts = np.empty([1 if at == axis else size for at, size in enumerate(value.shape)], dtype=object)
        for number, index in enumerate(np.ndindex(*parts.shape)):
            vector = parts[index] = self._new.placeholder(f"{node.name}_{number}")
            vector.meta = {"val": value.new_empty(self.rows)}
        self._split[node] = Columns(axis, parts)
        self.entering[node] = ColumnLayout(torch.Size(parts.shape), axis)

    def _split_results(self, output: _Node) -> list[_Node]:
        """Return the results, those computed as vectors in split form, and record their layouts."""
        results, found = output.args[0], list[_Node]()
        given = [node for node in self._old.graph.nodes if node.op == "placeholder"][: self._count]
        first = len(results) - len(given)
        for number, node in enumerate(results):
            after = given[number - first] if number >= first else None
            columns = self._split.get(node)
            if columns is not None and any(_is_view(part) for part in columns.parts.flat):
                columns = None
            if after is not None and after not in self.entering:
                columns = None
            elif after is not None and columns is None:
                self.needed.add(after)
            self.leaving.append(
                None if columns is None else ColumnLayout(torch.Size(columns.parts.shape), columns.axis)
            )
            found += [self.whole(node)] if columns is None else columns.parts.flat
        return found

    def _columns(self, node: _Node) -> Columns | None:
        """Return the columns of a node, computed from columns; None if no rule guarantees the same result."""
        target = node.target
        if target in _PARTS:
            self._unbind(node)
        elif target is aten.max.dim:
            several = largest(self, node)
            if several is not None:
                self._several[node] = several
        elif target is operator.getitem and node.args[0] in self._several:
            return self._several[node.args[0]][node.args[1]]
        elif self._axis(node.meta.get("val")) is not None:
            rule = RULES.get(target)
            if rule is not None:
                return rule(self, node)
            tags = () if schema_of(target) is None else target.tags
            if torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags:
                return self._elementwise(node)
        return None

    def _axis(self, value: Any) -> int | None:
        """Return the dimension of the rows of a tensor that may be split, or None."""
        if not isinstance(value, Tensor) or list(value.shape).count(self.rows) != 1:
            return None
        return list(value.shape).index(self.rows) if 0 < value.numel() <= MAX_COLUMNS * self.rows else None

    def of(self, node: Any) -> Columns | None:
        """Return the columns of a node visited before, or None."""
        if not isinstance(node, fx.Node):
            return None
        if node in self._split:
            return self._split[node]
        axis = self._axis(node.meta.get("val"))
        if axis is None or node not in self._plain:
            return None
        columns = Columns(axis, self._pieces(self._plain[node], node.meta["val"], axis))
        if base_of(node) in self._changed:  # results computed from them may be read after the change
            return self.each(columns, lambda part: self.call(aten.clone.default, part))
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
        """Return the node of a call, reused if the same call was made before."""
        key = (target, repr(arguments), repr(sorted(named.items())))
        if key not in self._made:
            self._made[key] = self._new.call_function(target, arguments, named)
        return self._made[key]

    def whole(self, node: _Node) -> Any:
        """Return a node as one tensor."""
        if node not in self._plain:
            if node in self.entering:
                self.needed.add(node)
            self._plain[node] = self._joined(node)
        return self._plain[node]

    def _joined(self, node: _Node) -> _Node:
        """Return a node's columns joined to a tensor with the memory layout of the traced tensor."""
        value, (axis, parts) = node.meta["val"], self._split[node]
        order = sorted(range(value.ndim), key=lambda at: -value.stride(at))
        shape = [value.shape[at] for at in order]
        physical = list(parts.transpose(order).reshape(-1))
        before = prod(shape[: order.index(axis)])
        if len(physical) == 1:
            joined = physical[0]
            origin = base_of(joined)
            shares = origin is not joined or origin.op != "call_function"
            home = self._plain.get(base_of(node))
            if shares and (home is None or origin is not base_of(home)):
                joined = self.call(aten.clone.default, joined)
        elif before == 1:
            joined = self.call(aten.stack.default, physical, 1)
        else:
            joined = self.call(aten.stack.default, physical)
            if before < len(physical):
                joined = self.call(aten.view.default, joined, [before, len(physical) // before, self.rows])
                joined = self.call(aten.permute.default, joined, [0, 2, 1])
                joined = self.call(aten.clone.default, joined, memory_format=torch.contiguous_format)
        if shape != [self.rows]:
            joined = self.call(aten.view.default, joined, shape)
        back = [order.index(at) for at in range(value.ndim)]
        return joined if back == sorted(back) else self.call(aten.permute.default, joined, back)

    def _elementwise(self, node: _Node) -> Columns | None:
        value = node.meta["val"]
        axis = value.shape.index(self.rows)
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
        """Return the operands of an elementwise operation for each column of its result, with ``ndim`` dimensions."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return None
        at = axis - (ndim - value.ndim)
        if value.ndim == 0:
            parts = np.empty([], dtype=object)
            parts[()] = self.whole(node)
        elif at >= 0 and value.shape[at] == self.rows:
            columns = self.of(node)
            if columns is None or columns.axis != at:
                return None
            parts = columns.parts
        elif 0 < value.numel() <= MAX_COLUMNS and base_of(node) not in self._changed:
            parts = np.empty(value.shape, dtype=object)
            for index in np.ndindex(*value.shape):  # vectors of one number, which take part in type promotion
                part = self.whole(node)
                for dim in reversed(range(1, value.ndim)):
                    part = self.call(aten.select.int, part, dim, index[dim])
                parts[index] = self.call(aten.slice.Tensor, part, 0, index[0], index[0] + 1)
        else:
            return None
        return parts.reshape([1] * (ndim - value.ndim) + list(parts.shape))

    def _unbind(self, node: _Node) -> None:
        columns = self.of(node.args[0])
        if columns is None or any(self._axis(value) is None for value in node.meta["val"]):
            return
        ndim = columns.parts.ndim
        which = argument_of(node, "dim") % ndim
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

    def each(self, columns: Columns, function: Callable[[Any], Any]) -> Columns:
        result = np.empty(columns.parts.shape, dtype=object)
        for index in np.ndindex(*result.shape):
            result[index] = function(columns.parts[index])
        return Columns(columns.axis, result)

    def fold(self, operation: Any, parts: list[Any]) -> Any:
        return reduce(partial(self.call, operation), parts)

    def reduced(self, node: _Node, dims: Any, keep: bool, function: Callable[[list[Any]], Any]) -> Columns | None:
        """Reduce the columns along ``dims`` by ``function``, which maps a list of columns to one."""
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


def _is_view(part: _Node) -> bool:
    """Return whether a vector is a view of another tensor, possibly not contiguous."""
    return base_of(part) is not part

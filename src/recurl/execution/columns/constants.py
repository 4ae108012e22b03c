"""Constant results of a graph."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from recurl.execution.columns.memory import base_of, touched

__all__ = ["take_constants"]


def take_constants(graph: fx.GraphModule) -> dict[int, Tensor]:
    """Remove the results of a graph that depend on no argument.

    Args:
        graph: the graph, modified in place.

    Returns:
        The values of the removed results, by their positions.

    Example:
        >>> import torch
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> graph = make_fx(lambda x: (x + 1, torch.ones(2) * 3, x))(torch.zeros(2))
        >>> take_constants(graph)
        {1: tensor([3., 3.])}
        >>> graph(torch.zeros(2))
        [tensor([1., 1.]), tensor([0., 0.])]
    """
    nodes = list(graph.graph.nodes)
    changed = {base_of(found) for node in nodes for found in touched(node)}
    constant: set[fx.Node] = set()
    for node in nodes:
        if node.op == "call_function" and base_of(node) not in changed and constant.issuperset(node.all_input_nodes):
            constant.add(node)
    known: dict[fx.Node, Any] = {}

    def compute(node: fx.Node) -> Any:
        if node not in known:
            arguments, named = fx.map_arg((node.args, node.kwargs), compute)
            target: Any = node.target
            known[node] = target(*arguments, **named)
        return known[node]

    output = nodes[-1]
    results: Any = output.args[0]
    output.args = ([result for result in results if result not in constant],)
    graph.recompile()
    return {position: compute(result) for position, result in enumerate(results) if result in constant}

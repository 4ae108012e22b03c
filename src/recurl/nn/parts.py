"""Loops that run sequences in parts between the ends of episodes, as one call with resets.

The models in skrl's documentation cut all sequences wherever an episode ends in one of them::

    for i in range(len(indexes) - 1):
        i0, i1 = indexes[i], indexes[i + 1]
        rnn_output, (hidden, cell) = self.lstm(rnn_input[:, i0:i1, :], (hidden, cell))
        hidden[:, (terminated[:, i1 - 1]), :] = 0
        cell[:, (terminated[:, i1 - 1]), :] = 0
        rnn_outputs.append(rnn_output)
    rnn_output = torch.cat(rnn_outputs, dim=1)

Such a loop is found and replaced as those of :mod:`recurl.nn.loops` are.
"""

from __future__ import annotations

import ast
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from recurl.nn.source import Form, Loop, Place, collected, is_observed, names_in, pair_of_names, takes_place_of

__all__ = ["IN_PARTS", "run_parts"]

_CALL = "_recurl_run_parts"


def run_parts(layer: Any, x: Any, state: Any, ended: Any, cuts: Any) -> tuple[Any, Any]:
    """Run the loop over the parts of ``x``, ``[B, T, I]``, from zeros again after the parts where ``ended`` is true.

    Args:
        layer: what is called for each part: one call if it is a swapped layer, and nothing observes its calls.
        x: the sequences.
        state: the states before the first step: a pair, as an LSTM's, or one tensor.
        ended: bool ``[B, T]``, read at the last step of each part.
        cuts: the steps at which parts begin, and T.

    Returns:
        The outputs, joined along time, and the states after the last step.
    """
    if _is_one_call(layer, x, state, ended, cuts):
        resets = torch.zeros_like(ended)
        for at in cuts[1:-1]:
            resets[:, at] = ended[:, at - 1]
        output, state = layer(x, state, resets=resets)
        _zero(state, ended[:, -1])
        return output, state
    outputs: list[Tensor] = []
    for begin, end in pairwise(cuts):
        output, state = layer(x[:, begin:end], state)
        _zero(state, ended[:, end - 1])
        outputs.append(output)
    return torch.cat(outputs, 1), state


def _zero(state: Any, rows: Any) -> None:
    for one in state if isinstance(state, tuple) else (state,):
        one[:, rows] = 0


def _is_one_call(layer: Any, x: Any, state: Any, ended: Any, cuts: Any) -> bool:
    if is_observed(layer) or not layer.batch_first or not isinstance(x, Tensor) or x.ndim != 3:
        return False
    if not isinstance(ended, Tensor) or ended.dtype != torch.bool or ended.shape != x.shape[:2]:
        return False
    states = state if isinstance(state, tuple) else (state,)
    if not all(isinstance(one, Tensor) and one.ndim == 3 for one in states):
        return False
    if not isinstance(cuts, list) or not all(isinstance(one, int) for one in cuts) or len(cuts) < 2:
        return False
    return cuts[0] == 0 and cuts[-1] == x.shape[1] and all(begin < end for begin, end in pairwise(cuts))


def _runs_parts(loop: ast.stmt) -> bool:
    """Return whether a call in a loop looks like that of a layer on a part of its input: see :func:`run_parts`."""
    if not isinstance(loop, ast.For):
        return False
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and len(node.value.args) == 2:
            target, (part, state) = node.targets[0], node.value.args
            cut = isinstance(part, ast.Subscript) and any(isinstance(one, ast.Slice) for one in ast.walk(part))
            if cut and isinstance(target, ast.Tuple) and len(target.elts) == 2:
                states = names_in(target.elts[1])
                if states and states <= names_in(state):
                    return True
    return False


def _replaced(place: Place) -> tuple[str, int] | None:
    assert isinstance(place.statement, ast.For)
    call = takes_place_of(_parts_of(place.statement), place, ("1",), ("range", "len"))
    return None if call is None else (call, 0)


def _parts_of(loop: ast.For) -> Loop | None:
    """Return the parts of a loop as skrl's documentation has it, or None."""
    if loop.orelse or not isinstance(loop.target, ast.Name) or len(loop.body) < 4:
        return None
    i, (ends, step, *zeros, collects) = loop.target.id, loop.body
    cuts = ast.unparse(loop.iter).removeprefix("range(len(").removesuffix(") - 1)")
    bounds, called = _bounds(ends, cuts, i), _call_of(step)
    if ast.unparse(loop.iter) != f"range(len({cuts}) - 1)" or bounds is None or called is None:
        return None
    (begin, end), (layer, x, part, state, output) = bounds, called
    states = [one.strip("() ") for one in state.split(",")]
    outputs, ended = collected(collects, output), _zeroed(zeros, states, end)
    if part not in (f"{x}[:, {begin}:{end}, :]", f"{x}[:, {begin}:{end}]") or outputs is None or ended is None:
        return None
    temporary = frozenset({i, begin, end, output})
    kept = [*states, outputs, x, ended, cuts, layer.partition(".")[0]]
    if len({*temporary, *kept}) != 4 + len(kept):
        return None
    call = f"{_CALL}({layer}, {x}, {state}, {ended}, {cuts})"
    return Loop(outputs, f"{outputs}, {state} = {call}\n{outputs} = [{outputs}]", temporary)


def _bounds(statement: ast.stmt, cuts: str, i: str) -> tuple[str, str] | None:
    """Return the names in ``begin, end = cuts[i], cuts[i + 1]``."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1 or not cuts.isidentifier():
        return None
    return (
        pair_of_names(statement.targets[0])
        if ast.unparse(statement.value) == f"({cuts}[{i}], {cuts}[{i} + 1])"
        else None
    )


def _call_of(step: ast.stmt) -> tuple[str, str, str, str, str] | None:
    """Return the layer, its whole input, the part, the states and the output of ``output, h = layer(x[...], h)``."""
    call = step.value if isinstance(step, ast.Assign) else None
    if not isinstance(step, ast.Assign) or len(step.targets) != 1 or not isinstance(call, ast.Call):
        return None
    target, layer = step.targets[0], ast.unparse(call.func)
    if not isinstance(target, ast.Tuple) or len(target.elts) != 2 or len(call.args) != 2 or call.keywords:
        return None
    (output, after), (part, given) = target.elts, call.args
    if not isinstance(output, ast.Name) or not isinstance(part, ast.Subscript) or not isinstance(part.value, ast.Name):
        return None
    named = isinstance(after, ast.Name) or pair_of_names(after) is not None
    if not named or ast.unparse(after) != ast.unparse(given) or not all(map(str.isidentifier, layer.split("."))):
        return None
    return layer, part.value.id, ast.unparse(part), ast.unparse(given), output.id


def _zeroed(zeros: list[ast.stmt], states: list[str], end: str) -> str | None:
    """Return the name of the flags by which statements zero every state once, ``h[:, ended[:, end - 1], :] = 0``."""
    left, flags = list(states), set[str]()
    for one in zeros:
        target, _, value = ast.unparse(one).partition(" = ")
        state = next((name for name in left if target.startswith(f"{name}[:, ")), None)
        if state is None or value not in ("0", "0.0"):
            return None
        left.remove(state)
        index = target.removeprefix(f"{state}[:, ").removesuffix("]").removesuffix(", :")
        flags.add(index.removesuffix(f"[:, {end} - 1]"))
        if target not in (f"{state}[:, {index}]", f"{state}[:, {index}, :]") or not index.endswith(f"[:, {end} - 1]"):
            return None
    (ended, *others) = flags or {""}
    return ended if not left and not others and ended.isidentifier() else None


IN_PARTS = Form(
    hint="range",
    does="runs a layer on parts of sequences in a loop",
    found=_runs_parts,
    replaced=_replaced,
    call=_CALL,
    run=run_parts,
    now="a loop over parts of sequences, now one call with resets",
)

"""Check of the influence of the state on the outputs of a policy and on its action."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from recurl.diagnostics import experiment as ex
from recurl.diagnostics.parts import keys_of, links
from recurl.diagnostics.preserve import other_weights
from recurl.diagnostics.result import PROBLEMS, Fault, check
from recurl.diagnostics.runs import Call, record
from recurl.keys import ACTION, NEXT, NestedKey, is_action

_CHOICES = 8  # number of trials, as the best action need not change when its value does


def moves(
    policy: Any,
    roots: TensorDictBase,
    states: list[NestedKey],
    at: Tensor,
    read: Callable[[TensorDictBase], list[Tensor]],
) -> bool:
    """Return whether altering ``states`` at the tokens ``at`` changes the result of ``read`` on the roots.

    If it doesn't, the weights may be the reason, such as a layer initialised with zeros: other weights are tried too.
    """
    trials = 2 if any(value.is_floating_point() for value in read(roots)) else _CHOICES
    for weights in (nullcontext(), *(other_weights(policy, seed) for seed in range(trials))):
        with weights, suppress(*PROBLEMS):  # a policy need not accept arbitrary states and weights
            before = read(roots)
            for alter in (ex.exchanged, ex.with_noise):
                after = read(alter(roots, states, at))
                if any(ex.distance(value, old, at) > 0 for value, old in zip(after, before, strict=True)):
                    return True
    return False


@check("action")
def check_action(policy: Any, batch: TensorDictBase) -> str:
    """Check that the action depends on the memory: altering the states changes the inputs of the action's choice.

    These are the parameters of its distribution, the action values, or else the action itself. A memory that runs after
    the choice of the action, such as a critic's, is exempt.

    Args:
        policy: the policy.
        batch: batch as collected, ``[*B, T]``.
    """
    states = ex.stored_states(policy, batch)
    inside = ~ex.flags_of(batch).reshape(-1)
    if not inside.any():
        return "every step begins an episode: nothing to compare"
    roots = ex.tokens(batch).exclude(ACTION)
    calls, outcome = record(policy, roots, False)
    chooses = _choosing(policy, calls)
    if chooses is not None and _behind(policy, calls, chooses, states):
        return "the memory runs after the choice of the action: only the critic uses it"
    pairs = zip(_action(policy, calls, outcome), _action(policy, *record(policy, roots, False, seed=1)), strict=True)
    drawn = any(ex.differ(*pair) for pair in pairs)
    drawn |= chooses is not None and _is_sampler(chooses.module)
    if not moves(policy, roots, states, inside, partial(_decisive, policy, drawn)):
        written = ", ".join(map(repr, _features(policy, states)))
        read = "" if chooses is None else f" ({chooses} reads {', '.join(map(repr, chooses.inputs))})"
        raise Fault(
            f"altering the states does not change the inputs of the action's choice{read}: no memory reaches it",
            f"let the layers before the action read the outputs of the memory{f', {written}' if written else ''}: "
            "in_keys=[...]; if only a critic is to have memory, put it after the actor: "
            "TensorDictSequential(actor, critic)",
        )
    return "altering the states changes the inputs of the action's choice"


def _features(policy: Any, states: list[NestedKey]) -> list[NestedKey]:
    """Return the root keys that the modules with memory write."""
    memories = [module for module in links(policy).values() if set(states) & set(keys_of(module, "in_keys"))]
    return [key for module in memories for key in keys_of(module, "out_keys") if isinstance(key, str) or key[0] != NEXT]


def _choosing(policy: Any, calls: list[Call]) -> Call | None:
    """Return the call of the module that chose the action; later ones may alter it, for exploration."""
    parts = links(policy)
    chosen = (call for call in calls if any(map(is_action, keys_of(call.module, "out_keys"))))
    return next((call for call in chosen if call.name in parts), None)


def _behind(policy: Any, calls: list[Call], chooses: Call, states: list[NestedKey]) -> bool:
    """Return whether all modules that read a state run after the choice of the action."""
    parts = links(policy)
    reading = [
        number
        for number, call in enumerate(calls)
        if call.name in parts and set(states) & set(keys_of(call.module, "in_keys"))
    ]
    return bool(reading) and min(reading) > calls.index(chooses)


def _action(policy: Any, calls: list[Call], outcome: TensorDictBase) -> list[Tensor]:
    """Return the parts of the action as chosen, before any exploration."""
    chooses = _choosing(policy, calls)
    if chooses is None:
        return [outcome.get(key) for key in ex.actions(outcome)]
    return [value for key, value in chooses.outputs.items() if not isinstance(key, int) and is_action(key)]


def _decisive(policy: Any, drawn: bool, roots: TensorDictBase) -> list[Tensor]:
    """Return the action; if it is ``drawn``, the inputs of its choice instead."""
    calls, outcome = record(policy, roots, False)
    chooses = _choosing(policy, calls)
    if not drawn:
        return _action(policy, calls, outcome)
    if chooses is not None:
        return list(chooses.inputs.values())
    return [outcome.get(key) for key in ex.written(roots, outcome)]


def _is_sampler(module: object) -> bool:
    return hasattr(module, "get_dist") or hasattr(module, "action_value_key")

"""Does the state matter to what a policy computes, and to the action that it chooses?"""

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
from recurl.keys import ACTION, NEXT, NestedKey

_CHOICES = 8  # trials: the best action needn't change whenever its value does


def moves(
    policy: Any,
    roots: TensorDictBase,
    states: list[NestedKey],
    at: Tensor,
    read: Callable[[TensorDictBase], list[Tensor]],
) -> bool:
    """Whether altering ``states`` at the tokens ``at`` alters what ``read`` returns of the roots.

    If not, that may be the weights' doing, as of a layer that starts from zero: it is tried with others too.
    """
    trials = 2 if any(value.is_floating_point() for value in read(roots)) else _CHOICES
    for weights in (nullcontext(), *(other_weights(policy, seed) for seed in range(trials))):
        with weights, suppress(*PROBLEMS):  # not every policy takes any states and weights
            before = read(roots)
            for alter in (ex.exchanged, ex.with_noise):
                after = read(alter(roots, states, at))
                if any(ex.distance(value, old, at) > 0 for value, old in zip(after, before, strict=True)):
                    return True
    return False


@check("action")
def check_action(policy: Any, batch: TensorDictBase) -> str:
    """Check that the action depends on the memory: altering the states moves what it is chosen by.

    That is the parameters of its distribution, the values of the actions, or else the action itself. A memory that runs
    behind the choice of the action, as a critic's does, has no part in it.

    Args:
        policy: the policy.
        batch: as collected, ``[*B, T]``.
    """
    states = ex.stored_states(policy, batch)
    inside = ~ex.flags_of(batch).reshape(-1)
    if not inside.any():
        return "every step begins an episode: nothing to compare"
    roots = ex.tokens(batch).exclude(ACTION)
    calls, outcome = record(policy, roots, False)
    chooses = _choosing(policy, calls)
    if chooses is not None and _behind(policy, calls, chooses, states):
        return "the memory runs behind the choice of the action: it serves the critic alone"
    drawn = ex.differ(_action(policy, calls, outcome), _action(policy, *record(policy, roots, False, seed=1)))
    drawn |= chooses is not None and _is_sampler(chooses.module)
    if not moves(policy, roots, states, inside, partial(_decisive, policy, drawn)):
        written = ", ".join(map(repr, _features(policy, states)))
        read = "" if chooses is None else f" ({chooses} reads {', '.join(map(repr, chooses.inputs))})"
        raise Fault(
            f"altering the states leaves what the action is chosen by as it is{read}: no memory reaches it",
            f"let the layers in front of the action read what the memory writes{f', {written}' if written else ''}: "
            "in_keys=[...]; where only a critic is to remember, put it behind the actor: "
            "TensorDictSequential(actor, critic)",
        )
    return "altering the states moves what the action is chosen by"


def _features(policy: Any, states: list[NestedKey]) -> list[NestedKey]:
    """Return what the modules with a memory write at the root."""
    memories = [module for module in links(policy).values() if set(states) & set(keys_of(module, "in_keys"))]
    return [key for module in memories for key in keys_of(module, "out_keys") if isinstance(key, str) or key[0] != NEXT]


def _choosing(policy: Any, calls: list[Call]) -> Call | None:
    """Return the call of the module that chose the action; those that follow may alter it, for exploration."""
    parts = links(policy)
    return next((call for call in calls if call.name in parts and ACTION in keys_of(call.module, "out_keys")), None)


def _behind(policy: Any, calls: list[Call], chooses: Call, states: list[NestedKey]) -> bool:
    """Whether all modules that read a state run behind the choice of the action."""
    parts = links(policy)
    reading = [
        number
        for number, call in enumerate(calls)
        if call.name in parts and set(states) & set(keys_of(call.module, "in_keys"))
    ]
    return bool(reading) and min(reading) > calls.index(chooses)


def _action(policy: Any, calls: list[Call], outcome: TensorDictBase) -> Tensor:
    """Return the action as it was chosen."""
    chooses = _choosing(policy, calls)
    return outcome.get(ACTION) if chooses is None else chooses.outputs[ACTION]


def _decisive(policy: Any, drawn: bool, roots: TensorDictBase) -> list[Tensor]:
    """Return the action; or, where it is ``drawn``, what it is chosen by."""
    calls, outcome = record(policy, roots, False)
    chooses = _choosing(policy, calls)
    if not drawn:
        return [_action(policy, calls, outcome)]
    if chooses is not None:
        return list(chooses.inputs.values())
    return [outcome.get(key) for key in ex.written(roots, outcome)]


def _is_sampler(module: object) -> bool:
    return hasattr(module, "get_dist") or hasattr(module, "action_value_key")

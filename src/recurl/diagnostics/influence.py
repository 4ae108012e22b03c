"""Check of the influence of the state on a policy's outputs and action."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from recurl.core.keys import ACTION, NEXT, NestedKey, is_action
from recurl.diagnostics import experiment as ex
from recurl.diagnostics.parts import keys_of, leaf_modules
from recurl.diagnostics.preserve import other_weights
from recurl.diagnostics.result import PROBLEMS, Fault, check
from recurl.diagnostics.runs import Call, record

_TRIALS = 8  # several, since the greedy action may stay the same when its value changes


def changes_result(
    policy: Any,
    roots: TensorDictBase,
    states: list[NestedKey],
    at: Tensor,
    read: Callable[[TensorDictBase], list[Tensor]],
) -> bool:
    """Return whether altering ``states`` at the tokens ``at`` changes the result of ``read`` on the roots.

    If nothing changes, the weights may be the reason, such as a zero-initialized layer, so other weights are tried too.
    """
    trials = 2 if any(value.is_floating_point() for value in read(roots)) else _TRIALS
    for weights in (nullcontext(), *(other_weights(policy, seed) for seed in range(trials))):
        with weights, suppress(*PROBLEMS):  # a policy need not accept arbitrary states and weights
            before = read(roots)
            for alter in (ex.with_exchanged, ex.with_noise):
                after = read(alter(roots, states, at))
                if any(ex.distance(value, old, at) > 0 for value, old in zip(after, before, strict=True)):
                    return True
    return False


@check("action")
def check_action(policy: Any, batch: TensorDictBase) -> str:
    """Check that the action depends on the memory: altering the states changes the inputs of the action's choice.

    The inputs are the parameters of its distribution, the action values, or else the action itself. A memory that runs
    after the choice of the action, such as a critic's, is exempt.

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
    choice = _choice_of_action(policy, calls)
    if choice is not None and _memory_after_choice(policy, calls, choice, states):
        return "the memory runs after the choice of the action: only the critic uses it"
    pairs = zip(_action(policy, calls, outcome), _action(policy, *record(policy, roots, False, seed=1)), strict=True)
    sampled = any(ex.differ(*pair) for pair in pairs)
    sampled |= choice is not None and _is_sampler(choice.module)
    if not changes_result(policy, roots, states, inside, partial(_choice_inputs, policy, sampled)):
        written = ", ".join(map(repr, _features(policy, states)))
        read = "" if choice is None else f" ({choice} reads {', '.join(map(repr, choice.inputs))})"
        raise Fault(
            f"altering the states does not change the inputs of the action's choice{read}: no memory reaches it",
            f"let the layers before the action read the outputs of the memory{f', {written}' if written else ''}: "
            "in_keys=[...]; if only a critic should have memory, put it after the actor: "
            "TensorDictSequential(actor, critic)",
        )
    return "altering the states changes the inputs of the action's choice"


def _features(policy: Any, states: list[NestedKey]) -> list[NestedKey]:
    """Return the root keys written by the modules with memory."""
    memories = [module for module in leaf_modules(policy).values() if set(states) & set(keys_of(module, "in_keys"))]
    return [key for module in memories for key in keys_of(module, "out_keys") if isinstance(key, str) or key[0] != NEXT]


def _choice_of_action(policy: Any, calls: list[Call]) -> Call | None:
    """Return the call of the module that chose the action; later modules may alter the action for exploration."""
    parts = leaf_modules(policy)
    chosen = (call for call in calls if any(map(is_action, keys_of(call.module, "out_keys"))))
    return next((call for call in chosen if call.name in parts), None)


def _memory_after_choice(policy: Any, calls: list[Call], choice: Call, states: list[NestedKey]) -> bool:
    """Return whether all modules that read a state run after the choice of the action."""
    parts = leaf_modules(policy)
    reading = [
        number
        for number, call in enumerate(calls)
        if call.name in parts and set(states) & set(keys_of(call.module, "in_keys"))
    ]
    return bool(reading) and min(reading) > calls.index(choice)


def _action(policy: Any, calls: list[Call], outcome: TensorDictBase) -> list[Tensor]:
    """Return the parts of the action as chosen, before any exploration."""
    choice = _choice_of_action(policy, calls)
    if choice is None:
        return [outcome.get(key) for key in ex.actions(outcome)]
    return [value for key, value in choice.outputs.items() if not isinstance(key, int) and is_action(key)]


def _choice_inputs(policy: Any, sampled: bool, roots: TensorDictBase) -> list[Tensor]:
    """Return the action, or the inputs of its choice if ``sampled``."""
    calls, outcome = record(policy, roots, False)
    choice = _choice_of_action(policy, calls)
    if not sampled:
        return _action(policy, calls, outcome)
    if choice is not None:
        return list(choice.inputs.values())
    return [outcome.get(key) for key in ex.computed_keys(roots, outcome)]


def _is_sampler(module: object) -> bool:
    return hasattr(module, "get_dist") or hasattr(module, "action_value_key")

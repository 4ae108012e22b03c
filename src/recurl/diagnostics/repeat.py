"""Check that repeated calls of a policy return the same outputs."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase

from recurl._torch import Dropout
from recurl.diagnostics import experiment as ex
from recurl.diagnostics.parts import keys_of, links, submodules
from recurl.diagnostics.preserve import evaluating
from recurl.diagnostics.result import Fault, check
from recurl.diagnostics.runs import Call, first_to_differ, record, run_again
from recurl.diagnostics.states import first_root
from recurl.keys import ACTION, NestedKey, is_action


@check("repeat")
def check_repeat(policy: Any, batch: TensorDictBase) -> str:
    """Check that the policy, in its current mode, returns the same outputs for the same steps at every call.

    A loss recomputes the outputs of collection, which dropout, other noise and state kept inside the policy would
    change. Only the action may be random, and entries that depend on it.

    Args:
        policy: the policy, in the mode (training or evaluation) in which it collects.
        batch: batch as collected, ``[*B, T]``.
    """
    _refuse_hidden_state(policy, first_root(batch))
    for data, mode in ((ex.tokens(batch), False), (ex.sequences(policy, batch)[0], True)):
        noisy, culprit = _noise(policy, data, mode)
        if noisy or culprit:
            what = repr(noisy[0]) if noisy else "the output of the policy"
            raise Fault(
                f"{what} of the same steps differs at each call: {culprit or 'the policy'} draws random numbers",
                _fix_of_noise(policy, data, mode),
            )
    return f"the same steps give the same outputs at every call, {_mode(policy)}"


def _mode(policy: Any) -> str:
    training = {module.training for module in submodules(policy).values()}
    names = {True: "in training mode", False: "in evaluation mode"}
    return names[training.pop()] if len(training) == 1 else "in its current mode"


def _refuse_hidden_state(policy: Any, root: TensorDictBase) -> None:
    first, second = run_again(policy, root, False)
    random = ex.drawn(policy, root, False)
    kept = [key for key in ex.differing(first, second) if key not in random]
    if not kept:
        return
    with evaluating(policy):
        cured = not ex.differing(*run_again(policy, root, False))
    fix = ex.USE_MODULE + "; freeze statistics within a batch, as ObservationNorm does"
    raise Fault(
        f"{kept[0]!r} differs when the same root is given again: the policy keeps a state in itself, which no batch "
        "holds and no reset clears",
        ex.EVALUATE if cured else fix,
    )


def _noise(policy: Any, data: TensorDictBase, mode: bool) -> tuple[list[NestedKey], str]:
    """Return the keys of the entries that are random but must not be, and the module at fault (``""`` if none)."""
    calls, outcome = record(policy, data, mode)
    others, other = record(policy, data, mode, seed=1)
    random = ex.differing(outcome, other)
    dropped = next((call for call, twin in zip(calls, others, strict=False) if _drops(call, twin)), None)
    chosen = _following_the_action(policy, calls)
    noisy = [key for key in random if key not in chosen and not is_action(key) and not str(key).endswith("log_prob")]
    name, module = first_to_differ(calls, others, ex.differ)
    if chosen == {ACTION} and (module is None or module is policy):
        noisy = []  # in an opaque policy, random entries may depend on the action
    if dropped is not None:
        return noisy, str(dropped)
    return noisy, name if noisy else ""


def _drops(call: Call, twin: Call) -> bool:
    return isinstance(call.module, Dropout) and ex.differ(call.outputs[0], twin.outputs[0])


def _following_the_action(policy: Any, calls: list[Call]) -> set[NestedKey]:
    """Return the keys of the entries that may be random: the action, and outputs of modules that write or read it."""
    parts, drawn = links(policy), set[NestedKey]([ACTION])
    for call in calls:
        written = keys_of(call.module, "out_keys") if call.name in parts else []
        if any(map(is_action, written)) or drawn & set(keys_of(call.module, "in_keys")):
            drawn |= set(written)
    return drawn


def _fix_of_noise(policy: Any, data: TensorDictBase, mode: bool) -> str:
    with evaluating(policy):
        noisy, culprit = _noise(policy, data, mode)
    if not noisy and not culprit:
        return ex.EVALUATE + "; or remove the noise (dropout) from the policy"
    return (
        "remove the noise from the policy, or draw it once per batch and not in forward; explore through the choice of "
        "the action: ProbabilisticActor, EGreedyModule"
    )

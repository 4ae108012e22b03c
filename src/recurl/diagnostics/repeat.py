"""Check that repeated calls of a policy give the same outputs."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase

from recurl.core.keys import ACTION, NestedKey, is_action
from recurl.core.torch_compat import DROPOUTS
from recurl.diagnostics import experiment as ex
from recurl.diagnostics.parts import keys_of, leaf_modules, submodules
from recurl.diagnostics.preserve import evaluating
from recurl.diagnostics.result import Fault, check
from recurl.diagnostics.runs import Call, first_difference, record, run_twice
from recurl.diagnostics.states import first_root


@check("repeat")
def check_repeat(policy: Any, batch: TensorDictBase) -> str:
    """Check that the policy, in its current mode, gives the same outputs for the same steps in every call.

    Losses recompute the outputs of collection, which dropout, other noise and internal state would change. Only the
    action and entries that depend on it may be random.

    Args:
        policy: the policy, in the mode (training or evaluation) used for collection.
        batch: batch as collected, ``[*B, T]``.
    """
    _raise_on_internal_state(policy, first_root(batch))
    for data, mode in ((ex.tokens(batch), False), (ex.sequences(policy, batch)[0], True)):
        noisy, culprit = _noise(policy, data, mode)
        if noisy or culprit:
            what = repr(noisy[0]) if noisy else "the output of the policy"
            raise Fault(
                f"{what} for the same steps differs between calls: {culprit or 'the policy'} draws random numbers",
                _noise_fix(policy, data, mode),
            )
    return f"the same steps give the same outputs in every call, {_mode(policy)}"


def _mode(policy: Any) -> str:
    training = {module.training for module in submodules(policy).values()}
    names = {True: "in training mode", False: "in evaluation mode"}
    return names[training.pop()] if len(training) == 1 else "in its current mode"


def _raise_on_internal_state(policy: Any, root: TensorDictBase) -> None:
    first, second = run_twice(policy, root, False)
    random = ex.random_keys(policy, root, False)
    kept = [key for key in ex.differing(first, second) if key not in random]
    if not kept:
        return
    with evaluating(policy):
        fixed_by_eval = not ex.differing(*run_twice(policy, root, False))
    fix = ex.USE_MODULE + "; freeze statistics within a batch, as ObservationNorm does"
    raise Fault(
        f"{kept[0]!r} differs between calls with the same root: the policy keeps internal state, which is not stored "
        "in batches and not cleared by resets",
        ex.EVALUATE if fixed_by_eval else fix,
    )


def _noise(policy: Any, data: TensorDictBase, mode: bool) -> tuple[list[NestedKey], str]:
    """Return the keys of entries that must not be random but are, and the module at fault (``""`` if none)."""
    calls, outcome = record(policy, data, mode)
    others, other = record(policy, data, mode, seed=1)
    random = ex.differing(outcome, other)
    dropped = next((call for call, twin in zip(calls, others, strict=False) if _dropout_differs(call, twin)), None)
    chosen = _depending_on_action(policy, calls)
    noisy = [key for key in random if key not in chosen and not is_action(key) and not str(key).endswith("log_prob")]
    name, module = first_difference(calls, others, ex.differ)
    if chosen == {ACTION} and (module is None or module is policy):
        noisy = []  # in an opaque policy these entries may depend on the action
    if dropped is not None:
        return noisy, str(dropped)
    return noisy, name if noisy else ""


def _dropout_differs(call: Call, twin: Call) -> bool:
    return isinstance(call.module, DROPOUTS) and ex.differ(call.outputs[0], twin.outputs[0])


def _depending_on_action(policy: Any, calls: list[Call]) -> set[NestedKey]:
    """Return the keys of entries that may be random: the action, and outputs of modules that write or read it."""
    parts, random = leaf_modules(policy), set[NestedKey]([ACTION])
    for call in calls:
        written = keys_of(call.module, "out_keys") if call.name in parts else []
        if any(map(is_action, written)) or random & set(keys_of(call.module, "in_keys")):
            random |= set(written)
    return random


def _noise_fix(policy: Any, data: TensorDictBase, mode: bool) -> str:
    with evaluating(policy):
        noisy, culprit = _noise(policy, data, mode)
    if not noisy and not culprit:
        return ex.EVALUATE + "; or remove the noise (dropout) from the policy"
    return (
        "remove the noise from the policy, or sample it once per batch instead of in forward; explore through the "
        "choice of the action: ProbabilisticActor, EGreedyModule"
    )

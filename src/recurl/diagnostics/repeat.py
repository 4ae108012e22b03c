"""Checks of a policy's calls: does it compute the same when it is called again, and of each row alone?"""

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
from recurl.keys import ACTION, NestedKey


@check("repeat")
def check_repeat(policy: Any, batch: TensorDictBase) -> str:
    """Check that the policy, in the mode that it is in, computes the same of the same steps whenever it is called.

    A loss computes anew what collecting computed. Dropout and other noise, and whatever a policy keeps in itself from
    call to call, make that another thing. Only the action may be drawn, and what follows from it.

    Args:
        policy: the policy, in training or evaluation mode as it collects.
        batch: as collected, ``[*B, T]``.
    """
    _refuse_hidden_state(policy, first_root(batch))
    for data, mode in ((ex.tokens(batch), False), (ex.sequences(policy, batch)[0], True)):
        noisy, culprit = _noise(policy, data, mode)
        if noisy or culprit:
            what = f"{noisy[0]!r} of the same steps is" if noisy else "what the policy computes of the same steps is"
            raise Fault(
                f"{what} another one each time: {culprit or 'the policy'} draws random numbers",
                _quiet(policy, data, mode),
            )
    return f"the same steps give the same whenever the policy is called, {_mode(policy)}"


def _mode(policy: Any) -> str:
    training = {module.training for module in submodules(policy).values()}
    names = {True: "in training mode", False: "in evaluation mode"}
    return names[training.pop()] if len(training) == 1 else "in the mode that it is in"


def _refuse_hidden_state(policy: Any, root: TensorDictBase) -> None:
    first, second = run_again(policy, root, False)
    random = ex.drawn(policy, root, False)
    kept = [key for key in ex.differing(first, second) if key not in random]
    if not kept:
        return
    with evaluating(policy):
        cured = not ex.differing(*run_again(policy, root, False))
    fix = ex.USE_MODULE + "; keep statistics as they are within a batch, as ObservationNorm does"
    raise Fault(
        f"{kept[0]!r} differs when the same root is given again: the policy keeps a state in itself, which no batch "
        "holds and no reset clears",
        ex.EVALUATE if cured else fix,
    )


def _noise(policy: Any, data: TensorDictBase, mode: bool) -> tuple[list[NestedKey], str]:
    """Return the entries that are drawn though they should not be, and the module that draws; none, and ''."""
    calls, outcome = record(policy, data, mode)
    others, other = record(policy, data, mode, seed=1)
    random = ex.differing(outcome, other)
    dropped = next((call for call, twin in zip(calls, others, strict=False) if _drops(call, twin)), None)
    chosen = _following_the_action(policy, calls)
    noisy = [key for key in random if key not in chosen and not str(key).endswith("log_prob")]
    name, module = first_to_differ(calls, others, ex.differ)
    if chosen == {ACTION} and (module is None or module is policy):
        noisy = []  # of a policy that nothing is known of, what is drawn may follow from the action
    if dropped is not None:
        return noisy, str(dropped)
    return noisy, name if noisy else ""


def _drops(call: Call, twin: Call) -> bool:
    return isinstance(call.module, Dropout) and ex.differ(call.outputs[0], twin.outputs[0])


def _following_the_action(policy: Any, calls: list[Call]) -> set[NestedKey]:
    """Return the entries that may be drawn: the action, what is written along with it, and what reads any of them."""
    parts, drawn = links(policy), set[NestedKey]([ACTION])
    for call in calls:
        written = keys_of(call.module, "out_keys") if call.name in parts else []
        if ACTION in written or drawn & set(keys_of(call.module, "in_keys")):
            drawn |= set(written)
    return drawn


def _quiet(policy: Any, data: TensorDictBase, mode: bool) -> str:
    with evaluating(policy):
        noisy, culprit = _noise(policy, data, mode)
    if not noisy and not culprit:
        return ex.EVALUATE + "; or take the noise (dropout) out of the policy"
    return (
        "take the noise out of the policy, or draw it once per batch and not in forward; explore by how the action is "
        "chosen: ProbabilisticActor, EGreedyModule"
    )

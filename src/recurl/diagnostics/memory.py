"""Checks that the state is fed back between steps, reset, and used."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from recurl.core.keys import IS_INIT, NestedKey, next_key
from recurl.diagnostics import experiment as ex
from recurl.diagnostics.influence import changes_result
from recurl.diagnostics.preserve import other_weights
from recurl.diagnostics.result import PROBLEMS, Fault, check
from recurl.diagnostics.runs import run
from recurl.sequences.index import SequenceIndex


@check("feedback")
def check_feedback(policy: Any, batch: TensorDictBase) -> str:
    """Check that every state is fed back: the root of each step contains the ``"next"`` state of the previous step.

    Unless there is a boundary before step n, root state n must equal next state n-1. The next state must be the one
    that the policy computes from the root.

    Args:
        policy: policy that collected ``batch``, with the same weights.
        batch: batch as collected, ``[*B, T]``.
    """
    states = ex.stored_states(policy, batch)
    inside = ~SequenceIndex.of(batch).starts if ex.has(batch, IS_INIT) else _not_first(batch)
    worst = 0.0
    for key in states:
        after = batch.get(next_key(key)).reshape(batch.numel(), -1)
        worst = max(
            worst,
            ex.require_close(
                f"root state {key!r} of a step and next state of the previous step",
                batch.get(key),
                after.roll(1, 0),
                inside,
                "carry the state: td = step_mdp(td), or _, td = env.step_and_maybe_reset(td), as Collector and "
                "env.rollout do; a pass in recurrent mode overwrites ('next', state): check the batch before it",
            ),
        )
    roots = ex.tokens(batch)
    stepped, random = run(policy, roots, False), ex.random_keys(policy, roots, False)
    for key in states:
        value = stepped.get(next_key(key), None)
        if value is not None and next_key(key) not in random:
            ex.require_close(
                f"the next state {key!r} in the batch and the one that the policy computes",
                batch.get(next_key(key)),
                value,
                torch.ones_like(inside),
                f"remove what overwrites {next_key(key)!r} after the policy (a transform or a postproc?)",
                ex.rounded(policy, roots, False, next_key(key)),
            )
    return f"{_names(states)}: root state n equals next state n-1 at {int(inside.sum())} steps (difference {worst:.0e})"


def _not_first(batch: TensorDictBase) -> Tensor:
    inside = torch.ones(batch.batch_size, dtype=torch.bool, device=batch.device)
    inside[..., 0] = False
    return inside.reshape(-1)


def _names(keys: list[NestedKey]) -> str:
    return ", ".join(map(str, keys))


@check("reset")
def check_reset(policy: Any, batch: TensorDictBase) -> str:
    """Check that episodes start from a zero state: zeros are stored, and any other stored state is ignored.

    A step with ``is_init`` starts from zero and a replay from the stored state, so both must be equal.

    Args:
        policy: the policy.
        batch: batch as collected, ``[*B, T]`` (in a sampled slice ``is_init`` may be set inside an episode).
    """
    states, flags = ex.stored_states(policy, batch), ex.flags_of(batch).reshape(-1)
    if not flags.any():
        return "no episode begins in this batch: nothing to compare"
    for key in states:
        largest = float(batch.get(key).reshape(flags.shape[0], -1)[flags].double().abs().max())
        if largest:
            raise Fault(f"an episode begins with a state {key!r} that is not zero (up to {largest:.2g})", ex.REWIRE)
    roots = ex.tokens(batch)
    before = run(policy, roots, False)
    after = run(policy, ex.with_exchanged(roots, states, flags), False)
    for key in ex.compared_keys(policy, roots, False, states):
        ex.require_close(
            f"at the first step of an episode, {key!r} with a zero and with another state",
            after.get(key),
            before.get(key),
            flags,
            ex.USE_MODULE + ": the module resets the state where is_init is True",
        )
    return f"zero at the beginning of {int(flags.sum())} episodes, and earlier states are ignored"


@check("memory")
def check_memory(policy: Any, batch: TensorDictBase) -> str:
    """Check that the state is used: it is not always zero, and altering it changes the outputs of the policy.

    If nothing changes, other weights are tried too, since weights may be initialized to zeros.

    Args:
        policy: the policy.
        batch: batch as collected, ``[*B, T]``.
    """
    states = ex.stored_states(policy, batch)
    roots = ex.tokens(batch)
    inside = ~ex.flags_of(batch).reshape(-1)
    for key in states:
        if not batch.get(next_key(key)).any() and _stays_zero(policy, roots, key):
            raise Fault(f"the state {next_key(key)!r} is zero after every step: there is no memory", ex.USE_MODULE)
    if not inside.any():
        return "every step begins an episode: nothing to compare"
    for key in states:
        others: list[NestedKey] = [next_key(other) for other in states if other != key]
        if not changes_result(policy, roots, [key], inside, partial(_computed, policy, others)):
            raise Fault(
                f"altering the state {key!r} changes nothing: the policy does not use it",
                ex.USE_MODULE + ", and let later layers read its output",
            )
    return f"altering {_names(states)} changes the outputs of the policy"


def _stays_zero(policy: Any, roots: TensorDictBase, key: NestedKey) -> bool:
    """Return whether a new state that is always zero stays zero with other weights and other inputs."""
    if run(policy, roots, False).get(next_key(key)).any():
        return True  # it was overwritten
    everywhere = torch.ones(roots.numel(), dtype=torch.bool, device=roots.device)
    inputs = [name for name, value in ex.leaves(roots) if value.is_floating_point() and name != key]
    for data in (roots, ex.with_noise(roots, inputs, everywhere, 100.0)):
        with other_weights(policy, 0), contextlib.suppress(*PROBLEMS):
            if run(policy, data, False).get(next_key(key)).any():
                return False
    return True


def _computed(policy: Any, others: list[NestedKey], data: TensorDictBase) -> list[Tensor]:
    """Return the outputs of a policy: root entries, the action, and ``others``."""
    after = run(policy, data, False)
    keys = [*ex.computed_keys(data, after), *ex.actions(after), *others]
    return [after.get(key) for key in keys if ex.has(after, key)]
